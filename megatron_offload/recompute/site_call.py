"""One call of a site, and how it runs again.

The graph is the original one: what the call saves is replaced by numbers, and the first that
backward asks for runs the call again. A backward inside a backward, as other checkpoints have
it, would sum the gradients of a tensor that is read inside and outside in another order.

What the call is given is saved as the hooks around it save. It runs again under the same
`CallState`, with the random states and the plain attributes that it had. In the first step, and now
and then, checksums of what it returns show whether it computes the same bits.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from megatron_offload.config import RECOMPUTE_SITES
from megatron_offload.engine.hooks import graph_break
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.observer import recompute
from megatron_offload.engine.saved_tensor import SavedTensor, changed_in_place
from megatron_offload.engine.transfers import Transfers
from megatron_offload.errors import StateError
from megatron_offload.memory.storage_ref import StorageRef, is_shared
from megatron_offload.model_map.structure import keeps_inside
from megatron_offload.recompute.call_state import (
    CallState,
    PackHook,
    RandomStates,
    as_it_is,
    other_states,
    outside_vmap,
)
from megatron_offload.recompute.module_state import (
    Constants,
    ModuleLayout,
    ModuleState,
)
from megatron_offload.recompute.patches import PatchStack
from megatron_offload.recompute.proof import PROVE_EVERY, Proof, other_bits, sums_of
from megatron_offload.recompute.rerun import Enough, Form, Rerun

_logger = logging.getLogger(__name__)

_ROUTER = "megatron.core.transformer.moe.router"

_LOGS = "save_to_aux_losses_tracker", "get_moe_metrics_tracker"
"""What Megatron's router notes a loss by, up to 0.18 and from 0.19 on."""


class _Muted:
    """Notes nothing, whatever it is asked to."""

    __call__ = __getattr__ = lambda self, *_, **__: self


_running = RLock()
"""Held while a call runs again: it changes modules and random states, and puts them back."""


class Site:
    """What is known of a module whose calls are recomputed.

    Attributes:
        path: its dotted name.
        unit: the kind or pattern by which it was found, under which its bytes are counted.
        draws: whether it may draw random numbers, or ask for the grad mode.
        drops_inside: whether what it saves is dropped in forward.
        drops_output: whether what it returns is, where that is saved.
        refusal: why it is kept from here on, by what a call has shown.
        fills_late: whether a kernel fills what is saved last behind that: a rerun must not end
            there.
        layout: where its modules had what their forward reads, when that was last seen.
        forms: of what its last call has saved; calls that save the same keep one list.
        counted_share: of the bytes that a call saves, those that it hasn't saved before.
        proof: of what it returns.
        proven_in: the step in which it was proven last, by the training flags of its modules.
        drawn_in: the flags under which random numbers were drawn in a proof.
    """

    def __init__(self, path: str, unit: str, module: nn.Module, *, draws: bool) -> None:
        self.path, self.unit, self.draws, self.type = path, unit, draws, type(module)
        self.drops_inside = draws and not keeps_inside(module)
        self.drops_output = unit not in RECOMPUTE_SITES
        self.refusal, self.fills_late = "", False
        self.layout: ModuleLayout | None = None
        self.forms: list[Form] = []
        self.counted_share = 1.0
        self.said = set[str]()
        """Why sites of the model were kept so far."""
        self.prove_for(lambda: None)

    def prove_for(self, transfers: Callable[[], Transfers | None]) -> None:
        """Let all be proven anew: what was shown under another manager counts by its steps."""
        self.transfers = transfers
        self.proven_in: dict[tuple[bool, ...], int] = {}
        self.drawn_in = set[tuple[bool, ...]]()
        self.proof = Proof(self.path)

    def warn(self, refusal: str, *, is_asked_for: bool = True) -> None:
        """Say once for each reason that a site is kept; a warning to who has asked for it."""
        if refusal not in self.said:
            self.said.add(refusal)
            level = logging.WARNING if is_asked_for else logging.INFO
            text = "recompute: %s, and maybe others, is kept: %s; it may be offloaded"
            _logger.log(level, text, self.path, refusal)


@dataclass(eq=False, repr=False)
class ModuleCall:
    """A call of a site's module: what it needs to run again, but for the tensors it is given."""

    site: Site
    manager: PipelineOffloadManager
    """In whose forward it is."""
    state: ModuleState
    function: Callable[..., Any]
    """Runs the module's forward."""
    leaves: Sequence[Any]
    """What that takes; emptied when it is over."""
    random_states: RandomStates | None
    """None of what draws nothing, and while a graph is captured, where they can't be read."""

    def __post_init__(self) -> None:
        self._given = Constants([x for x in self.leaves if isinstance(x, torch.Tensor)])
        self._call_state = CallState(self.random_states, keeps_grad=self.site.draws)

    def output(self, *leaves: Any) -> Any:
        """Return what it returned, of the same arguments, or the first of several."""
        with _running:
            return first_of(self._run_again(leaves, needs_output=True))

    def _run_again(self, leaves: Sequence[Any], *, needs_output: bool = False) -> Any:
        return self.run(self.function, *leaves)

    def _refuse(self, why: str) -> None:
        """Keep the site from here on."""
        self.site.refusal = f"it {why}"
        self.site.warn(self.site.refusal, is_asked_for=not self.manager.rows_are_own)

    _fail = _refuse

    def close(self, output: Any) -> bool:
        """Know that it is over, and has returned this; return whether it may run again."""
        is_unchanged = self._given.are_unchanged()
        self.leaves, self._given = (), Constants(())
        if not is_unchanged:
            self._fail("changes in place what it is given")
        elif not self.state.is_unchanged():
            self._refuse("writes to its buffers or other tensors that it has")
        return not self.site.refusal

    def run(self, function: Callable[..., Any], *args: Any, pack: PackHook = as_it_is) -> Any:
        """Run a function under the state of this call; behind it all is as it was before.

        ``pack`` is given what it saves.
        """
        router = sys.modules.get(_ROUTER) if self.site.draws else None  # a norm routes nothing
        run = partial(self._call_state.run, function, *args, pack=pack)
        if router is None:
            return self.state.run(run, self.site.path, self.site.unit)
        with PatchStack() as patches:
            for log in _LOGS:  # an auxiliary loss is not noted twice
                if hasattr(router, log):
                    patches.replace(router, log, _Muted())
            return self.state.run(run, self.site.path, self.site.unit)


def first_of(output: Any) -> Any:
    """Return what is recomputed of what a module returns: the first of several."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


class SiteCall(ModuleCall):
    """One whose inside is dropped: what of that backward has not read yet.

    Raises:
        CorruptionError: where it is proven, the call has returned other bits than before.
        StateError: it has saved another number or kind of tensors.
        InPlaceModificationError: something that it takes was changed since.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        site, manager = self.site, self.manager
        self.depth = 0
        """How often the site has called itself and has not returned."""
        self._is_open, self._step_number = True, manager.step_number
        self.transfers = manager.transfers  # by which hooks that an interrupt has left are found
        pack, self._unpack = _top_saved_tensors_default_hooks(True) or (
            partial(SavedTensor, group_name=site.path),
            SavedTensor.unpack,
        )
        tensors = {id(x): x for x in self._given.tensors}
        self._inputs = {key: (pack(x), x.requires_grad) for key, x in tensors.items()}
        self._template = [(id(x), None) if id(x) in tensors else (0, x) for x in self.leaves]
        manager.decisions.last_call = ref(self)
        since = self._step_number - site.proven_in.get(self.state.training, -PROVE_EVERY)
        is_due = not 0 < since < PROVE_EVERY or manager.config.checking
        self.proves = is_due and self.random_states is not None
        if self.proves:
            self.state.keep_contents()
        self._others: Any = other_states()
        self._sums: Sequence[torch.Tensor] = ()
        self._states_after: RandomStates | None = None
        self._forms: list[Form] = []
        """Of each tensor that was saved."""
        self._num_bytes = 0
        self._counted: dict[tuple[int, int, int], StorageRef] = {}
        """By storage, offset and bytes, each once, where it is proven."""
        self._made: list[tuple[torch.Tensor, int, bool] | None] | None = None
        """As in its last `Rerun`."""

    @graph_break
    def pack(self, tensor: torch.Tensor) -> list[Any] | SavedTensor:
        """Return a number in place of a saved tensor, in a list; the pack hook."""
        if is_parameter(tensor) or ((base := tensor._base) is not None and is_parameter(base)):
            self._forms.append(None)
            return SavedTensor(tensor, self.site.path)
        number = len(self._forms)
        self._forms.append((tensor.shape, tensor.dtype))
        num_bytes = tensor.nbytes if tensor.layout is torch.strided else 0
        self._num_bytes += num_bytes
        if self.proves and num_bytes and torch._C._has_storage(tensor):
            key = tensor.untyped_storage()._cdata, int(tensor.storage_offset()), num_bytes
            if key not in self._counted:  # and no other storage gets its identity
                self._counted[key] = StorageRef(tensor.untyped_storage())
        return [number]

    @graph_break
    def unpack(self, packed: list[Any] | SavedTensor) -> torch.Tensor:
        """Return a saved tensor; the first of them runs the call again."""
        if isinstance(packed, SavedTensor):
            return packed.unpack()
        number, *kept = packed
        known = len(self._made or ())  # fewer where its forward has had a backward inside
        if not kept and (number >= known or not self._made or self._made[number] is None):
            self._run_again_as_given()
        assert self._made is not None
        found = kept[0] if kept else self._made[number]
        assert found is not None
        made, version, is_constant = found
        if made._version != version:
            what = f"a tensor of shape {list(made.shape)} that {self.site.path} saves,"
            raise changed_in_place(what, made._version, version)
        if is_constant and not kept:  # as long as its node has it, it is no gradient's own
            packed.append(found)
        if not (is_constant and is_shared(made)):  # nor is ever what others have
            self._made[number] = None
        return made

    def _run_again_as_given(self) -> None:
        with _running, outside_vmap():
            given = {
                key: self._unpack(record).detach().requires_grad_(needs_grad)
                for key, (record, needs_grad) in self._inputs.items()
            }
            self._run_again([given[key] if key else leaf for key, leaf in self._template])

    def _fail(self, why: str) -> None:
        """Say that what was dropped can't be had again."""
        raise StateError(
            f"{self.site.path} {why}, and so can't be recomputed; leave {self.site.unit!r} out of "
            "recompute"
        )

    def close(self, output: Any) -> bool:
        """Count what was dropped, and note what the call has made; it is over.

        Raises:
            StateError: it can't be recomputed: it has drawn random numbers that can't be drawn
                again, or has changed what it was given.
        """
        may_run = super().close(output)
        self._is_open, site, states = False, self.site, self.random_states
        site.forms = self._forms = site.forms if self._forms == site.forms else self._forms
        if self._others != other_states():
            if not self.manager.rows_are_own or isinstance(self, TriedCall):
                self._fail("draws random numbers of Python or numpy")
            self.proves = states is not None  # or a thread has: bits will say
        if self.proves and self._num_bytes:
            num_counted = sum(num_bytes for *_, num_bytes in self._counted)
            self._counted, site.counted_share = {}, num_counted / self._num_bytes
        if self.proves and states is not None:
            self._sums, self._states_after = sums_of(output), states.now()
            if not states.are_current():
                site.drawn_in.add(self.state.training)
        num_bytes = round(self._num_bytes * site.counted_share)
        self.transfers.stats.by_name[site.unit].recomputed_bytes += num_bytes
        return may_run

    @graph_break
    def _run_again(self, leaves: Sequence[Any], *, needs_output: bool = False) -> Any:
        site, proves = self.site, self.proves and not self._is_open
        runs_on, num_saved = needs_output or proves or site.fills_late, len(self._forms)
        rerun = Rerun(self._forms, proves, runs_on)
        made = rerun.made

        def run() -> tuple[Any, bool]:
            try:
                output, after = self.function(*leaves), self._states_after
                is_same = after is None or after.are_current()
            except (Enough, Exception):  # TorchScript makes another of it
                if runs_on or len(made) < num_saved:
                    raise
                return None, True
            if proves:
                saved = sums_of(made[:num_saved])
                site.fills_late |= not all(map(torch.equal, rerun.at_last_save, saved))
                is_same = is_same and all(map(torch.equal, sums_of(output), self._sums))
            return output, is_same

        again = partial(self.run, run, pack=rerun.keep)
        output, is_same = recompute(self.manager.observers, site.path, again)
        if rerun.forms != self._forms:
            raise StateError(
                f"{site.path} saved other tensors when it was recomputed: its forward must do "
                f"the same each time; leave {site.unit!r} out of recompute"
            )
        if not is_same and self.manager.rows_are_own and not isinstance(self, TriedCall):
            site.refusal = "it has had other bits when it ran again, and so have some gradients"
            site.warn(site.refusal)
        elif not is_same:
            raise other_bits(site.path, site.unit)
        if proves:
            self.proves, site.proven_in[self.state.training] = False, self._step_number
        self._made = made
        return output


class TriedCall(SiteCall):
    """One whose inside is kept, to see whether it could be dropped: backward runs it again.

    Where that fails, or has other bits, it is said once, and the site is kept from then on.
    """

    _is_over = False

    @graph_break
    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Return a record of a saved tensor; the pack hook."""
        self._forms.append((tensor.shape, tensor.dtype))
        return SavedTensor(tensor, self.site.path)

    _fail = ModuleCall._refuse

    @graph_break
    def unpack(self, packed: list[Any] | SavedTensor) -> torch.Tensor:
        """Return a saved tensor; the first of them runs the call again, and compares."""
        if not (self._is_over or self.site.refusal):
            self._is_over = True
            try:
                self._run_again_as_given()
            except torch.OutOfMemoryError:
                pass  # there is no room to try
            except Exception as error:  # noqa: BLE001 - whatever a module raises
                self._fail(f"can't run again with the same bits ({error})")
            self._made = None
        return super().unpack(packed)

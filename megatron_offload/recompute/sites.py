"""Layers, MLPs and attentions whose inside is dropped in forward and run again in backward.

The graph is the original one: what a site's call saves is replaced by numbers, and the first
that backward asks for runs the call again. A backward inside a backward, as other checkpoints have
it, would sum the gradients of a tensor that is read inside and outside in another order.

What the call is given is saved as the hooks around it save. It runs again under the same
`CallState`, with the random states and the plain attributes that it had. In the first step, and now
and then, checksums of what it returns show whether it computes the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from operator import eq, is_
from threading import RLock
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from megatron_offload.engine.checking import checksum
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.hooks import is_recording, owner_of_hooks, put_on, take_off
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.modes import has_modes, is_traced
from megatron_offload.engine.module_hooks import EagerHook, ModuleHook, hooks_of
from megatron_offload.engine.patches import PatchStack
from megatron_offload.engine.saved_tensor import SavedTensor, changed_in_place
from megatron_offload.errors import CorruptionError, StateError
from megatron_offload.recompute.call_state import CallState
from megatron_offload.recompute.random_states import RandomStates, are_captured
from megatron_offload.recompute.transformer_engine import is_quantising

_logger = logging.getLogger(__name__)

_LAYERS = ("TransformerLayer", "GradientCheckpointingLayer")
"""Classes, by their own name or that of a base, whose owners let them be recomputed."""

_PARTS = {
    "mlp": ("mlp", "feed_forward", "ffn", "ff"),
    "attention": ("self_attention", "cross_attention", "self_attn", "attn", "attention"),
}
"""What libraries call the parts of a layer."""

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)

_INNER = frozenset(vars(nn.Module()))
"""What each module has, besides what its class gives it."""

_ROUTER = "megatron.core.transformer.moe.router"

_running = RLock()
"""Held while a call runs again: it changes modules and random states, and puts them back."""

_PROVE_EVERY = 256
"""One step in so many is proven again."""


def find_sites(modules: Mapping[str, nn.Module], kinds: Iterable[str]) -> dict[str, str]:
    """Return the kind of each module that is a site of these kinds, by its dotted name.

    Layers are those of Megatron and Hugging Face, and the members of each list of modules that
    have one class and parts, except within another layer.
    """
    layers = {path for path, module in modules.items() if _is_layer(module)}
    for path, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        members = module._modules
        alike = {type(child) for child in members.values()}
        if len(alike) == 1 and all(map(_may_be_layer, members.values())):
            layers.update(f"{path}.{name}".lstrip(".") for name in members)
    layers = {path for path in layers if not any(path.startswith(f"{one}.") for one in layers)}
    found: dict[str, str] = {}
    for kind in kinds:
        paths = layers
        if kind != "layer":
            paths = {f"{layer}.{name}" for layer in layers for name in _PARTS[kind]}
        found.update((path, kind) for path in modules if path in paths)
    return found


def _may_be_layer(module: nn.Module | None) -> bool:
    """Whether a member of a list has parts, and is called itself."""
    is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return is_called and module is not None and any(module.children())


def _is_layer(module: nn.Module) -> bool:
    return any(base.__name__ in _LAYERS for base in type(module).__mro__)


def recompute_sites(
    modules: Mapping[str, nn.Module],
    kinds: Iterable[str],
    find_manager: Callable[[], PipelineOffloadManager | None],
) -> list[RemovableHandle]:
    """Hook the sites among these modules; the hooks of an earlier call on them go.

    ``find_manager`` returns whose forward it is; None where it is no manager's.
    """
    kinds, handles = list(kinds), []
    for module in modules.values() if kinds else ():
        hooks_of(Site, module)
    found, said = find_sites(modules, kinds), set[str]()
    for kind in kinds:
        if kind not in found.values():
            _logger.warning("recompute: no module here is a site of kind %r", kind)
    for path, kind in found.items():
        module = modules[path]
        site, own = Site(path, kind, module, find_manager, said), hooks_of(Site, module)
        own.append(module.register_forward_pre_hook(site.pre_hook, with_kwargs=True))
        own.append(module.register_forward_hook(site.hook, prepend=True, always_call=True))
        handles += own
    return handles


class Site:
    """One module whose calls are recomputed.

    Attributes:
        path: its dotted name.
        kind: ``layer``, ``mlp`` or ``attention``, under which its bytes are counted.
        refusal: why it is kept from here on, by what a call has shown.
        fills_late: whether a kernel fills what is saved last behind that, so that a rerun must not
            end there.
        proven_in: the step in which it was proven last, by the training flags of its modules.

    Args:
        said: why sites of this model were kept, as far as that was said.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        module: nn.Module,
        find_manager: Callable[[], PipelineOffloadManager | None],
        said: set[str],
    ) -> None:
        self.path, self.kind = path, kind
        self.refusal = ""
        self.fills_late = False
        self.proven_in: dict[tuple[bool, ...], int] = {}
        self.pre_hook, self.hook = EagerHook(self.begin), EagerHook(self.end)
        self._find_manager = find_manager
        self._forward, self._type = type(module).forward, type(module)
        self._said = said
        self._look_at(module)

    def _look_at(self, module: nn.Module) -> None:
        # Weak, for the module has this as a hook.
        self._parts = [(ref(part), (*part._modules.values(),)) for part in module.modules()]

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """Return the module and all that is in it now."""
        found = [part() for part, _ in self._parts]
        for part, (_, children) in zip(found, self._parts, strict=True):
            if part is None or (*part._modules.values(),) != children:
                self._look_at(module)
                return list(module.modules())
        return found  # type: ignore[return-value]

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Replace by numbers what the call saves that begins now, where it can be run again."""
        around = owner_of_hooks()
        if isinstance(around, SiteCall) and around.site is self:
            around.depth += 1  # it calls itself
        manager = self._find_manager()
        if manager is None or not manager.do_offload or not is_recording() or is_traced():
            return
        leaves, spec = args, None
        if kwargs or any(isinstance(x, (tuple, list, dict)) for x in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = self.parts(module)
        refusal = self.refusal or self._refusal(module, parts, leaves)
        if refusal:
            self.warn(refusal)
            return
        call = SiteCall(self, manager, parts, leaves, spec)
        put_on(call.pack, call.unpack)

    def warn(self, refusal: str) -> None:
        """Say once for each reason that a site is kept."""
        if refusal not in self._said:
            self._said.add(refusal)
            _logger.warning("recompute: %s, and maybe others, is kept: %s", self.path, refusal)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the call, which may have raised."""
        call = owner_of_hooks()
        if not isinstance(call, SiteCall) or call.site is not self:
            return
        if call.depth:
            call.depth -= 1
            return
        take_off(partial(eq, call.pack))
        call.close(output)

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the forward."""
        return self._forward(module, *args, **kwargs)

    def _refusal(self, module: nn.Module, parts: Sequence[nn.Module], leaves: Sequence[Any]) -> str:
        if has_modes():
            return "a mode of dispatch or of functions was entered"
        if is_quantising():
            return "its quantisers' scales change with every call"
        if type(module) is not self._type or "forward" in vars(module):
            return "its forward was replaced"
        if forward_ad._current_level >= 0:
            return "it runs under forward-mode differentiation"
        last = next(reversed(module._forward_pre_hooks.values()))
        first = next(iter(module._forward_hooks.values()))
        if last is not self.pre_hook or first is not self.hook:
            return "another hook of it comes in between"
        if _global_forward_hooks or _global_forward_pre_hooks:
            return "there are global hooks of forwards"
        for part in parts[1:]:
            if isinstance(part, torch.jit.ScriptModule):
                return "a part of it is in TorchScript"
            hooks = *part._forward_pre_hooks.values(), *part._forward_hooks.values()
            if hooks and not all(isinstance(hook, ModuleHook) for hook in hooks):
                return "a part of it has hooks"
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
                if not is_plain and not is_parameter(leaf):
                    return "it is given a tensor that is sparse or of a class of its own"
                if is_functorch_wrapped_tensor(leaf) or leaf.is_inference():
                    return "it is given a tensor of a transform, or of inference mode"
            elif not (leaf is None or isinstance(leaf, _CONSTANTS)):
                return f"it is given a {type(leaf).__name__}, which may change (use_cache=False?)"
        return ""


class _Enough(BaseException):
    """All that a call had saved was saved again."""


class SiteCall:
    """One call of a site: what it needs to run again, and what of that backward has not read yet.

    Attributes:
        depth: how often the site has called itself and has not returned.
        transfers: of the manager, which takes the hooks off that an interrupt has left.

    Raises:
        CorruptionError: where it is proven, the call has returned other bits than before.
        StateError: it has saved another number or kind of tensors.
        InPlaceModificationError: something that it takes was changed since.
    """

    def __init__(
        self,
        site: Site,
        manager: PipelineOffloadManager,
        parts: list[nn.Module],
        leaves: Sequence[Any],
        spec: Any,
    ) -> None:
        self.site, self._module, self._spec = site, parts[0], spec
        self.depth, self.transfers = 0, manager.transfers
        tensors = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
        hooks = _top_saved_tensors_default_hooks(True)
        pack, self._unpack = hooks or (partial(SavedTensor, group_name=site.path), _unpack)
        self._inputs = {key: (pack(x), x.requires_grad) for key, x in tensors.items()}
        self._leaves = [id(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self._is_input = [isinstance(x, torch.Tensor) for x in leaves]
        self._attributes = _Attributes(parts)
        self._state = CallState(keeps_grad=True)
        devices = {x.device.type for x in tensors.values()} - {"meta"}
        self._random_states = None if are_captured(devices) else RandomStates(devices)
        key = self._attributes.training
        self._step_number = manager.step_number
        since = self._step_number - site.proven_in.get(key, -_PROVE_EVERY)
        self._proves = since % _PROVE_EVERY == 0 or since > _PROVE_EVERY or manager.config.checking
        self._proves &= self._random_states is not None  # a capture can't be waited for
        self._is_open = True
        if self._proves:
            self._attributes.keep_values()
            self._others = _other_states()
        self._devices, self._sums = devices, list[torch.Tensor]()
        self._states_after: RandomStates | None = None
        self._num_saved = self._shapes = 0  # the second a hash of them all
        self._made: list[torch.Tensor | None] = []
        self._made_versions: list[int] = []
        self._constants: set[int] = set()
        self._stats = manager.transfers.stats
        self._num_bytes = 0

    @graph_break
    def pack(self, tensor: torch.Tensor) -> int | SavedTensor:
        """Return a number in place of a saved tensor; the pack hook."""
        number = self._num_saved
        self._num_saved = number + 1
        self._shapes = hash((self._shapes, tensor.shape, tensor.dtype))
        if _shows_parameter(tensor):
            return SavedTensor(tensor, self.site.path)
        self._num_bytes += tensor.numel() * tensor.element_size()
        return number

    @graph_break
    def unpack(self, packed: int | SavedTensor) -> torch.Tensor:
        """Return a saved tensor; the first of them runs the call again."""
        if isinstance(packed, SavedTensor):
            return packed.unpack()
        if packed >= len(self._made) or self._made[packed] is None:
            self._run_again()
        made, version = self._made[packed], self._made_versions[packed]
        assert made is not None
        if made._version != version:
            what = f"a tensor of shape {list(made.shape)} that {self.site.path} saves,"
            raise changed_in_place(what, made._version, version)
        if packed not in self._constants:
            self._made[packed] = None
        return made

    def close(self, output: Any) -> None:
        """Count what was dropped, and note what the call has made; it is over.

        Raises:
            StateError: it has drawn random numbers that can't be drawn again.
        """
        self._is_open, site = False, self.site
        if self._proves:
            if not self._attributes.is_state_unchanged():
                site.refusal = "its forward writes to its buffers or other tensors that it has"
                site.warn(site.refusal)
            if self._others != _other_states():
                raise StateError(
                    f"{site.path} draws random numbers of Python or numpy, and would draw others "
                    f"when it is recomputed; leave {site.kind!r} out of recompute"
                )
            self._sums = _sums_of(output)
            self._states_after = RandomStates(self._devices)
        self._stats.by_name[self.site.kind].recomputed_bytes += self._num_bytes

    @graph_break
    def _run_again(self) -> None:
        with _running:
            self._run()

    def _run(self) -> None:
        proves = self._proves and not self._is_open
        given = {
            key: self._unpack(packed).detach().requires_grad_(needs_grad)
            for key, (packed, needs_grad) in self._inputs.items()
        }
        pairs = zip(self._leaves, self._is_input, strict=True)
        args: Any = [given[leaf] if is_input else leaf for leaf, is_input in pairs]
        kwargs: dict[str, Any] = {}
        if self._spec is not None:
            args, kwargs = pytree.tree_unflatten(args, self._spec)
        made: list[torch.Tensor | None] = []
        versions: list[int] = []
        shapes = 0
        at_last_save: list[torch.Tensor] = []

        @graph_break
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal shapes, at_last_save
            shapes = hash((shapes, tensor.shape, tensor.dtype))
            if tensor.is_leaf and not tensor.requires_grad:
                # What autograd could take as a gradient of its own, if nothing else had it.
                self._constants.add(len(made))
            kept = tensor.detach()
            made.append(None if _shows_parameter(tensor) else kept)
            versions.append(tensor._version)
            if len(made) == self._num_saved and proves:
                at_last_save = _sums_of(made)
            elif len(made) >= self._num_saved and not (proves or self.site.fills_late):
                raise _Enough
            return kept

        def run() -> bool:
            _push_saved_tensors_default_hooks(keep, _as_it_is)
            try:
                output = self.site.run(self._module, args, kwargs)
                after = self._states_after
                is_same = after is None or after.are_current()
            except (_Enough, Exception):  # TorchScript makes another of it
                if proves or self.site.fills_late or len(made) < self._num_saved:
                    raise
                return True
            finally:
                _pop_saved_tensors_default_hooks()
            if proves:
                saved = _sums_of(made[: self._num_saved])
                self.site.fills_late |= not all(map(torch.equal, at_last_save, saved))
            return not proves or (is_same and all(map(torch.equal, _sums_of(output), self._sums)))

        states = self._random_states
        with self._attributes.in_force(self.site), _unlogged():
            with contextlib.nullcontext() if states is None else states.in_force():
                is_same = self._state.run(run)
        if (len(made), shapes) != (self._num_saved, self._shapes):
            raise StateError(
                f"{self.site.path} saved other tensors when it was recomputed: its forward must do "
                f"the same each time; leave {self.site.kind!r} out of recompute"
            )
        if not is_same:
            raise CorruptionError(
                f"{self.site.path} was recomputed with other bits than its forward had, and "
                "gradients would be wrong: it reads what has changed since, or draws random "
                f"numbers of Python or numpy; leave {self.site.kind!r} out of recompute"
            )
        if proves:
            self._proves, self.site.proven_in[self._attributes.training] = False, self._step_number
        self._made, self._made_versions = made, versions


class _Attributes:
    """The attributes, children, parameters and buffers of modules as they are when this is made."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.training = tuple(part.training for part in parts)
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._parameters: list[torch.Tensor] = []
        self._state: list[torch.Tensor] = []
        for own in map(vars, parts):
            parameters, buffers = own["_parameters"], own["_buffers"]
            self._parameters += [x for x in parameters.values() if x is not None]
            self._state += [x for x in buffers.values() if x is not None]
            then = own.copy()
            for name in own.keys() - _INNER:
                if isinstance(own[name], torch.Tensor):
                    found = own[name]
                    if found.grad_fn is not None:  # of an earlier call, whose graph may go
                        found = then[name] = found.detach().requires_grad_()
                    self._state.append(found)
            tables = parameters, buffers, own["_modules"]
            self._tables += [(own, then), *((table, table.copy()) for table in tables)]
        self._versions = [x._version for x in self._parameters]
        self._state_versions = [x._version for x in self._state]
        self._values: list[torch.Tensor] | None = None

    def keep_values(self) -> None:
        """Copy the buffers and other tensors, in case that the call writes to them."""
        self._values = [x.detach().clone() for x in self._state]

    def is_state_unchanged(self) -> bool:
        """Whether the buffers and other tensors are as they were."""
        return [x._version for x in self._state] == self._state_versions

    @contextmanager
    def in_force(self, site: Site) -> Iterator[None]:
        """Give the modules what they had; behind it all is as it was before.

        Raises:
            InPlaceModificationError: a parameter was changed in place since.
            StateError: a buffer was, of which nothing is known.
        """
        for x, version in zip(self._parameters, self._versions, strict=True):
            if x._version != version:
                what = f"a parameter of {site.path}, which is recomputed ({site.kind!r}),"
                raise changed_in_place(what, x._version, version)
        changed = [] if self.is_state_unchanged() else self._state
        if changed and self._values is None:
            raise StateError(
                f"a buffer or another tensor of {site.path} was written to since its forward; "
                f"leave {site.kind!r} out of recompute"
            )
        kept = zip(changed, self._values or (), strict=False)
        values = {id(x): value.clone() for x, value in kept}
        tables = [(table, table.copy()) for table, _ in self._tables]
        try:
            for table, then in self._tables:
                if values:  # it writes to copies
                    then = {name: values.get(id(x), x) for name, x in then.items()}
                _fill(table, then)
            yield
        finally:
            for table, before in tables:
                _fill(table, before)


def _fill(table: dict[str, Any], values: Mapping[str, Any]) -> None:
    if table.keys() != values.keys() or not all(map(is_, table.values(), values.values())):
        table.update(values)  # first, so that an interrupt leaves no empty module
        for name in table.keys() - values.keys():
            del table[name]


@contextmanager
def _unlogged() -> Iterator[None]:
    """Let Megatron's routers note no auxiliary loss twice."""
    home, name = sys.modules.get(_ROUTER), "save_to_aux_losses_tracker"
    with PatchStack() as patches:
        if hasattr(home, name):
            patches.replace(home, name, lambda *_, **__: None)
        yield


def _other_states() -> tuple[Any, ...]:
    """Return Python's and numpy's random states, which are not put back."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), repr(state)


def _shows_parameter(tensor: torch.Tensor) -> bool:
    base = tensor._base
    return is_parameter(tensor) or (base is not None and is_parameter(base))


def _sums_of(output: Any) -> list[torch.Tensor]:
    """Return checksums of the tensors in what a call has returned, each on its device."""
    sums = []
    for leaf in pytree.tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            sums += _sums_of([getattr(leaf, field.name) for field in fields(leaf)])
        elif type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested:
            sums.append(_sum(leaf))
    return sums


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return checksum(flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8))


def _unpack(packed: SavedTensor) -> torch.Tensor:
    return packed.unpack()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

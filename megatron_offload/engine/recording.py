"""What a manager records: by its configuration, by rows and by hand, and under which hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch

from megatron_offload import __version__
from megatron_offload.config import RECOMPUTE_SITES, OffloadConfig
from megatron_offload.core.row_config import LOSS, MODEL, RowConfig
from megatron_offload.engine import hooks
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import Rules
from megatron_offload.engine.guard import Guard
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.marks import Marks
from megatron_offload.engine.observer import Observer
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.engine.step import Step
from megatron_offload.engine.transfers import Transfers
from megatron_offload.errors import StateError

_HIDDEN = (
    "hooks of saved tensors of %s are in force: what is saved under them is left to "
    "them and isn't offloaded here. Switch one of the two off. This is said once"
)

_CHECKPOINTED = (
    "nothing of group %r is offloaded, as it runs inside a checkpoint, which recomputes it: leave "
    "the checkpoint out, or offload what that keeps, its inputs, by OffloadActivations around the "
    "forward or by Megatron's 'layer_input'. This is said once"
)


class Tuner(Protocol):
    """Finds by a manager's steps what to offload, as `megatron_offload.autotune` does."""

    is_converged: bool
    """Whether no more steps are looked at."""
    said: str
    """How that has ended, in one line."""

    def begin(self, manager: Any) -> None:
        """Begin anew: the manager has another configuration."""

    def save(self, folder: str | Path) -> None:
        """Leave the plans of rows that it has found, in the place of any that are there."""

    def __call__(self, manager: Any) -> None:
        """Look back at a step that has ended."""


class Recording:
    """The part of a manager that knows what of a program is recorded, and under which hooks."""

    config: OffloadConfig
    guard: Guard
    transfers: Transfers
    learner: Learner
    decisions: Step
    do_offload: bool

    instance: ClassVar[Any] = None

    usual_recompute: tuple[str, ...] = ()
    """What the process's manager recomputes where its configuration doesn't say: nothing, unless a
    library is integrated whose classes are known."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.tuner: Tuner | None = None
        """Finds what to offload."""
        self.marks = Marks()
        self._packs: list[Callable[[torch.Tensor], SavedTensor] | None] = []

    # By hand

    def disable_offload(self) -> None:
        """Record no groups from here on; what is under way finishes."""
        self.do_offload = False

    def enable_offload(self) -> None:
        """Record groups again, unless the configuration says ``enabled=False``."""
        self.do_offload = self.config.enabled

    @contextmanager
    def observed_by(self, *observers: Observer) -> Iterator[None]:
        """Report to these what happens inside."""
        self.observers += observers
        try:
            yield
        finally:
            for observer in observers:
                self.observers.remove(observer)

    @hooks.graph_break
    def mark_not_offload(self, tensor: torch.Tensor | None) -> None:
        """Keep a tensor, and all that shares its storage, on the device."""
        if tensor is not None:
            self.marks.add(tensor)

    # By rows

    def follow_rows(
        self,
        rows: Sequence[RowConfig] | None,
        *,
        is_own: bool = False,
        on_trial: bool = False,
        when_short: bool = False,
    ) -> None:
        """Do what rows say from the next forward on, in place of the policy; between forwards only.

        Hooks of modules are another's matter.

        Args:
            rows: None: the policy is followed, as of a row of all that the model saves.
            is_own: whether this run has found them, so that one that brings nothing is no error.
            on_trial: what is to be recomputed is, and compared, but nothing is dropped.
            when_short: recompute only while the device has little room left.
        """
        sites = {row.site for row in rows or ()}
        self.rows = None if rows is None or MODEL in sites else tuple(rows)
        self.refused_rows = ""
        """Why own rows free nothing, if one of them doesn't."""
        self.rows_are_own, self.rows_are_on_trial = is_own, on_trial
        self._is_for_shortage = when_short
        self._row_names = sites
        self._offloaded = {row.site for row in rows or () if row.offload}
        self._recomputed = tuple(row.site for row in rows or () if row.recompute)
        self.transfers.by_rows = self.rows is not None
        self.learner.is_measured = is_own
        self.has_come_by_site = False
        """Whether a site of what is recomputed was called with gradients since."""
        self.idle_rows: Sequence[RowConfig] = ()
        """Those of which a warning has said that they do nothing."""

    # What follows

    @property
    def recompute(self) -> tuple[str, ...]:
        """What is recomputed, by unit and pattern; the loss is none of the engine's."""
        if self.rows is not None:
            return self._recomputed
        if self is type(self).instance and "recompute" not in self.config.model_fields_set:
            return self.usual_recompute
        return tuple(unit for unit in self.config.recompute if unit != LOSS)

    @property
    def may_record(self) -> bool:
        """Whether groups of this step are recorded: not where nothing of it would be offloaded.

        That is unless an observer needs its groups.
        """
        if not self.do_offload:
            return False
        if not self.learner.keeps_everything or self._is_looked_at:
            return True
        return bool({*self.recompute} - {*RECOMPUTE_SITES, LOSS})

    @property
    def rests(self) -> bool:
        """Whether no step is looked at or moves anything, as no row says so."""
        return self.rows is not None and self._row_names <= {LOSS} and not self._is_looked_at

    @property
    def _is_looked_at(self) -> bool:
        return any(observer.needs_groups for observer in self.observers)

    @property
    def is_searching(self) -> bool:
        """Whether steps are still looked at, to find what is offloaded."""
        return self.tuner is not None and not self.tuner.is_converged

    @property
    def found(self) -> str:
        """What was found by the first steps, if anything was."""
        return "" if self.tuner is None else self.tuner.said

    @property
    def why_nothing(self) -> str:
        """Why nothing is offloaded, as far as that was decided; else nothing."""
        if not self.do_offload:
            return "nothing is offloaded: it is switched off"
        if self.is_searching:
            return "nothing is offloaded yet: the first steps are looked at"
        return self.found or ("nothing is offloaded: no row says so" if self.rests else "")

    @property
    def plan(self) -> str:
        """In one line what is done by which version, and when that is decided."""
        device = "" if self.transfers.backend.name == "cuda" else " without a GPU"
        is_open = (self.learner.is_open or self.is_searching) and not self.learner.is_ruled
        own = self.config.plan(is_open=is_open) if self.do_offload else self.why_nothing
        what = self.found or own
        return f"megatron-offload {__version__}{device}: {what}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.plan}>"

    def records(self) -> bool:
        """Whether groups are recorded here and now: with grad, and not where is recomputed."""
        return self.may_record and hooks.is_recording()

    def may_recompute(self, unit: str, *, drops: bool = False) -> bool:
        """Whether a unit is to be recomputed now: hooks of rows before may be left on it.

        ``drops`` says that what its site saves would be dropped, which may be for shortage alone.
        """
        if unit not in self.recompute:
            return False
        self.has_come_by_site = True
        return not (drops and self._is_for_shortage) or self.learner.is_short_of_memory()

    def starts(self, name: str, *, is_marked: bool) -> bool:
        """Whether a group that starts now is recorded.

        By rows one that ``is_marked`` by its model is recorded where a row offloads it; others are
        those of rows.
        """
        named = self._offloaded if is_marked else self._row_names
        if not self.may_record or (self.rows is not None and name not in named):
            return False
        if not hooks.is_recording():
            self.is_hidden(name)  # which says so
            return False
        return True

    # Chunks and groups

    def claim(self, *, is_inside: bool = False) -> None:
        """Take the manager for this thread's forwards.

        Args:
            is_inside: whether the thread that has it is in a forward, as far as the caller knows.

        Raises:
            StateError: another thread is not done with it, or it was closed.
        """
        if self.transfers.host_pool.is_closed and self.do_offload:
            raise StateError(
                "close() has given the memory of this context or manager back: make a new one, or "
                "close it when training is over"
            )
        if hooks.is_in_backward():
            return  # a recompute, maybe in autograd's thread; nothing of it is recorded
        self.guard.claim(lambda: is_inside or bool(self._packs) or not self.decisions.is_idle())

    def new_chunk(
        self, vp_stage: int = 0, min_tensor_bytes: int = 0, min_tensor_elements: int = 0
    ) -> ChunkOffloadHandler:
        """Return a chunk for a caller who opens and commits its groups by hand."""
        rules = Rules(min_tensor_bytes, min_tensor_elements, configured=self.recompute)
        rules.recomputes = not self.learner.is_open
        return ChunkOffloadHandler(self.transfers, self.marks, rules, vp_stage)

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs, if any."""
        return self.decisions.chunk

    def recorded_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs, where it matters how its tensors are made."""
        is_recorded = self.do_offload and hooks.is_recording(needs_grad=False)
        return self.decisions.chunk if is_recorded else None

    def is_hidden(self, name: str) -> bool:
        """Whether hooks of others are in force; a reentrant checkpoint shows in its rerun alone."""
        others, in_backward = hooks.others_hooks(), hooks.is_in_backward()
        is_checkpoint = not others if in_backward else others.startswith(hooks.CHECKPOINT)
        is_hidden = bool(others) and not in_backward
        if torch.is_grad_enabled() and (is_hidden or is_checkpoint):
            self.transfers.stats.num_hidden_groups += 1
            if is_checkpoint and not self.rows_are_own:
                self.transfers.warn_once(_CHECKPOINTED, name)
        if is_hidden:
            self.warn_of_others()
        return is_hidden

    def warn_of_others(self) -> None:
        """Say once whose hooks are in force: others than a checkpoint's, whose rerun is known."""
        others = hooks.others_hooks()
        if others and not others.startswith((hooks.CHECKPOINT, hooks.RECOMPUTE)):
            self.transfers.warn_once(_HIDDEN, others)

    # Hooks

    @hooks.graph_break
    def __enter__(self) -> Self:
        chunk = self.decisions.chunk
        pack = None
        if chunk is not None and chunk.open_groups and self.records():
            pack = partial(chunk.pack, chunk.open_groups[-1])
        self.put_on(pack)
        return self

    def put_on(self, pack: Callable[[torch.Tensor], SavedTensor] | None) -> None:
        """Put a pack hook in force until `__exit__`, or none."""
        self._packs.append(pack)  # first, so that none is in force that isn't known here
        if pack is not None:
            hooks.put_on(pack, SavedTensor.unpack)

    @hooks.graph_break
    def __exit__(self, *exception: object) -> None:
        pack = self._packs[-1] if self._packs else None
        if pack is not None:
            hooks.take_off(partial(is_, pack))
        del self._packs[-1:]

    def _take_off_hooks(self) -> None:
        """Take off all, whatever cut short the code that was to do so."""
        self._packs.clear()
        hooks.take_off_all(self.transfers)

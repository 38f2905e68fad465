"""Groups of layers without marks: what autograd saves, in the order of saving, cut by size.

A group ends when it is large enough, backward has reached it with the first of its tensors that is
asked for, and has left it when the last of them is dropped. A step, where the program does not end
it, ends when a new forward begins and no graph is left: accumulated microbatches, each with its
backward, are a step each, and those of a pipeline are one together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from operator import eq
from threading import get_ident
from typing import Any, TypeAlias

import torch

from megatron_offload.core.group import GroupState
from megatron_offload.engine import hooks
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_opted_out
from megatron_offload.engine.saved_tensor import SavedTensor, SavedWrapper
from megatron_offload.memory.nested import hollow, is_wrapper

_LEAST_GROUP_BYTES = 1 << 20
_GROUP_SHARE = 32
"""A group ends when it has this fraction of what its forward has saved so far: each costs the
host as much as several tensors."""


@dataclass(slots=True)
class Forward:
    """What lies between one `AutomaticGroups.begin` and its `end`; no pack hook: no records."""

    chunk: ChunkOffloadHandler
    pack: Callable[[torch.Tensor], object] | None
    name: str
    group: OffloadGroup | None = None
    num_tensors: int = 0
    num_bytes: int = 0
    total_bytes: int = 0
    """Of all its groups."""
    incomplete: list[tuple[_Saved, Any, int]] = field(default_factory=list)
    """What was saved while a collective was writing it, with its version then."""


@dataclass(slots=True, eq=False)
class _Saved:
    """A record, and the group that backward reaches with it.

    It has none before what was saved is complete: another record takes the place of the first then.
    """

    groups: AutomaticGroups
    group: OffloadGroup | None
    record: Packed

    def unpack(self) -> torch.Tensor:
        """Return the tensor; the first of its group reports backward to the manager."""
        if self.group is not None:
            self.groups.reach(self.group)
        return self.record.unpack()


Packed: TypeAlias = SavedTensor | SavedWrapper | _Saved
"""What a pack hook has returned."""


@dataclass(eq=False)
class AutomaticGroups:
    """Offloads what autograd saves between `begin` and `end`, which may nest.

    Args:
        manager: offloads the groups. It serves this object alone.
        name: what the groups are called in counters and messages.
        min_tensor_bytes: smaller tensors are kept; None for what the manager's configuration says.
        max_inflight_tensors: most tensors whose device memory is held for their copies; None leaves
            that to the manager's budgets.
        should_offload: is asked for each block of memory in turn, with its bytes, whether it
            moves; None: all do.
        finds_steps: end steps; False where the program takes each in `step`.
        on_step: called when a step was found to be over.
    """

    manager: PipelineOffloadManager
    name: str
    _: KW_ONLY
    min_tensor_bytes: int | None = None
    max_inflight_tensors: int | None = None
    should_offload: Callable[[int], bool] | None = None
    finds_steps: bool = True
    on_step: Callable[[], None] | None = None
    at_begin: Callable[[], None] | None = field(default=None, init=False)
    at_end: Callable[..., None] | None = field(default=None, init=False)
    """Are called when the outermost forward begins and ends, where rows say what is recorded."""
    _thread: int = field(default=0, init=False)
    _forwards: list[Forward | None] = field(default_factory=list, init=False)
    """None of one that began while the manager rests."""
    _reached: dict[OffloadGroup, None] = field(default_factory=dict, init=False)

    @hooks.graph_break
    def begin(
        self, name: str | None = None, *, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> None:
        """Offload what is saved from here on, in this thread, until `end`.

        ``name`` is for these groups alone; the others are as in the manager's `begin_chunk`.
        """
        self._thread = get_ident()
        if self.manager.rests:
            self._forwards.append(None)
            return
        self.manager.claim(is_inside=bool(self._forwards))
        if not self._forwards or self.manager.decisions.is_idle():
            self._forget_interrupted()
        if self.finds_steps and not self._forwards:
            self.end_step_if_over()
        chunk = self.manager.begin_chunk(vp_stage=vp_stage, pp_rank=pp_rank)
        if self.min_tensor_bytes is not None:
            chunk.rules.min_tensor_bytes = self.min_tensor_bytes
        by_rows = self.manager.rows is not None
        if not (by_rows and self.max_inflight_tensors):
            chunk.rules.max_inflight_blocks = self.max_inflight_tensors
        chunk.rules.should_offload = self.should_offload
        pack = None
        may_record = self.manager.may_record and not by_rows  # else hooks of modules do
        if may_record and not (hooks.is_in_backward() or self.manager.is_hidden(name or self.name)):
            pack = self.pack
            hooks.put_on(pack, unpack)
        self._forwards.append(Forward(chunk, pack, name or self.name))
        if self.at_begin is not None and len(self._forwards) == 1:
            self.at_begin()

    @hooks.graph_break
    def end(self, *, has_failed: bool = False) -> None:
        """Undo the last `begin`; what was saved since a failure's last group is kept."""
        forward = self._forwards.pop() if self._forwards else None
        if forward is None:
            return
        if forward.pack is not None:
            hooks.take_off(partial(eq, forward.pack))
        if has_failed:
            hooks.take_off_all(self.manager.transfers)  # of a call that an interrupt has cut short
            forward.chunk.close_group(forward.name)
        else:
            self._record_complete(forward, is_over=True)
            self._commit(forward)
        forward.chunk.recipes.clear()  # they hold what they are bound to
        if self.at_end is not None and not self._forwards:
            self.at_end(has_failed=has_failed)

    @property
    def forward(self) -> Forward | None:
        """The innermost forward; None where none is recorded."""
        return self._forwards[-1] if self._forwards else None

    @property
    def chunk(self) -> ChunkOffloadHandler | None:
        """Its chunk, for what notes how it is made under these hooks."""
        return None if self.forward is None else self.forward.chunk

    @property
    def is_inside(self) -> bool:
        """Whether a forward is under way in this thread, recorded or not."""
        return bool(self._forwards) and self._thread == get_ident()

    def _forget_interrupted(self) -> None:
        """Undo each `begin` that surrounds this one and has saved nothing.

        A keyboard interrupt at the last line of a ``with`` statement's entry skips its exit.
        """
        while hooks.owner_of_hooks() is self:
            hooks.take_off(lambda pack: hooks.owner_of(pack) is self)
            forward = self._forwards.pop() if self._forwards else None
            if forward is not None:
                forward.chunk.close_group(None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step inside, as in the manager's `step`; for a program that knows it."""
        with self.manager.step():
            yield
            self.leave_spent()  # else the last groups would be left in the next step

    @hooks.graph_break
    def end_step_if_over(self) -> bool:
        """End the step if something was saved in it and nothing of that is left; return whether."""
        self.leave_spent()
        is_over = self.manager.end_step_if_over()
        if is_over and self.on_step is not None:
            self.on_step()
        return is_over

    @hooks.graph_break
    def pack(self, tensor: torch.Tensor) -> Packed:
        """Record a tensor that autograd saves; the pack hook."""
        if hooks.must_be_apart():
            return hooks.apart(self.pack, tensor)
        forward = self.forward  # None between two lines of `begin`
        if forward is None or forward.pack is None:
            return SavedTensor(tensor, self.name)
        is_recompute = hooks.is_in_backward()
        if is_recompute or torch.compiler.is_compiling() or hooks.is_traced():
            return SavedTensor(tensor, self.name)
        if self._is_full(forward):  # not before: a kernel may fill what it saves behind that
            self._commit(forward)
        if forward.incomplete:
            self._record_complete(forward)
        return self._record(forward, tensor)

    def _record(self, forward: Forward, tensor: torch.Tensor) -> Packed:
        if type(tensor) is not torch.Tensor and not is_opted_out(tensor):
            if hasattr(tensor, "trigger_wait"):
                later = _Saved(self, None, SavedTensor(tensor, self.name))
                forward.incomplete.append((later, tensor, tensor._version))
                return later
            alias = hollow(tensor) if is_wrapper(tensor) else None
            if alias is not None:
                return SavedWrapper(tensor, alias, self.pack)
        group = forward.group
        if group is None:
            group = forward.group = self.manager.start_group(forward.chunk, forward.name)
        saved = forward.chunk.pack(group, tensor)
        if saved.block is None:  # it is kept
            return saved
        forward.num_tensors += 1
        # Of the tensor: what its block has left depends on what is recomputed.
        forward.num_bytes += saved.layout.num_bytes
        forward.total_bytes += saved.layout.num_bytes
        return _Saved(self, group, saved)

    def _record_complete(self, forward: Forward, *, is_over: bool = False) -> None:
        """Record what was saved before a collective had written it, once the program has waited.

        What is left at the forward's end is counted as kept.
        """
        incomplete, forward.incomplete = forward.incomplete, []
        for later, tensor, version in incomplete:
            if getattr(tensor, "completed", False) and tensor._version == version:
                later.record = self._record(forward, tensor.elem)
            elif is_over:
                forward.chunk.count_kept(forward.name, tensor)
            else:
                forward.incomplete.append((later, tensor, version))

    def _is_full(self, forward: Forward) -> bool:
        num_tensors, num_bytes = forward.num_tensors, forward.num_bytes
        most = self.max_inflight_tensors
        if num_bytes < _LEAST_GROUP_BYTES:
            return most is not None and num_tensors >= most
        if most is not None and num_tensors >= most // 2:  # as many may be in flight meanwhile
            return True
        most_bytes = self.manager.budget.most_group_bytes
        return num_bytes >= min(forward.total_bytes // _GROUP_SHARE, most_bytes)

    def _commit(self, forward: Forward) -> None:
        group, forward.group = forward.group, None
        forward.num_tensors = forward.num_bytes = 0
        if group is not None:
            forward.chunk.close_group(forward.name)
            self.manager.commit(group)

    def reach(self, group: OffloadGroup) -> None:
        """Backward asks for a tensor of a group."""
        if group in self._reached or group.state is GroupState.DONE:
            return
        for forward in self._forwards:
            if forward is not None and forward.group is group:  # backward comes before its end
                self._commit(forward)
        self.leave_spent()
        self._reached[group] = None
        self.manager.enter_backward(group)

    def leave_spent(self) -> None:
        """Leave the groups that backward has been in and nothing refers to any more."""
        for group in [group for group in self._reached if group.is_spent]:
            if self._reached.pop(group, self) is None:
                self.manager.leave_backward(group)


@hooks.graph_break
def unpack(packed: Packed) -> torch.Tensor:
    """Return what was packed; the unpack hook."""
    return packed.unpack()

"""Record what one step showed: times, memory, and what each group saves.

Nothing blocks the host while it is recorded: times are read when the step is over. Of a step that
moves something, memory is reported as it would be if nothing had moved: what lies on the host alone
just then is added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from megatron_offload.backends.base import DeviceMemory, Pair
from megatron_offload.core.profile import GroupKey, GroupTimes, RunShape, StepProfile
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Direction
from megatron_offload.engine.owners import is_externally_referenced
from megatron_offload.errors import StateError
from megatron_offload.observe.measure import Boundary, BoundaryTimer, Turn

_Identity: TypeAlias = tuple[GroupKey, int]


@dataclass(slots=True)
class RecordedStep:
    """What `profile_step` has recorded, once its block is left."""

    _profile: StepProfile | None = None

    @property
    def profile(self) -> StepProfile:
        """The step; StateError where the block wasn't left yet, or by an exception."""
        if self._profile is None:
            raise StateError("there is no profile: profile_step's block has not come to its end")
        return self._profile


@contextmanager
def profile_step(
    manager: PipelineOffloadManager,
    *,
    run: RunShape | None = None,
    moves: bool = True,
) -> Iterator[RecordedStep]:
    """Record the first step that ends inside; meant for one step, its ``reset`` included.

    Time and memory go from the block's begin to the end of the step. The record is filled when the
    block is left, unless by an exception. The simulated device has no memory of its own: there it
    is what a `LiveActivationMeter` counts that observes the manager; without one none is reported.
    Rows that a run has found are left aside in it: all groups are kept that there is room for.
    While it looks for them there may be none.

    Args:
        manager: whose groups are recorded.
        run: which part of which run the step is of; None for what the engine knows of that, which
            is no other pipeline rank.
        moves: whether the step moves what others would. One that doesn't teaches the engine
            nothing, and takes the memory of a step without offload.

    Raises:
        StateError: no step has ended inside, or one that had begun before.
    """
    recorded = RecordedStep()
    recorder = _Recorder(manager, run)
    keeping = manager.keeping("the step is profiled without offload")
    with _by_groups(manager), manager.observed_by(recorder), nullcontext() if moves else keeping:
        recorder.look()
        yield recorded
        recorded._profile = recorder.finish()


@contextmanager
def _by_groups(manager: PipelineOffloadManager) -> Iterator[None]:
    rows = manager.rows if manager.rows_are_own else None
    if rows is None:
        yield
        return
    manager.follow_rows(None)
    manager.learner.open()
    try:
        yield
    finally:
        manager.learner.follow_rules()
        if manager.rows is None:  # else others are looked at by now
            manager.follow_rows(rows, is_own=True)


class _Recorder(BoundaryTimer):
    """A step as it runs: a look at each boundary, and which of them count."""

    def __init__(self, manager: PipelineOffloadManager, run: RunShape | None) -> None:
        super().__init__(manager)
        self._run = run
        self._num_turns, self._step_number = 0, manager.step_number
        self._learned: StepProfile | None = None

    def restart(self) -> None:
        super().restart()
        self._saved: dict[GroupKey, dict[_Identity, int]] = {}
        """What each group saves of each block. A block that several share counts in the one that is
        committed first, which would offload it: the same whether anything is offloaded or not."""
        self._counted: dict[_Identity, int] = {}
        self._kept: set[_Identity] = set()
        """What something else holds, so that offloading it would not free it."""
        self._most_memory = DeviceMemory(0, 0)
        self._most_bytes = 0
        self._marks: dict[OffloadGroup, dict[Boundary, int]] = {}

    def look(self) -> None:
        """Note when it is, and the most memory until now."""
        with self._backend.uncounted():
            self.turn()
            # Where the device doesn't report its memory, what the manager's meter counts.
            found = self._backend.memory()
            if self._meter and not found:
                found = DeviceMemory(*[self._meter.live_bytes] * 2)
            if found:
                self._most_memory = DeviceMemory(*map(max, self._most_memory, found))
                released_bytes = self._manager.host_pool.alone.total_bytes
                released_bytes -= self._manager.transfers.dropped_bytes  # recomputed
                with_released_bytes = found.allocated_bytes + released_bytes
                self._most_bytes = max(self._most_bytes, with_released_bytes)

    def passed(self, boundary: Boundary, group: OffloadGroup) -> None:
        marks = self._marks.setdefault(group, {})
        # Backward may enter through a graph that is kept, and goes on in what it has entered.
        if self._learned is None and not (boundary == "backward" and "backward" in marks):
            marks[boundary] = len(self.turns)
            self.look()

    def group_starts(self, group: OffloadGroup) -> None:
        if group.key == (0, 0) and self._learned is None:
            began = self.turns[-1].time
            self.restart()  # what was passed so far, such as an evaluation, is no part of a step
            self.turns.append(Turn(began, ("other", None)))
        super().group_starts(group)

    def group_commits(self, group: OffloadGroup, *, is_delayed: bool) -> None:
        super().group_commits(group, is_delayed=is_delayed)
        if not is_delayed and self._learned is None:
            with self._backend.uncounted():
                # What no group before it counts, before its offload.
                saved = self._saved[group.key] = {}
                for block in group.blocks():
                    # What is kept may have grown since another group counted it.
                    num_bytes = block.num_bytes - self._counted.get(block.identity, 0)
                    if block.flight is None and not block.is_kept and num_bytes > 0:
                        saved[block.identity] = num_bytes
                        self._counted[block.identity] = block.num_bytes

    def backward_entered(self, group: OffloadGroup) -> None:
        # A graph of an earlier step may have groups of the same keys.
        if self._learned is None and "start" in self._marks.get(group, ()):
            with self._backend.uncounted():
                for block in group.blocks():
                    is_held = is_externally_referenced(block) if block.recipe is None else None
                    if is_held is not None:
                        (self._kept.add if is_held else self._kept.discard)(block.identity)

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        if self._learned is None:
            super().copy_issued(direction, pairs, group)

    def step_ended(self, profile: StepProfile) -> None:
        if self._learned is None:
            self.leave_backwards()
            self.look()
            offloaded_bytes = self._manager.last_step.offloaded_bytes
            self._learned = replace(profile, offloaded_bytes=offloaded_bytes)
            self._num_turns = len(self.turns)

    def finish(self) -> StepProfile:
        """Wait for the step's end on the device; return what was seen."""
        if self._learned is None and self._manager.step_number > self._step_number:
            return StepProfile((), (), run=self._run or RunShape())  # it had no group
        if self._learned is None:
            raise StateError(
                "no step with a backward has ended inside profile_step: call the manager's reset, "
                "or the front door's end_step, before the block ends"
            )
        learned = self._learned
        forward = {"start", "commit"}
        marks = {group.key: mark for group, mark in self._marks.items() if mark.keys() >= forward}
        if not marks.keys() >= {group.key for group in learned.groups}:
            raise StateError("profile_step was entered in the middle of a step: enter it before")
        # A graph that is kept may be gone through twice.
        backwards: dict[GroupKey, int] = {}
        for key, at_bytes in zip(learned.backward_order, learned.backward_at_bytes, strict=True):
            backwards.setdefault(key, at_bytes)
        turns, elapsed_us = self.turns[: self._num_turns], self._backend.sync_elapsed_us
        turns_us = [elapsed_us(since.time, until.time) for since, until in pairwise(turns)]
        event_us = max(0.0, min(elapsed_us(*self._empty), *turns_us))  # what the shortest took
        recompute_us: dict[tuple[GroupKey, str], float] = defaultdict(float)
        at_us, waited_us, events_us = [0.0], 0.0, 0.0
        for since, until, us in zip(turns, turns[1:], turns_us, strict=False):
            _, group = since.place
            lost_us = max(0.0, us - event_us)
            events_us += event_us
            if since.lost_by == "wait":
                waited_us += lost_us
            elif since.lost_by and group is not None:
                recompute_us[group.key, since.detail] += lost_us
            own_us = elapsed_us(turns[0].time, until.time) - waited_us - events_us
            at_us.append(max(at_us[-1], own_us))  # clocks of several streams differ by a little
        allocated_bytes, reserved_bytes = self._most_memory
        most_bytes = self._most_bytes
        groups, times = [], []
        for seen in learned.groups:  # one that backward never came to counts as left at once
            mark, end = marks[seen.key], marks[seen.key]["commit"]
            passed = mark["start"], end, mark.get("backward", end), mark.get("done", end)
            times.append(GroupTimes(*(at_us[one] for one in passed)))
            saved, units = self._saved.get(seen.key, {}), seen.recomputed
            kept_bytes = sum(size for identity, size in saved.items() if identity in self._kept)
            recomputed_bytes = sum(unit.num_bytes for unit in units if unit.is_recomputed)
            timed = (x._replace(us=recompute_us.get((seen.key, x.unit), 0.0)) for x in units)
            groups.append(
                seen._replace(
                    num_bytes=sum(saved.values()) - kept_bytes - recomputed_bytes,
                    externally_referenced_bytes=kept_bytes,
                    shared_bytes=0,
                    recomputed=tuple(timed),
                )
            )
        # Of what is reserved, what the allocator can't use is taken to be as much.
        return replace(
            learned,
            groups=tuple(groups),
            backward_order=tuple(backwards),
            backward_at_bytes=tuple(backwards.values()),
            times=tuple(times),
            step_us=at_us[-1],
            peak_allocated_bytes=most_bytes,
            peak_reserved_bytes=max(most_bytes, reserved_bytes + most_bytes - allocated_bytes),
            run=self._run or learned.run,
            waited_us=waited_us,
            d2h_gbps=self._read_gbps("d2h"),
            h2d_gbps=self._read_gbps("h2d"),
            counts_what_moved=True,
        )

    def _read_gbps(self, direction: Direction) -> float:
        copies = [copy for copy in self.copies if copy.direction == direction]
        us = sum(self._backend.sync_elapsed_us(copy.start, copy.end) for copy in copies)
        return sum(copy.num_bytes for copy in copies) / us / 1e3 if us > 0 else 0.0

"""What one rank's streams have to do in a step, and what that takes of memory.

Owns the program, the counts that are kept while it is written, and which copy waits for the place
of another in pinned memory. Must not know why anything moves, nor when it happens.

Memory is counted as the allocator sees it: in the order of the compute stream's program.

Invariant: what is counted when the program ends is what was counted when it began. Read next:
`megatron_offload.planning.replay`, which writes programs, and `megatron_offload.planning.streams`,
which runs them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.profile import GroupKey
from megatron_offload.planning.pending import PendingMessages
from megatron_offload.planning.schedule import Pass, PassKind

__all__ = ["MemoryCounts", "OpKind", "ProgramWriter", "RankProgram", "message_of"]


class OpKind(IntEnum):
    """What the compute stream comes by, and what its argument is."""

    COMPUTE = 0
    """Works for so many microseconds."""
    OFFLOAD = 1
    """This copy, to the host, may begin once all before is done."""
    RELOAD = 2
    """Likewise, to the device."""
    AWAIT = 3
    """Waits for this copy."""
    SEND = 4
    """This message leaves; see `message_of`."""
    RECEIVE = 5
    """Waits for this message."""
    HAND_OVER = 6
    """As `SEND`, but it leaves when the other rank has asked for it, and what comes behind it, but
    for a `RECEIVE`, waits until it is there."""
    ASK = 7
    """Asks for this message; whoever hasn't by then does so where it waits for it."""


def message_of(one: Pass, num_stages: int) -> int:
    """Return the number of what a pass sends to the stage behind it, or back to the one before."""
    is_forward = one.kind is PassKind.FORWARD
    return (one.microbatch * num_stages + one.stage) * 2 + is_forward


class MemoryCounts(NamedTuple):
    """Bytes from an op on."""

    position: int
    """Of the op; the counts hold from its beginning."""
    saved_bytes: int
    """On the device, beyond what is there all the time."""
    inflight_bytes: int
    held_bytes: int
    host_bytes: int


@dataclass(slots=True)
class RankProgram:
    """What one rank's streams have to do, and what that takes."""

    kinds: bytearray = field(default_factory=bytearray)
    """What the compute stream comes by, an `OpKind` each. Two flat sequences, because a large job
    has millions of them."""
    arguments: list[float] = field(default_factory=list)
    labels: list[tuple[str, bool]] = field(default_factory=list)
    """The group of each, and whether it is in backward. Only where it was asked for."""
    copy_bytes: list[int] = field(default_factory=list)
    """By the index of the copy, in the order of issue."""
    after: dict[int, int] = field(default_factory=dict)
    """For copies to the host whose place another group had before: the reload that empties it."""
    copy_labels: list[str] = field(default_factory=list)
    """Only where it was asked for."""
    peak_device_bytes: int = 0
    peak_taken_bytes: int = 0
    """The same with what was freed and can't be used yet."""
    peak_temp_bytes: int = 0
    """The largest temporaries of any group, buffers included."""
    peak_host_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    returned_bytes: int = 0
    """Copied to the host for nothing: backward came, or was near, before the release."""
    num_late: int = 0
    moved: list[GroupKey] = field(default_factory=list)
    """Groups whose copy to the host was issued, in that order."""
    memory: list[MemoryCounts] = field(default_factory=list)
    """Only where it was asked for."""


class ProgramWriter:
    """Writes a program, and counts what is on the device and on the host meanwhile.

    Args:
        static_bytes: what is on the device all the time.
        budget: whose counts are noted beside.
        pending: what was freed and can't be used yet.
        records: keep labels, and memory over the program.
    """

    def __init__(
        self, static_bytes: int, budget: DeviceBudget, pending: PendingMessages, *, records: bool
    ) -> None:
        self.program = RankProgram(peak_device_bytes=static_bytes, peak_taken_bytes=static_bytes)
        self.records = records
        self._budget = budget
        self._pending = pending
        self._static_bytes = self._device_bytes = static_bytes
        self._host_bytes = 0
        # Bytes taken with the copy that takes them, and bytes freed (below 0) with the copy that
        # empties them.
        self._host_uses: list[tuple[int, int]] = []

    def add(
        self, kind: OpKind, argument: float, label: str = "", *, is_backward: bool = False
    ) -> None:
        """Write what the compute stream comes by next."""
        self.program.kinds.append(kind)
        self.program.arguments.append(argument)
        if self.records:
            self.program.labels.append((label, is_backward))

    def compute(self, us: float, temp_bytes: int, label: str, *, is_backward: bool) -> None:
        """Write work, and what it takes of the device for a while."""
        program = self.program
        if temp_bytes > program.peak_temp_bytes:
            program.peak_temp_bytes = temp_bytes
        self._note_peaks(temp_bytes)
        if us > 0:
            self.add(OpKind.COMPUTE, us, label, is_backward=is_backward)

    def issue(self, kind: OpKind, num_bytes: int, label: str) -> int:
        """Write the issue of a copy; return its index."""
        program = self.program
        copy = len(program.copy_bytes)
        program.copy_bytes.append(num_bytes)
        if self.records:
            program.copy_labels.append(label)
        self.add(kind, copy, label)
        return copy

    def count_device(self, num_bytes: int) -> None:
        """Count device memory that was taken, or given back."""
        self._device_bytes += num_bytes
        self._note_peaks(0)
        self._note_memory()

    def take_host(self, num_bytes: int, copy: int) -> None:
        """Count host memory that a copy takes."""
        self._host_uses.append((num_bytes, copy))
        self._host_bytes += num_bytes
        if self._host_bytes > self.program.peak_host_bytes:
            self.program.peak_host_bytes = self._host_bytes
        self._note_memory()

    def free_host(self, num_bytes: int, copy: int) -> None:
        """Count host memory that is free behind a reload, or at once where ``copy`` is -1."""
        self._host_uses.append((-num_bytes, copy))
        self._host_bytes -= num_bytes
        self._note_memory()

    def finish(self, host_slab_bytes: int) -> RankProgram:
        """Return the program, now that all of it is written."""
        assert (self._device_bytes, self._host_bytes) == (self._static_bytes, 0)
        num_slabs = -(-self.program.peak_host_bytes // host_slab_bytes)
        self.program.after = _reused(self._host_uses, num_slabs * host_slab_bytes)
        return self.program

    def _note_peaks(self, temp_bytes: int) -> None:
        program, device_bytes = self.program, self._device_bytes + temp_bytes
        if device_bytes > program.peak_device_bytes:
            program.peak_device_bytes = device_bytes
        if device_bytes + self._pending.num_bytes > program.peak_taken_bytes:
            program.peak_taken_bytes = device_bytes + self._pending.num_bytes

    def _note_memory(self) -> None:
        if self.records:
            budget, position = self._budget, len(self.program.kinds)
            saved_bytes = self._device_bytes - self._static_bytes
            counts = (saved_bytes, budget.inflight_bytes, budget.held_bytes, self._host_bytes)
            self.program.memory.append(MemoryCounts(position, *counts))


def _reused(uses: list[tuple[int, int]], pinned_bytes: int) -> dict[int, int]:
    """Return for each copy that takes reused host memory the last reload that empties it.

    Places are lent out in the order in which they were freed. The engine's pool looks for one of
    the same size first, and for the best fit else, which this leaves out.
    """
    free: deque[tuple[int, int]] = deque([(pinned_bytes, -1)])
    after: dict[int, int] = {}
    for num_bytes, copy in uses:
        if num_bytes < 0:
            free.append((-num_bytes, copy))
            continue
        while num_bytes > 0:
            free_bytes, emptied_by = free.popleft()
            taken_bytes = min(free_bytes, num_bytes)
            num_bytes -= taken_bytes
            if free_bytes > taken_bytes:
                free.appendleft((free_bytes - taken_bytes, emptied_by))
            if emptied_by >= 0:
                after[copy] = emptied_by  # reloads run in order, and so are places freed
    return after

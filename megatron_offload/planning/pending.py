"""Device memory of messages that was freed, and can't be used again yet, pass by pass.

PyTorch marks messages between stages with `record_stream`, so the allocator lends their memory
again only some launches later; docs/simulation.md says how many.
"""

from __future__ import annotations

from collections import deque

from megatron_offload.planning.job import Job
from megatron_offload.planning.schedule import Pass, PassKind

QUEUED_LAUNCHES = 1024
"""Kernels that wait in a stream of CUDA before the next launch blocks the host. NVIDIA documents no
number; about a thousand are seen (https://stackoverflow.com/questions/53970187)."""


class PendingMessages:
    """What one rank has freed of messages in a step and can't use yet, as ``num_bytes``."""

    def __init__(self, job: Job, rank: int) -> None:
        self.num_bytes = 0
        self._stages = job.stages
        self._own_stages = frozenset(job.schedule.stages_of(rank))
        self._num_launched = 0.0
        # Bytes, and at how many launches they are back.
        self._freed: deque[tuple[float, int]] = deque()

    def add_pass(self, one: Pass) -> None:
        """Count a pass that the host has launched, where its stage tells its launches."""
        num_launches = self._stages[one.stage].num_launches
        if num_launches is None:
            return
        is_half = one.kind in (PassKind.INPUT, PassKind.WEIGHT)
        self._num_launched += num_launches / 2 if is_half else num_launches
        num_bytes = self._freed_by(one)
        if num_bytes:
            self._freed.append((self._num_launched + QUEUED_LAUNCHES, num_bytes))
            self.num_bytes += num_bytes
        while self._freed and self._freed[0][0] <= self._num_launched:
            self.num_bytes -= self._freed.popleft()[1]

    def _freed_by(self, one: Pass) -> int:
        """Return the bytes of messages that go with a pass: a gradient is as large as its output.

        A forward is the last to need what it sends. A backward is so of its input, of the gradient
        that has come and of that which it sends; a split one keeps the first two for the weights.
        """
        own_bytes, input_bytes = self._message_bytes(one.stage, 1), self._message_bytes(one.stage)
        if one.kind is PassKind.FORWARD:
            return own_bytes
        if one.kind is PassKind.INPUT:
            return input_bytes
        if one.kind is PassKind.WEIGHT:
            return own_bytes + input_bytes
        return own_bytes + 2 * input_bytes

    def _message_bytes(self, stage: int, step: int = -1) -> int:
        """Return what a stage exchanges with the one before, or behind; 0 on the same rank."""
        other = stage + step
        if not 0 <= other < len(self._stages) or other in self._own_stages:
            return 0
        return self._stages[min(stage, other)].output_bytes

"""How long a step takes, where it stalls, and what memory it needs, with no GPU at all.

Owns the times: what `megatron_offload.planning.replay` says the streams of each rank have to do is
run as discrete events, with the bandwidth of a node shared by the copies that run at once
(`megatron_offload.planning.link`). Must not know torch, nor why anything moves.

Three streams a rank, as on a device: compute, and one queue of copies each way. A copy begins when
the compute stream has come to where it was issued and the copies before it in its queue are over.
Messages between stages take their latency and their bytes over ``p2p_gbps``; who sends goes on at
once. Host time plays no part, nor does a host region's reuse (W5), which waits for a copy that is
long over wherever the pool has room.

Events are a heap of (time, number). simpy's processes were tried for the same: the events that are
left cost several times as much there (`scripts/simulate_large.py --compare-simpy` measures it), and
a search for a plan simulates thousands of steps.

Invariants: same input, same result to the last bit; the work is linear in passes times groups.
Read next: `docs/simulation.md`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import NO_OFFLOAD, Job, RankSettings
from megatron_offload.planning.link import FairShare
from megatron_offload.planning.profile import GroupKey
from megatron_offload.planning.replay import OpKind, RankProgram, replay
from megatron_offload.reporting.trace import (
    HELD_BYTES,
    HOST_BYTES,
    INFLIGHT_BYTES,
    PREFETCHED_BYTES,
    Counter,
    Span,
    StepTrace,
)

__all__ = ["PIPELINE", "RELEASE", "RELOAD", "RankResult", "Simulation", "simulate"]

PIPELINE = "pipeline"
"""The stall of a rank that waits for another stage."""
RELEASE = "W2"
"""The stall at a release, whose copy to the host is not over."""
RELOAD = "W4"
"""The stall at a backward, whose reload is not over."""

_SEGMENT_BYTES = 2 * 1024**2
"""PyTorch's caching allocator takes large memory from the device in multiples of this."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a step was on one rank."""

    end_us: float
    """When its last pass and its last release were over."""
    compute_us: float
    stall_us: dict[str, float]
    """What the compute stream lost, by cause: `PIPELINE`, `RELEASE`, `RELOAD`. Waiting for the end
    of the step's last rank isn't in it."""
    peak_device_bytes: int
    """The most that is allocated at one time."""
    peak_reserved_bytes: int
    """An estimate of what the allocator reserves: the peak and `Job.unused_bytes`, in segments."""
    peak_host_bytes: int
    """The most that lies on the host, from the issue of an offload to that of its reload."""
    offloaded_bytes: int
    reloaded_bytes: int
    returned_bytes: int
    """The part of ``offloaded_bytes`` whose memory was still there when it was needed."""
    num_late: int
    """Reloads that were issued only when their backward had begun."""
    moved: tuple[GroupKey, ...]
    """Groups whose copy to the host was issued, in that order."""
    trace: StepTrace | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step was."""

    step_us: float
    """Until the last rank is done."""
    ranks: tuple[RankResult, ...]
    num_events: int
    """How many the simulation took, a measure of its work that no clock disturbs."""

    @property
    def stall_us(self) -> dict[str, float]:
        """The stalls of the rank that lost most to its copies, by cause."""
        worst = max(self.ranks, key=lambda one: one.stall_us[RELEASE] + one.stall_us[RELOAD])
        return worst.stall_us


def simulate(
    job: Job,
    settings: Sequence[RankSettings] | RankSettings | None = None,
    *,
    record: bool = False,
) -> Simulation:
    """Predict one steady training step.

    Args:
        job: the step.
        settings: what each pipeline rank keeps and may hold, or the same for all; None offloads
            nothing.
        record: keep the spans of all streams and the bytes over time; see `RankResult.trace`.

    Raises:
        ConfigError: there are not as many settings as ranks.
    """
    num_ranks = job.schedule.num_ranks
    if settings is None or isinstance(settings, RankSettings):
        settings = [settings or NO_OFFLOAD] * num_ranks
    if len(settings) != num_ranks:
        raise ConfigError(f"the schedule has {num_ranks} ranks, settings are for {len(settings)}")
    programs = [replay(job, rank, one, records=record) for rank, one in enumerate(settings)]
    machine = job.machine
    share = FairShare(machine, job.gpus_per_rank)
    nodes = [_Node(share) for _ in range(0, num_ranks, machine.ranks_per_node)]
    ranks = [
        _Rank(rank, program, nodes[rank // machine.ranks_per_node], record)
        for rank, program in enumerate(programs)
    ]
    num_events = _Clock(ranks, job).run()
    return Simulation(
        step_us=max(one.now_us for one in ranks),
        ranks=tuple(_result(one, job.unused_bytes) for one in ranks),
        num_events=num_events,
    )


class _Copy:
    """A copy at the head of its queue."""

    __slots__ = ("index", "queue", "rate", "rest_bytes", "since_us", "start_us", "version")

    def __init__(self, queue: _Queue, index: int, num_bytes: float, now_us: float) -> None:
        self.queue = queue
        self.index = index
        self.rest_bytes = num_bytes
        self.rate = 0.0
        self.start_us = self.since_us = now_us
        self.version = 0


class _Queue:
    """A copy stream: copies in the order of issue, one at a time."""

    __slots__ = ("busy", "is_d2h", "rank", "waiting")

    def __init__(self, rank: _Rank, is_d2h: bool) -> None:
        self.rank = rank
        self.is_d2h = is_d2h
        self.busy: _Copy | None = None
        self.waiting: deque[int] = deque()


class _Node:
    """The ranks whose copies share a bandwidth."""

    __slots__ = ("ranks", "share")

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self.ranks: list[_Rank] = []


class _Rank:
    """Where a rank is in its program."""

    __slots__ = (
        "blocked_us",
        "compute_us",
        "d2h",
        "done_us",
        "h2d",
        "index",
        "marks",
        "node",
        "now_us",
        "position",
        "program",
        "stall_us",
        "trace",
        "waits_for_copy",
    )

    def __init__(self, index: int, program: RankProgram, node: _Node, record: bool) -> None:
        self.index = index
        self.program = program
        self.node = node
        self.position = 0
        self.now_us = self.compute_us = self.blocked_us = 0.0
        self.stall_us = {PIPELINE: 0.0, RELEASE: 0.0, RELOAD: 0.0}
        self.done_us: list[float | None] = [None] * len(program.copy_bytes)
        self.waits_for_copy = -1
        self.d2h, self.h2d = _Queue(self, True), _Queue(self, False)
        node.ranks.append(self)
        self.trace = StepTrace(index) if record else None
        self.marks: list[float] = []  # when each op began, for a trace

    def stalled(self, cause: str, until_us: float, label: str) -> None:
        """Count what was lost since the rank was blocked."""
        lost_us = until_us - self.blocked_us
        if lost_us <= 0:
            return
        self.stall_us[cause] += lost_us
        if self.trace is not None:
            span = Span("compute", "stall", label, self.blocked_us, lost_us, wait=cause)
            self.trace.spans.append(span)


class _Clock:
    """The events of all ranks, in the order of time."""

    def __init__(self, ranks: list[_Rank], job: Job) -> None:
        self._ranks = ranks
        us_per_byte, latency_us = 1e-3 / job.machine.p2p_gbps, job.machine.p2p_latency_us
        output_us = [latency_us + stage.output_bytes * us_per_byte for stage in job.stages]
        # A gradient is as large as what the stage before has sent.
        self._transfer_us = [
            us for stage in range(len(output_us)) for us in (output_us[stage - 1], output_us[stage])
        ]
        self._heap: list[tuple[float, int, _Rank | _Copy, int]] = []
        self._num_pushed = 0
        self._arrivals_us: dict[int, float] = {}
        self._receivers: dict[int, _Rank] = {}

    def run(self) -> int:
        """Run until nothing is left; return the number of events."""
        for rank in self._ranks:
            self._push(0.0, rank)
        heap, num_events = self._heap, 0
        while heap:
            now_us, _, what, version = heapq.heappop(heap)
            if isinstance(what, _Rank):
                self._go_on(what, now_us)
            elif version == what.version:
                self._end_copy(what, now_us)
            else:
                continue
            num_events += 1
        stuck = [rank.index for rank in self._ranks if rank.position < len(rank.program.kinds)]
        assert not stuck, stuck
        return num_events

    def _push(self, at_us: float, what: _Rank | _Copy, version: int = 0) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_us, self._num_pushed, what, version))

    def _go_on(self, rank: _Rank, now_us: float) -> None:
        """Let a rank's compute stream run to where it has to wait, or works."""
        kinds, arguments = rank.program.kinds, rank.program.arguments
        while rank.position < len(kinds):
            kind, argument = kinds[rank.position], arguments[rank.position]
            if rank.trace is not None:
                del rank.marks[rank.position :]
                rank.marks.append(now_us)
            if kind == OpKind.COMPUTE:
                rank.compute_us += argument
                if rank.trace is not None:
                    _note_work(rank, argument, now_us)
                rank.position += 1
                self._push(now_us + argument, rank)
                return
            number = int(argument)
            if kind == OpKind.AWAIT:
                if rank.done_us[number] is None:
                    rank.waits_for_copy, rank.blocked_us = number, now_us
                    return
            elif kind == OpKind.RECEIVE:
                at_us = self._arrivals_us.get(number)
                if at_us is None or at_us > now_us:
                    rank.blocked_us = now_us
                    if at_us is None:
                        self._receivers[number] = rank
                    else:
                        self._arrive(rank, at_us)
                    return
                del self._arrivals_us[number]
            elif kind == OpKind.SEND:
                self._send(number, now_us)
            else:
                self._issue(rank.d2h if kind == OpKind.OFFLOAD else rank.h2d, number, now_us)
            rank.position += 1
        rank.now_us = now_us

    def _send(self, message: int, now_us: float) -> None:
        at_us = now_us + self._transfer_us[message % len(self._transfer_us)]
        self._arrivals_us[message] = at_us
        receiver = self._receivers.pop(message, None)
        if receiver is not None:
            self._arrive(receiver, at_us)

    def _arrive(self, rank: _Rank, at_us: float) -> None:
        """Let a rank that waits for a message go on when it is there."""
        rank.stalled(PIPELINE, at_us, "")
        self._push(at_us, rank)

    # Copies

    def _issue(self, queue: _Queue, copy: int, now_us: float) -> None:
        queue.waiting.append(copy)
        if queue.busy is None:
            self._begin_copy(queue, now_us)
            self._share(queue.rank.node, now_us)

    def _begin_copy(self, queue: _Queue, now_us: float) -> None:
        index = queue.waiting.popleft()
        queue.busy = _Copy(queue, index, queue.rank.program.copy_bytes[index], now_us)

    def _end_copy(self, copy: _Copy, now_us: float) -> None:
        queue = copy.queue
        rank = queue.rank
        rank.done_us[copy.index] = now_us
        if rank.trace is not None:
            _note_copy(rank, copy, now_us)
        queue.busy = None
        if queue.waiting:
            self._begin_copy(queue, now_us)
            assert queue.busy is not None
            self._set_rate(queue.busy, copy.rate, now_us)  # as many copies as before
        else:
            self._share(rank.node, now_us)
        if rank.waits_for_copy == copy.index:
            rank.waits_for_copy = -1
            label = rank.program.labels[rank.position][0] if rank.trace is not None else ""
            rank.stalled(RELEASE if queue.is_d2h else RELOAD, now_us, label)
            self._go_on(rank, now_us)

    def _share(self, node: _Node, now_us: float) -> None:
        """Share the node's bandwidth anew: a copy has begun, or ended with none behind it."""
        num_d2h = num_h2d = num_both = 0
        for rank in node.ranks:
            if rank.d2h.busy is not None:
                if rank.h2d.busy is not None:
                    num_both += 1
                else:
                    num_d2h += 1
            elif rank.h2d.busy is not None:
                num_h2d += 1
        rates = node.share.rates(num_d2h, num_h2d, num_both)
        for rank in node.ranks:
            d2h, h2d = rank.d2h.busy, rank.h2d.busy
            if d2h is not None:
                self._set_rate(d2h, rates.d2h if h2d is None else rates.both_d2h, now_us)
            if h2d is not None:
                self._set_rate(h2d, rates.h2d if d2h is None else rates.both_h2d, now_us)

    def _set_rate(self, copy: _Copy, rate: float, now_us: float) -> None:
        if rate == copy.rate:
            return
        copy.rest_bytes -= copy.rate * (now_us - copy.since_us)
        copy.rate, copy.since_us = rate, now_us
        copy.version += 1
        self._push(now_us + max(0.0, copy.rest_bytes) / rate, copy, copy.version)


def _note_work(rank: _Rank, us: float, now_us: float) -> None:
    assert rank.trace is not None
    label, is_backward = rank.program.labels[rank.position]
    kind = "other" if not label else "backward" if is_backward else "forward"
    rank.trace.spans.append(Span("compute", kind, label, now_us, us))


def _note_copy(rank: _Rank, copy: _Copy, now_us: float) -> None:
    assert rank.trace is not None
    stream = "d2h" if copy.queue.is_d2h else "h2d"
    num_bytes, label = rank.program.copy_bytes[copy.index], rank.program.copy_labels[copy.index]
    span = Span(stream, stream, label, copy.start_us, now_us - copy.start_us, num_bytes)
    rank.trace.spans.append(span)


def _result(rank: _Rank, unused_bytes: int | None) -> RankResult:
    program = rank.program
    unused_bytes = program.peak_temp_bytes if unused_bytes is None else unused_bytes
    reserved_bytes = program.peak_device_bytes + unused_bytes
    if rank.trace is not None:
        for counts in program.memory:
            at_us = (
                rank.marks[counts.position] if counts.position < len(rank.marks) else rank.now_us
            )
            rank.trace.counters += [
                Counter(HELD_BYTES, at_us, counts.device_bytes),
                Counter(INFLIGHT_BYTES, at_us, counts.inflight_bytes),
                Counter(PREFETCHED_BYTES, at_us, counts.held_bytes),
                Counter(HOST_BYTES, at_us, counts.host_bytes),
            ]
    return RankResult(
        end_us=rank.now_us,
        compute_us=rank.compute_us,
        stall_us=rank.stall_us,
        peak_device_bytes=program.peak_device_bytes,
        peak_reserved_bytes=-(-reserved_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES,
        peak_host_bytes=program.peak_host_bytes,
        offloaded_bytes=program.offloaded_bytes,
        reloaded_bytes=program.reloaded_bytes,
        returned_bytes=program.returned_bytes,
        num_late=program.num_late,
        moved=tuple(program.moved),
        trace=rank.trace,
    )

"""When the streams of all ranks do what they have to: compute, copies each way, and messages.

A rank's compute stream is a process of simpy; the end of a copy moves whenever the node's bandwidth
is shared anew. Messages leave as soon as they are made, and are under way beside compute.

Copies share a node's bandwidth max-min fair, by progressive filling (Bertsekas and Gallager, Data
Networks, 1992, section 6.5.2). All GPUs being alike, shares depend only on how many copy which way.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from megatron_offload.core.machine import Machine
from megatron_offload.core.trace import PIPELINE_WAIT, Span, StepTrace
from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import Job
from megatron_offload.planning.replay import OpKind, RankProgram, check_time

if TYPE_CHECKING:
    import simpy

PIPELINE = PIPELINE_WAIT
"""The stall of a rank that waits for another stage."""
RELEASE = "W2"
"""The stall at a release, whose copy to the host is not over."""
RELOAD = "W4"
"""The stall at a backward, whose reload is not over."""

_EVENTS_BETWEEN_LOOKS = 100
"""At the clock."""


class Rates(NamedTuple):
    """Bytes per microsecond of each copy, by what its GPU copies."""

    d2h: float
    """To the host, the other direction idle."""
    h2d: float
    both_d2h: float
    """To the host, with the other direction busy."""
    both_h2d: float


class FairShare:
    """The shares of the copies of one node; every copy stands for ``gpus_per_rank`` at once."""

    def __init__(self, machine: Machine, gpus_per_rank: int = 1) -> None:
        self._machine = machine
        self._gpus_per_rank = gpus_per_rank
        self._known: dict[tuple[int, int, int], Rates] = {}

    def rates(self, num_d2h: int, num_h2d: int, num_both: int) -> Rates:
        """Return the rates where so many ranks copy each way, or both; 0 for what none does."""
        case = (num_d2h, num_h2d, num_both)
        if case not in self._known:
            self._known[case] = self._fill(*(self._gpus_per_rank * number for number in case))
        return self._known[case]

    def _fill(self, num_d2h: int, num_h2d: int, num_both: int) -> Rates:
        """Raise all rates together, and stop those that a limit binds."""
        machine = self._machine
        numbers = (num_d2h, num_h2d, num_both, num_both)
        limits = [
            ((0,), machine.d2h_gbps * num_d2h),
            ((1,), machine.h2d_gbps * num_h2d),
            ((2,), min(machine.both_gbps, machine.d2h_gbps) * num_both),
            ((3,), min(machine.both_gbps, machine.h2d_gbps) * num_both),
            ((0, 2), machine.node_d2h_gbps or math.inf),
            ((1, 3), machine.node_h2d_gbps or math.inf),
            ((0, 1, 2, 3), machine.node_gbps),
        ]
        rates = [0.0] * 4
        rising = {kind for kind in range(4) if numbers[kind]}
        while rising:
            levels = []
            for kinds, gbps in limits:
                taken = sum(rates[kind] * numbers[kind] for kind in kinds if kind not in rising)
                number = sum(numbers[kind] for kind in kinds if kind in rising)
                if number:
                    levels.append(((gbps - taken) / number, kinds))
            level, kinds = min(levels)
            for kind in rising.intersection(kinds):
                rates[kind] = level
            rising -= set(kinds)
        return Rates(*(rate * 1e3 for rate in rates))


class _Queue:
    """A copy stream: copies in the order of issue, one at a time."""

    def __init__(self, rank: RankStreams, *, is_d2h: bool) -> None:
        self.rank = rank
        self.is_d2h = is_d2h
        self.waiting: deque[int] = deque()
        self.copy: int | None = None
        """The one that is under way."""
        self.rest_bytes = self.rate = self.start_us = self.since_us = 0.0
        self.num_rates = 0


class RankStreams:
    """What became of one rank's streams.

    ``began_us`` is when it came to each op of the program; it and ``trace`` only where recorded.
    """

    def __init__(self, index: int, program: RankProgram, *, records: bool) -> None:
        self.program = program
        self.end_us = self.compute_us = 0.0
        self.is_done = False
        self.stall_us = {PIPELINE: 0.0, RELEASE: 0.0, RELOAD: 0.0}
        self.began_us: list[float] = []
        self.trace = StepTrace(index) if records else None
        self.d2h, self.h2d = _Queue(self, is_d2h=True), _Queue(self, is_d2h=False)
        self.is_over = bytearray(len(program.copy_bytes))
        self.awaited: tuple[int, simpy.Event] | None = None

    def note(self, span: Span) -> None:
        """Keep a span, if spans are kept."""
        if self.trace is not None:
            self.trace.spans.append(span)

    def stalled(self, cause: str, position: int, since_us: float, until_us: float) -> None:
        """Count what was lost at an op of the program."""
        if until_us <= since_us:
            return
        self.stall_us[cause] += until_us - since_us
        if self.trace is not None:
            label = self.program.labels[position][0]
            self.note(Span("compute", "stall", label, since_us, until_us - since_us, wait=cause))


def run_streams(job: Job, programs: Sequence[RankProgram], *, records: bool) -> list[RankStreams]:
    """Run the programs of all ranks."""
    ranks = [RankStreams(index, program, records=records) for index, program in enumerate(programs)]
    environment = _Step(job, ranks).environment
    for number in itertools.count():
        if math.isinf(environment.peek()):
            break
        if number % _EVENTS_BETWEEN_LOOKS == 0:
            check_time()
        environment.step()
    stuck = [rank for rank, one in enumerate(ranks) if not one.is_done]
    if stuck:
        raise ConfigError(
            f"schedule {job.schedule.name!r}: pipeline ranks {', '.join(map(str, stuck))} wait for "
            "each other"
        )
    return ranks


class _Step:
    """The processes of all ranks, and what they share."""

    def __init__(self, job: Job, ranks: list[RankStreams]) -> None:
        import simpy

        self.environment = simpy.Environment()
        machine = job.machine
        self._share = FairShare(machine, min(job.gpus_per_rank, machine.gpus_per_node))
        us_per_byte = 1e-3 / machine.p2p_gbps
        output_us = [machine.p2p_latency_us + s.output_bytes * us_per_byte for s in job.stages]
        # By `message_of`, less the microbatch. A gradient is as large as what the stage before
        # has sent.
        self._transfer_us = [
            us for stage in range(len(output_us)) for us in (output_us[stage - 1], output_us[stage])
        ]
        self._arrivals: dict[int, simpy.Event] = {}
        for first in range(0, len(ranks), job.ranks_per_node):
            node = ranks[first : first + job.ranks_per_node]
            for rank in node:
                self.environment.process(self._compute_stream(rank, node))

    def _compute_stream(
        self, rank: RankStreams, node: list[RankStreams]
    ) -> Generator[simpy.Event, None, None]:
        environment, program = self.environment, rank.program
        num_ops, joined_us = len(program.kinds), 0.0
        for position, kind in enumerate(program.kinds):
            now_us, argument = environment.now, program.arguments[position]
            if rank.trace is not None:
                rank.began_us.append(now_us)
            if kind == OpKind.COMPUTE:
                rank.compute_us += argument
                if rank.trace is not None:
                    label, is_backward = program.labels[position]
                    what = "other" if not label else "backward" if is_backward else "forward"
                    rank.note(Span("compute", what, label, now_us, argument))
                elif position + 1 < num_ops and program.kinds[position + 1] == OpKind.COMPUTE:
                    joined_us += argument  # nobody looks in between
                    continue
                yield environment.timeout(joined_us + argument)
                joined_us = 0.0
                continue
            number = int(argument)
            if kind == OpKind.AWAIT:
                if not rank.is_over[number]:
                    rank.awaited = (number, environment.event())
                    is_d2h = yield rank.awaited[1]
                    rank.awaited = None
                    rank.stalled(RELEASE if is_d2h else RELOAD, position, now_us, environment.now)
            elif kind == OpKind.RECEIVE:
                arrival = self._arrival_of(number)
                if not arrival.processed:
                    yield arrival
                    rank.stalled(PIPELINE, position, now_us, environment.now)
                del self._arrivals[number]
            elif kind == OpKind.SEND:
                self._send(number)
            else:
                queue = rank.d2h if kind == OpKind.OFFLOAD else rank.h2d
                queue.waiting.append(number)
                if queue.copy is None:
                    self._begin_copy(queue)
                    self._share_anew(node)
        rank.end_us = environment.now
        rank.is_done = True

    def _arrival_of(self, message: int) -> simpy.Event:
        return self._arrivals.setdefault(message, self.environment.event())

    def _send(self, message: int) -> None:
        flight = self.environment.timeout(self._transfer_us[message % len(self._transfer_us)])
        assert flight.callbacks is not None
        flight.callbacks.append(self._arrival_of(message).trigger)

    # Copies

    def _begin_copy(self, queue: _Queue) -> None:
        """Begin the next copy of an idle queue, if there is one."""
        queue.copy = queue.waiting.popleft() if queue.waiting else None
        if queue.copy is not None:
            queue.rest_bytes, queue.rate = queue.rank.program.copy_bytes[queue.copy], 0.0
            queue.start_us = queue.since_us = self.environment.now

    def _end_copy(self, queue: _Queue, num_rates: int, node: list[RankStreams], _: object) -> None:
        """End a queue's copy, unless its rate has changed since this end was set."""
        if num_rates != queue.num_rates:
            return
        rank, copy, now_us = queue.rank, queue.copy, self.environment.now
        assert copy is not None
        rank.is_over[copy] = True
        if rank.trace is not None:
            stream, program = "d2h" if queue.is_d2h else "h2d", rank.program
            label, num_bytes = program.copy_labels[copy], program.copy_bytes[copy]
            duration_us = now_us - queue.start_us
            rank.note(Span(stream, stream, label, queue.start_us, duration_us, num_bytes))
        self._begin_copy(queue)
        self._share_anew(node)
        if rank.awaited is not None and rank.awaited[0] == copy:
            rank.awaited[1].succeed(queue.is_d2h)

    def _share_anew(self, node: list[RankStreams]) -> None:
        """Share a node's bandwidth among the copies that run now."""
        busy = [(rank.d2h.copy is not None, rank.h2d.copy is not None) for rank in node]
        ways = ((True, False), (False, True), (True, True))
        rates = self._share.rates(*map(busy.count, ways))
        for rank in node:
            d2h, h2d = rank.d2h, rank.h2d
            if d2h.copy is not None:
                self._set_rate(d2h, rates.d2h if h2d.copy is None else rates.both_d2h, node)
            if h2d.copy is not None:
                self._set_rate(h2d, rates.h2d if d2h.copy is None else rates.both_h2d, node)

    def _set_rate(self, queue: _Queue, rate: float, node: list[RankStreams]) -> None:
        if rate == queue.rate:
            return
        now_us = self.environment.now
        queue.rest_bytes -= queue.rate * (now_us - queue.since_us)
        queue.rate, queue.since_us = rate, now_us
        queue.num_rates += 1
        end = self.environment.timeout(max(0.0, queue.rest_bytes) / rate)
        assert end.callbacks is not None
        end.callbacks.append(partial(self._end_copy, queue, queue.num_rates, node))

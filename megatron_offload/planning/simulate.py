"""How long a step takes, where it stalls, and what memory it needs, with no GPU at all.

A rank's compute stream is a process of simpy; the end of a copy moves whenever the node's bandwidth
is shared anew. Messages leave as soon as they are made, and are under way beside compute.

Copies share a node's bandwidth max-min fair, by progressive filling (Bertsekas and Gallager, Data
Networks, 1992, section 6.5.2). All GPUs being alike, shares depend only on how many copy which way.

Same input, same result to the last bit; the work is linear in passes times groups.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import simpy

from megatron_offload.core.trace import PIPELINE_WAIT, Counter, Span, StepTrace
from megatron_offload.errors import ConfigError
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import NO_OFFLOAD, Job, RankSettings
from megatron_offload.planning.replay import OpKind, RankProgram, replay

RELEASE = "W2"
"""The stall at a release, whose copy to the host is not over."""
RELOAD = "W4"
"""The stall at a backward, whose reload is not over."""


@dataclass(slots=True, kw_only=True)
class RankResult(RankProgram):
    """What a step was on one rank."""

    end_us: float = 0.0
    """When its last pass and its last release were over."""
    compute_us: float = 0.0
    stall_us: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((PIPELINE_WAIT, RELEASE, RELOAD), 0.0)
    )
    """What the compute stream lost, by cause: `PIPELINE_WAIT` for another stage, `RELEASE`,
    `RELOAD`. Waiting for the end of the step's last rank isn't in it."""
    trace: StepTrace | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step was."""

    step_us: float
    """Until the last rank is done."""
    ranks: tuple[RankResult, ...]


def simulate(job: Job, settings: RankSettings = NO_OFFLOAD, *, record: bool = False) -> Simulation:
    """Predict one steady training step.

    Args:
        job: the step.
        settings: of every pipeline rank; unless given, nothing is offloaded.
        record: keep the spans of all streams and the bytes over time; see `RankResult.trace`.

    Raises:
        ConfigError: the schedule's ranks wait in a circle.
    """
    ranks = range(job.schedule.num_ranks)
    programs = [replay(job, rank, settings, records=record) for rank in ranks]
    return simulate_programs(job, programs)


def simulate_programs(job: Job, programs: Sequence[RankProgram]) -> Simulation:
    """Predict a step of which each rank's program is known; recorded ones give a trace."""
    ranks = [_Streams(index, program) for index, program in enumerate(programs)]
    step = _Step(job, ranks)
    step.environment.run()
    stuck = [rank for rank, process in enumerate(step.processes) if process.is_alive]
    if stuck:
        raise ConfigError(
            f"schedule {job.schedule.name!r}: pipeline ranks {', '.join(map(str, stuck))} wait for "
            "each other"
        )
    results = tuple(one.result for one in ranks)
    return Simulation(max(one.end_us for one in results), results)


def fair_rates(
    machine: Machine, gpus_per_rank: int, num_d2h: int, num_h2d: int, num_both: int
) -> tuple[float, ...]:
    """Return the rates where so many ranks of a node copy each way, or both; 0 for what none does.

    They are bytes per microsecond of a copy to the host, of one to the device, and of each with the
    other direction busy. All are raised together, and those that a limit binds stop there.
    """
    d2h, h2d, both = (gpus_per_rank * number for number in (num_d2h, num_h2d, num_both))
    numbers = (d2h, h2d, both, both)
    limits = [
        ((0,), machine.d2h_gbps * d2h),
        ((1,), machine.h2d_gbps * h2d),
        ((2,), min(machine.both_gbps, machine.d2h_gbps) * both),
        ((3,), min(machine.both_gbps, machine.h2d_gbps) * both),
        ((0, 2), machine.node_d2h_gbps or math.inf),
        ((1, 3), machine.node_h2d_gbps or math.inf),
        ((0, 1, 2, 3), machine.node_gbps),
    ]
    rates = [0.0] * 4
    rising = {kind for kind in range(4) if numbers[kind]}
    while rising:
        found = []
        for kinds, gbps in limits:
            taken = sum(rates[kind] * numbers[kind] for kind in kinds if kind not in rising)
            number = sum(numbers[kind] for kind in kinds if kind in rising)
            if number:
                found.append(((gbps - taken) / number, kinds))
        rate, kinds = min(found)
        for kind in rising.intersection(kinds):
            rates[kind] = rate
        rising -= set(kinds)
    return tuple(rate * 1e3 for rate in rates)


class _Queue:
    """A copy stream: copies in the order of issue, one at a time."""

    def __init__(self, rank: _Streams, name: str) -> None:
        self.rank = rank
        self.name = name
        # Copies, each with its op's position; the first is under way.
        self.copies: deque[tuple[int, int]] = deque()
        self.rest_bytes = self.rate = self.start_us = self.since_us = 0.0
        self.end: simpy.Event | None = None  # when it will be over, as things are


class _Streams:
    """One rank's streams, and what becomes of them."""

    def __init__(self, index: int, program: RankProgram) -> None:
        known = {one.name: getattr(program, one.name) for one in fields(RankProgram)}
        self.index = index
        self.result = RankResult(**known, trace=StepTrace(index) if program.labels else None)
        self.d2h, self.h2d = _Queue(self, "d2h"), _Queue(self, "h2d")

    def add_span(
        self, stream: str, kind: str, position: int, since_us: float, us: float, **more: Any
    ) -> None:
        """Note what a stream does about an op of the program, where a trace is kept."""
        if self.result.trace is not None:
            label = self.result.labels[position][0]
            self.result.trace.spans.append(Span(stream, kind, label, since_us, us, **more))


class _Step:
    """The processes of all ranks, and what they share."""

    def __init__(self, job: Job, ranks: list[_Streams]) -> None:
        self.environment = simpy.Environment()
        machine = job.machine
        gpus_per_rank = min(job.gpus_per_rank, machine.gpus_per_node)
        self._rates = functools.cache(functools.partial(fair_rates, machine, gpus_per_rank))
        us_per_byte = 1e-3 / machine.p2p_gbps
        output_us = [machine.p2p_latency_us + s.output_bytes * us_per_byte for s in job.stages]
        # By number, less the microbatch. A gradient is as large as what the stage before has sent.
        self._transfer_us = [
            us for stage in range(len(output_us)) for us in (output_us[stage - 1], output_us[stage])
        ]
        # What is waited for: a message by its number, a copy by its rank and its number. The value
        # is the cause of the stall.
        self._ends: dict[int | tuple[int, int], simpy.Event] = defaultdict(self.environment.event)
        self.processes = [
            self.environment.process(self._compute_stream(rank, node))
            for first in range(0, len(ranks), job.ranks_per_node)
            for node in [ranks[first : first + job.ranks_per_node]]
            for rank in node
        ]

    def _compute_stream(
        self, rank: _Streams, node: list[_Streams]
    ) -> Generator[simpy.Event, Any, None]:
        environment, program = self.environment, rank.result
        num_ops, trace = len(program.kinds), rank.result.trace
        joined_us = 0.0  # of work for which no time has passed yet
        begun_us: list[float] = []
        for position, kind in enumerate(program.kinds):
            now_us, argument = environment.now, program.arguments[position]
            if trace:
                begun_us.append(now_us)
            if kind == OpKind.COMPUTE:
                rank.result.compute_us += argument
                joined_us += argument
                if trace:
                    label, is_backward = program.labels[position]
                    what = "other" if not label else "backward" if is_backward else "forward"
                    rank.add_span("compute", what, position, now_us, joined_us)
                elif position + 1 < num_ops and program.kinds[position + 1] == OpKind.COMPUTE:
                    continue  # there is no observer in between
                yield environment.timeout(joined_us)
                joined_us = 0.0
                continue
            number = int(argument)
            if kind == OpKind.RECEIVE or kind == OpKind.AWAIT:
                key = number if kind == OpKind.RECEIVE else (rank.index, number)
                end = self._ends[key]
                if not end.triggered:
                    cause = yield end
                    lost_us = environment.now - now_us
                    if lost_us > 0:
                        rank.result.stall_us[cause] += lost_us
                        rank.add_span("compute", "stall", position, now_us, lost_us, wait=cause)
                del self._ends[key]
            elif kind == OpKind.SEND:
                transfer_us = self._transfer_us[number % len(self._transfer_us)]
                flight = environment.timeout(transfer_us, PIPELINE_WAIT)
                assert flight.callbacks is not None
                flight.callbacks.append(self._ends[number].trigger)
            else:
                queue = rank.d2h if kind == OpKind.OFFLOAD else rank.h2d
                queue.copies.append((number, position))
                if len(queue.copies) == 1:
                    self._begin_copy(queue, node)
        yield environment.timeout(joined_us)
        rank.result.end_us = environment.now
        if trace:
            begun_us.append(environment.now)
            for position, counts in program.memory:
                for name, num_bytes in counts.items():
                    trace.counters.append(Counter(name, begun_us[position], num_bytes))

    # Copies

    def _begin_copy(self, queue: _Queue, node: list[_Streams]) -> None:
        """Begin a queue's next copy, if there is one, and share the node's bandwidth anew."""
        if queue.copies:
            queue.rest_bytes, queue.rate = queue.rank.result.copy_bytes[queue.copies[0][0]], 0.0
            queue.start_us = queue.since_us = self.environment.now
        busy = [(bool(rank.d2h.copies), bool(rank.h2d.copies)) for rank in node]
        ways = ((True, False), (False, True), (True, True))
        rates = self._rates(*map(busy.count, ways))
        for rank in node:
            d2h, h2d = rank.d2h, rank.h2d
            if d2h.copies:
                self._set_rate(d2h, rates[2 if h2d.copies else 0], node)
            if h2d.copies:
                self._set_rate(h2d, rates[3 if d2h.copies else 1], node)

    def _end_copy(self, queue: _Queue, node: list[_Streams], end: simpy.Event) -> None:
        """End a queue's copy, unless its rate has changed since this end was set."""
        if end is not queue.end:
            return
        rank, (number, position), start_us = queue.rank, queue.copies.popleft(), queue.start_us
        us, num_bytes = self.environment.now - start_us, rank.result.copy_bytes[number]
        rank.add_span(queue.name, queue.name, position, start_us, us, num_bytes=num_bytes)
        self._begin_copy(queue, node)
        self._ends[rank.index, number].succeed(RELEASE if queue is rank.d2h else RELOAD)

    def _set_rate(self, queue: _Queue, rate: float, node: list[_Streams]) -> None:
        if rate == queue.rate:
            return
        now_us = self.environment.now
        queue.rest_bytes -= queue.rate * (now_us - queue.since_us)
        queue.rate, queue.since_us = rate, now_us
        queue.end = self.environment.timeout(max(0.0, queue.rest_bytes) / rate)
        assert queue.end.callbacks is not None
        queue.end.callbacks.append(functools.partial(self._end_copy, queue, node))

"""How long a step takes, where it stalls, and what memory it needs, with no GPU at all.

A rank's compute stream is a process of simpy; the end of a copy moves whenever the node's bandwidth
is shared anew. Messages leave as soon as they are made, and are under way beside compute.

Copies share a node's bandwidth max-min fair, by progressive filling (Bertsekas and Gallager, Data
Networks, 1992, section 6.5.2). All GPUs being alike, shares depend only on how many copy which way.

Same input, same result to the last bit; the work is linear in passes times groups.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from megatron_offload.core.machine import Machine
from megatron_offload.core.trace import PIPELINE_WAIT, ByteCount, Counter, Span, StepTrace
from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import LIMITS, NO_OFFLOAD, UNLIMITED, Job, RankSettings
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.replay import OpKind, RankProgram, StepCounts, check_time, replay

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


@dataclass(slots=True, kw_only=True)
class RankResult(StepCounts):
    """What a step was on one rank."""

    end_us: float = 0.0
    """When its last pass and its last release were over."""
    compute_us: float = 0.0
    stall_us: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((PIPELINE, RELEASE, RELOAD), 0.0)
    )
    """What the compute stream lost, by cause: `PIPELINE`, `RELEASE`, `RELOAD`. Waiting for the end
    of the step's last rank isn't in it."""
    trace: StepTrace | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step was."""

    step_us: float
    """Until the last rank is done."""
    ranks: tuple[RankResult, ...]


def simulate(
    job: Job, settings: Sequence[RankSettings] | RankSettings | None = None, *, record: bool = False
) -> Simulation:
    """Predict one steady training step.

    Args:
        job: the step.
        settings: of each pipeline rank, or the same for all; None offloads nothing.
        record: keep the spans of all streams and the bytes over time; see `RankResult.trace`.

    Raises:
        ConfigError: settings are too many or too few, or the schedule's ranks wait in a circle.
    """
    num_ranks = job.schedule.num_ranks
    if settings is None or isinstance(settings, RankSettings):
        settings = [settings or NO_OFFLOAD] * num_ranks
    if len(settings) != num_ranks:
        raise ConfigError(f"the schedule has {num_ranks} ranks, settings are for {len(settings)}")
    programs = [replay(job, rank, one, records=record) for rank, one in enumerate(settings)]
    return simulate_programs(job, programs, record=record)


def simulate_programs(
    job: Job, programs: Sequence[RankProgram], *, record: bool = False
) -> Simulation:
    """Predict a step of which each rank's program is known, and recorded if that is asked for."""
    ranks = [_Streams(index, program, records=record) for index, program in enumerate(programs)]
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
    results = tuple(one.result for one in ranks)
    return Simulation(max(one.end_us for one in results), results)


def settings_of(plan: OffloadPlan, default: RankSettings = UNLIMITED) -> list[RankSettings]:
    """Return what each rank of a plan does; the limits that ``default`` sets go over the plan's."""
    free = [name for name in LIMITS if getattr(default, name) is None]
    found = []
    for rank in plan.ranks:
        recompute = default.recompute if rank.recompute is None else rank.recompute
        if rank.moved_bytes:
            limits = {name: getattr(rank, name) for name in free}
            kept = frozenset(rank.kept)
            found.append(replace(default, kept=kept, recompute=recompute, **limits))
        else:
            found.append(replace(NO_OFFLOAD, recompute=recompute))
    return found


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
    return tuple(rate * 1e3 for rate in rates)


class _Queue:
    """A copy stream: copies in the order of issue, one at a time."""

    def __init__(self, rank: _Streams, *, is_d2h: bool) -> None:
        self.rank = rank
        self.is_d2h = is_d2h
        self.waiting: deque[int] = deque()
        self.copy: int | None = None
        """The one that is under way."""
        self.rest_bytes = self.rate = self.start_us = self.since_us = 0.0
        self.num_rates = 0


class _Streams:
    """One rank's streams, and what becomes of them."""

    def __init__(self, index: int, program: RankProgram, *, records: bool) -> None:
        counts = {one.name: getattr(program, one.name) for one in fields(StepCounts)}
        self.program = program
        self.result = RankResult(**counts, trace=StepTrace(index) if records else None)
        self.is_done = False
        self.d2h, self.h2d = _Queue(self, is_d2h=True), _Queue(self, is_d2h=False)
        self.is_over = bytearray(len(program.copy_bytes))
        self.awaited: tuple[int, simpy.Event] | None = None
        self._memory = deque(program.memory if records else ())

    def stalled(self, cause: str, position: int, since_us: float, until_us: float) -> None:
        """Count what was lost at an op of the program."""
        if until_us <= since_us:
            return
        lost_us = until_us - since_us
        self.result.stall_us[cause] += lost_us
        if self.result.trace is not None:
            label = self.program.labels[position][0]
            span = Span("compute", "stall", label, since_us, lost_us, wait=cause)
            self.result.trace.spans.append(span)

    def came_to(self, position: int, now_us: float) -> None:
        """Note what memory is taken from an op on, if that is kept."""
        names = (ByteCount.HELD, ByteCount.INFLIGHT, ByteCount.PREFETCHED, ByteCount.HOST)
        trace = self.result.trace
        while trace and self._memory and self._memory[0].position <= position:
            _, *counts = self._memory.popleft()
            for name, num_bytes in zip(names, counts, strict=True):
                trace.counters.append(Counter(name, now_us, num_bytes))


class _Step:
    """The processes of all ranks, and what they share."""

    def __init__(self, job: Job, ranks: list[_Streams]) -> None:
        import simpy

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
        self._arrivals: dict[int, simpy.Event] = {}
        for first in range(0, len(ranks), job.ranks_per_node):
            node = ranks[first : first + job.ranks_per_node]
            for rank in node:
                self.environment.process(self._compute_stream(rank, node))

    def _compute_stream(
        self, rank: _Streams, node: list[_Streams]
    ) -> Generator[simpy.Event, None, None]:
        environment, program = self.environment, rank.program
        num_ops, joined_us, trace = len(program.kinds), 0.0, rank.result.trace
        for position, kind in enumerate(program.kinds):
            now_us, argument = environment.now, program.arguments[position]
            if trace:
                rank.came_to(position, now_us)
            if kind == OpKind.COMPUTE:
                rank.result.compute_us += argument
                if trace:
                    label, is_backward = program.labels[position]
                    what = "other" if not label else "backward" if is_backward else "forward"
                    trace.spans.append(Span("compute", what, label, now_us, argument))
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
        rank.came_to(num_ops, environment.now)
        rank.result.end_us = environment.now
        rank.is_done = True

    def _arrival_of(self, message: int) -> simpy.Event:
        return self._arrivals.setdefault(message, self.environment.event())

    def _send(self, message: int) -> None:
        flight = self.environment.timeout(self._transfer_us[message % len(self._transfer_us)])
        assert flight.callbacks is not None
        flight.callbacks.append(self._arrival_of(message).trigger)

    # Copies

    def _begin_copy(self, queue: _Queue) -> None:
        queue.copy = queue.waiting.popleft() if queue.waiting else None
        if queue.copy is not None:
            queue.rest_bytes, queue.rate = queue.rank.program.copy_bytes[queue.copy], 0.0
            queue.start_us = queue.since_us = self.environment.now

    def _end_copy(self, queue: _Queue, num_rates: int, node: list[_Streams], _: object) -> None:
        """End a queue's copy, unless its rate has changed since this end was set."""
        if num_rates != queue.num_rates:
            return
        rank, copy, now_us = queue.rank, queue.copy, self.environment.now
        assert copy is not None
        rank.is_over[copy] = True
        if rank.result.trace is not None:
            stream, program = "d2h" if queue.is_d2h else "h2d", rank.program
            what = program.copy_labels[copy], queue.start_us, now_us - queue.start_us
            span = Span(stream, stream, *what, program.copy_bytes[copy])
            rank.result.trace.spans.append(span)
        self._begin_copy(queue)
        self._share_anew(node)
        if rank.awaited is not None and rank.awaited[0] == copy:
            rank.awaited[1].succeed(queue.is_d2h)

    def _share_anew(self, node: list[_Streams]) -> None:
        """Share a node's bandwidth among the copies that run now."""
        busy = [(rank.d2h.copy is not None, rank.h2d.copy is not None) for rank in node]
        ways = ((True, False), (False, True), (True, True))
        rates = self._rates(*map(busy.count, ways))
        for rank in node:
            d2h, h2d = rank.d2h, rank.h2d
            if d2h.copy is not None:
                self._set_rate(d2h, rates[0 if h2d.copy is None else 2], node)
            if h2d.copy is not None:
                self._set_rate(h2d, rates[1 if d2h.copy is None else 3], node)

    def _set_rate(self, queue: _Queue, rate: float, node: list[_Streams]) -> None:
        if rate == queue.rate:
            return
        now_us = self.environment.now
        queue.rest_bytes -= queue.rate * (now_us - queue.since_us)
        queue.rate, queue.since_us = rate, now_us
        queue.num_rates += 1
        end = self.environment.timeout(max(0.0, queue.rest_bytes) / rate)
        assert end.callbacks is not None
        end.callbacks.append(functools.partial(self._end_copy, queue, queue.num_rates, node))

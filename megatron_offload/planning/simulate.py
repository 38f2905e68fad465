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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import simpy

from megatron_offload.core.trace import PIPELINE_WAIT, Counter, Span, StepTrace
from megatron_offload.errors import ConfigError
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.replay import OpKind, RankStep, replay

RELEASE = "W2"
"""The stall at a release, whose copy to the host is not over."""
RELOAD = "W4"
"""The stall at a backward, whose reload is not over."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step was."""

    step_us: float
    """Until the last rank is done."""
    ranks: tuple[RankStep, ...]
    """Each with its times."""


def simulate(job: Job, settings: RankSettings | None = None, *, record: bool = False) -> Simulation:
    """Predict one steady training step.

    Args:
        job: the step.
        settings: of every pipeline rank; unless given, nothing is offloaded.
        record: keep the spans of all streams and the bytes over time; see `RankStep.trace`.

    Raises:
        ConfigError: the schedule's ranks wait in a circle.
    """
    ranks = range(job.schedule.num_ranks)
    return simulate_ranks(job, [replay(job, rank, settings, records=record) for rank in ranks])


def simulate_ranks(job: Job, replayed: Sequence[RankStep]) -> Simulation:
    """Predict a step of which each rank was replayed; recorded ones give a trace."""
    stalls = dict.fromkeys((PIPELINE_WAIT, RELEASE, RELOAD), 0.0)
    ranks = tuple(
        replace(
            one,
            compute_us=0.0,
            stall_us=stalls.copy(),
            cycle=[],
            trace=StepTrace(index) if one.labels else None,
        )
        for index, one in enumerate(replayed)
    )
    step = _Step(job, ranks)
    step.environment.run()
    stuck = [str(rank) for rank, process in enumerate(step.processes) if process.is_alive]
    if stuck:
        raise ConfigError(
            f"schedule {job.schedule.name!r}: pipeline ranks {', '.join(stuck)} wait for each other"
        )
    if num_repeats := job.schedule.num_repeats:  # of a cycle, at the pace of the slowest rank
        cycles = [[end - begin for begin, end in zip(*one.cycle, strict=True)] for one in ranks]
        cycle_us = max(us for us, *_ in cycles)
        for one, (us, compute_us, *stalls_us) in zip(ranks, cycles, strict=True):
            one.end_us += num_repeats * cycle_us
            one.compute_us += num_repeats * compute_us
            for cause, lost_us in zip(one.stall_us, stalls_us, strict=True):
                one.stall_us[cause] += num_repeats * lost_us
            # Ranks whose cycle took less will wait for the slowest.
            one.stall_us[PIPELINE_WAIT] += num_repeats * (cycle_us - us)
    return Simulation(max(one.end_us for one in ranks), ranks)


def fair_rates(
    machine: Machine, gpus_per_rank: int, num_d2h: int, num_h2d: int, num_both: int
) -> tuple[float, ...]:
    """Return the rates where so many ranks of a node copy each way, or both; 0 for what none does.

    They are bytes per microsecond of a copy to the host, of one to the device, and of each with the
    other direction busy. All are raised together, those to the host faster by `node_d2h_share`, and
    those that a limit binds stop there.
    """
    numbers = [gpus_per_rank * number for number in (num_d2h, num_h2d, num_both, num_both)]
    both_gbps = (min(machine.both_gbps, one) for one in (machine.d2h_gbps, machine.h2d_gbps))
    rates = [machine.d2h_gbps, machine.h2d_gbps, *both_gbps]
    weights = [machine.node_d2h_share, 1 - machine.node_d2h_share] * 2
    limits = ((0, 2), machine.node_d2h_gbps), ((1, 3), machine.node_h2d_gbps)
    for kinds, gbps in (*limits, (range(4), machine.node_gbps)):
        left_gbps, left = gbps or math.inf, sum(numbers[kind] * weights[kind] for kind in kinds)
        for kind in sorted(kinds, key=lambda kind: rates[kind] / weights[kind]):
            own_gbps = left_gbps * weights[kind] / left if left else 0.0
            rates[kind] = min(rates[kind], own_gbps) if numbers[kind] else 0.0
            left_gbps -= rates[kind] * numbers[kind]
            left -= numbers[kind] * weights[kind]
    return tuple(rate * 1e3 for rate in rates)


class _Queue:
    """A copy stream: copies in the order of issue, one at a time."""

    def __init__(self, rank: RankStep, name: str, cause: str) -> None:
        self.rank, self.name, self.cause = rank, name, cause
        # Of each copy the bytes, the op that issued it, and its end; the first is under way.
        self.copies = deque[tuple[int, int, simpy.Event]]()
        self.rest_bytes = self.rate = self.start_us = self.since_us = 0.0
        self.end: simpy.Event | None = None  # when it will be over, as things are


_Queues: TypeAlias = tuple[_Queue, _Queue]
"""Of a rank: to the host, and to the device."""


class _Step:
    """The streams of all ranks, and what they share."""

    def __init__(self, job: Job, ranks: Sequence[RankStep]) -> None:
        self.environment = simpy.Environment()
        machine = job.machine
        gpus_per_rank = min(job.gpus_per_rank, machine.gpus_per_node)
        self._rates = functools.cache(functools.partial(fair_rates, machine, gpus_per_rank))
        latency_us, rate = machine.p2p_latency_us, 1e3 * machine.p2p_gbps
        output_us = [latency_us + stage.output_bytes / rate for stage in job.stages]
        # By number, less the microbatch. A gradient is as large as what the stage before has sent.
        self._transfer_us = [
            us for stage in range(len(output_us)) for us in (output_us[stage - 1], output_us[stage])
        ]
        self._messages: dict[int, simpy.Event] = defaultdict(self.environment.event)
        queues = [(_Queue(one, "d2h", RELEASE), _Queue(one, "h2d", RELOAD)) for one in ranks]
        size = job.ranks_per_node
        nodes = [queues[first : first + size] for first in range(0, len(ranks), size)]
        streams = (self._compute_stream(own, node) for node in nodes for own in node)
        self.processes = [*map(self.environment.process, streams)]

    def _after(
        self, us: float, what: Callable[[simpy.Event], None], value: Any = None
    ) -> simpy.Event:
        event = self.environment.timeout(us, value)
        assert event.callbacks is not None
        event.callbacks.append(what)
        return event

    def _compute_stream(
        self, queues: _Queues, node: Sequence[_Queues]
    ) -> Generator[simpy.Event, Any, None]:
        rank = queues[0].rank
        environment, messages, trace = self.environment, self._messages, rank.trace
        ends: dict[int, simpy.Event] = {}  # of copies, by their numbers
        begun_us: list[float] = []
        for position, (kind, argument) in enumerate(zip(rank.kinds, rank.arguments, strict=True)):
            now_us, number = environment.now, int(argument)
            if trace:
                begun_us.append(now_us)
            if kind == OpKind.COMPUTE:
                rank.compute_us += argument
                if trace:
                    label, is_backward = rank.labels[position]
                    what = "other" if not label else "backward" if is_backward else "forward"
                    _add_span(rank, "compute", what, position, now_us, argument)
                yield environment.timeout(argument)
            elif kind == OpKind.RECEIVE or kind == OpKind.AWAIT:
                end = messages[number] if kind == OpKind.RECEIVE else ends[number]
                if not end.triggered:
                    cause = yield end
                    lost_us = environment.now - now_us
                    if lost_us > 0:
                        rank.stall_us[cause] += lost_us
                        _add_span(rank, "compute", "stall", position, now_us, lost_us, wait=cause)
                del (messages if kind == OpKind.RECEIVE else ends)[number]
            elif kind == OpKind.SEND:
                us = self._transfer_us[number % len(self._transfer_us)]
                self._after(us, messages[number].trigger, PIPELINE_WAIT)
            elif kind == OpKind.CYCLE:
                rank.cycle.append((environment.now, rank.compute_us, *rank.stall_us.values()))
            else:
                queue, end = queues[kind == OpKind.RELOAD], environment.event()
                ends[number] = end
                queue.copies.append((rank.copy_bytes[number], position, end))
                if len(queue.copies) == 1:
                    self._begin_copy(queue, node)
        rank.end_us = environment.now
        if trace:
            begun_us.append(rank.end_us)
            for position, counts in rank.memory:
                for name, num_bytes in counts.items():
                    trace.counters.append(Counter(name, begun_us[position], num_bytes))

    def _begin_copy(self, queue: _Queue, node: Sequence[_Queues]) -> None:
        """Begin a queue's next copy, if there is one, and share the node's bandwidth anew."""
        if queue.copies:
            queue.rest_bytes, queue.rate = queue.copies[0][0], 0.0
            queue.start_us = queue.since_us = self.environment.now
        busy = [(bool(d2h.copies), bool(h2d.copies)) for d2h, h2d in node]
        ways = ((True, False), (False, True), (True, True))
        rates = self._rates(*map(busy.count, ways))
        for queues, has_copies in zip(node, busy, strict=True):
            own_rates = rates[2:] if all(has_copies) else rates[:2]
            for one, rate in zip(queues, own_rates, strict=True):
                if one.copies and rate != one.rate:
                    self._set_rate(one, rate, node)

    def _set_rate(self, queue: _Queue, rate: float, node: Sequence[_Queues]) -> None:
        now_us = self.environment.now
        queue.rest_bytes -= queue.rate * (now_us - queue.since_us)
        queue.rate, queue.since_us = rate, now_us
        end_copy = functools.partial(self._end_copy, queue, node)
        queue.end = self._after(max(0.0, queue.rest_bytes) / rate, end_copy)

    def _end_copy(self, queue: _Queue, node: Sequence[_Queues], end: simpy.Event) -> None:
        """End a queue's copy, unless its rate has changed since this end was set."""
        if end is queue.end:
            (num_bytes, position, done), start_us = queue.copies.popleft(), queue.start_us
            us = self.environment.now - start_us
            _add_span(
                queue.rank, queue.name, queue.name, position, start_us, us, num_bytes=num_bytes
            )
            self._begin_copy(queue, node)
            done.succeed(queue.cause)


def _add_span(
    rank: RankStep, stream: str, kind: str, position: int, since_us: float, us: float, **more: Any
) -> None:
    """Note what a stream does about an op, where a trace is kept."""
    if rank.trace is not None:
        label = rank.labels[position][0]
        rank.trace.spans.append(Span(stream, kind, label, since_us, us, **more))

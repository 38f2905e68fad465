"""What plans of a described job need and take: counted at once, replayed and simulated for good.

What a plan takes of memory depends on no time, so it is replayed for one rank alone; how long the
step takes is simulated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from megatron_offload.core.row_config import UNITS, RowConfig
from megatron_offload.planning.frontier import Plan, frontier
from megatron_offload.planning.job import Job, RankSettings, node_bytes
from megatron_offload.planning.job_rows import WHOLE_SITES, RankLayers, with_rows
from megatron_offload.planning.replay import RankStep, replay
from megatron_offload.planning.simulate import Simulation, simulate_ranks

SLOW_LINK_SHARE = 0.8
"""Of the bandwidth of copies, what a plan within a limit of time has to do with. One that was to
cost four H200s 0.5 % at most, with all of it, cost them 3.6 % (docs/planning.md)."""

NOTHING = Plan({}, 0, 0.0, 0)
_REPLAY_US, _BARE_REPLAY_US, _OP_US = 4.2, 0.5, 2.2  # of a boundary, and of a simulated op
_MOST_FITS = 3  # plans that are replayed for a rank and a level


class Family(NamedTuple):
    """How plans are made."""

    units: tuple[str, ...]
    """That run again in all layers."""
    share: float
    """Of the link."""


class Judged(NamedTuple):
    """Plans of all ranks, and what they need and take."""

    family: Family
    plans: tuple[Plan, ...]
    step: Simulation
    num_bytes: int
    """Of the fullest rank, less what it may need more than others."""
    host_bytes: int
    """Pinned on the fullest node."""
    percent: float
    """Of the step without anything, up to a hundredth: what it takes longer."""

    @property
    def copied_bytes(self) -> int:
        """What all ranks copy to the host."""
        return sum(rank.offloaded_bytes for rank in self.step.ranks)

    def rows(self) -> tuple[RowConfig, ...]:
        """Return the plans as a person writes them."""
        actions = {number: x for plan in self.plans for number, x in plan.actions.items()}
        return Plan.of(actions).rows()


class Judge:
    """Counts, replays and simulates plans of one job, and knows what was asked before.

    Args:
        job: the step.
        bare: that without anything.
        settings: what a user has set.
        offsets: what each rank may need more than the one that may least.
    """

    def __init__(
        self, job: Job, bare: Simulation, settings: RankSettings, offsets: Sequence[int]
    ) -> None:
        self._job, self._settings, self._offsets = job, settings, offsets
        self._may = settings.recomputable((*UNITS, *WHOLE_SITES))
        self._sites = [site for site in WHOLE_SITES if site in self._may]
        self._ranks = range(job.schedule.num_ranks)
        self._bare = bare
        self._host_bytes = job.machine.host_bytes
        rates = ((name, rate) for name, rate in job.machine if "gbps" in name and "p2p" not in name)
        slow = {name: rate and rate * SLOW_LINK_SHARE for name, rate in rates}
        self._slow_job = replace(job, machine=job.machine.model_copy(update=slow))
        self._boundaries = [
            sum(2 * len(job.stages[one.stage].groups) for one in passes)
            for passes in job.schedule.ranks
        ]
        self._work_us = 0.0
        self._near_bytes = 0  # of a level, what is as good as on it
        self.layers = cache(partial(RankLayers, job))
        self.plans = cache(self._frontier)
        self._actions = cache(lambda *own: self.layers(*own).actions(self._sites))
        fullest = max(self._ranks, key=self._bare_bytes)
        busiest = max(self._ranks, key=lambda rank: self.layers(rank, ()).counted_us(NOTHING))
        self._counted_ranks = {fullest, busiest}
        self._steps = dict[tuple[object, ...], RankStep]()
        self._errors = dict[int, tuple[int, int]]()
        self._found = dict[tuple[int, ...], Judged]()
        self._slow = dict[int, tuple[float, Judged]]()  # kept, so that no other has its id

    # What is counted

    def _bare_bytes(self, rank: int) -> int:
        return self._bare.ranks[rank].peak_reserved_bytes - self._offsets[rank]

    def _predicted(self, rank: int, family: Family, plan: Plan) -> int:
        """Return about what a rank needs, less its offset."""
        freed_bytes = self.layers(rank, family.units).units_bytes + plan.freed_bytes
        return self._bare_bytes(rank) - freed_bytes + self._error(rank, plan)

    def _place(self, rank: int, family: Family, level: int, plans: Sequence[Plan]) -> int:
        """Return the first plan of a frontier that seems to fit; behind the last for none."""
        return bisect_left(
            plans, True, key=lambda plan: self._predicted(rank, family, plan) <= level
        )

    def _fitting(self, rank: int, family: Family, level: int, plans: Sequence[Plan]) -> Plan:
        """Return about the first plan of a frontier that fits; else the last."""
        seen = dict[int, int]()
        for _ in range(_MOST_FITS):
            place = min(self._place(rank, family, level, plans), len(plans) - 1)
            if place in seen or any(0 <= level - x <= self._near_bytes for x in seen.values()):
                break
            plan = plans[place]
            seen[place] = self._replayed(rank, plan).peak_reserved_bytes - self._offsets[rank]
            error = self._error(rank, plan)
            error += seen[place] - self._predicted(rank, family, plan)
            self._errors[rank] = error, plan.copied_bytes
        fit = [place for place, num_bytes in seen.items() if num_bytes <= level]
        return plans[min(fit) if fit else max(seen)]

    def _error(self, rank: int, plan: Plan) -> int:
        """Return by how much more is needed than predicted, as copies in flight take memory, too.

        It is known of another plan of the rank, or else of the rank before.
        """
        error, copied_bytes = self._errors.get(rank, self._errors.get(rank - 1, (0, 0)))
        return int(error * plan.copied_bytes / copied_bytes) if copied_bytes else error

    def _counted(self, family: Family, level: int) -> tuple[float, float] | None:
        """Return by a count what a step takes longer; None where the level is out of reach.

        First come the microseconds in which a microbatch's copies need the link.
        """
        load_us = us = bare_us = 0.0
        for rank in self._counted_ranks:
            plans, layers = self.plans(rank, family), self.layers(rank, family.units)
            place = self._place(rank, family, level, plans)
            if place == len(plans):
                return None
            load_us = max(load_us, plans[place].copied_bytes / layers.link_bytes_per_us)
            us = max(us, layers.counted_us(plans[place]))
            bare_us = max(bare_us, self.layers(rank, ()).counted_us(NOTHING))
        return load_us, 100 * (us / bare_us - 1)

    # What is known

    def _frontier(self, rank: int, family: Family) -> list[Plan]:
        layers, actions = self.layers(rank, family.units), self._actions(rank, family.units)
        plans = frontier([actions], layers.link_bytes(SLOW_LINK_SHARE * family.share))
        return [layers.paced(plan, actions) for plan in plans]

    def _replayed(self, rank: int, plan: Plan) -> RankStep:
        key = rank, tuple((number, action.parts) for number, action in plan.actions.items())
        if key not in self._steps:
            self._steps[key] = replayed(self._job, rank, plan.rows(), self._settings)
            work = _REPLAY_US if self._steps[key].copy_bytes else _BARE_REPLAY_US
            self._work_us += work * self._boundaries[rank]
        return self._steps[key]

    def _judge(self, family: Family, each: Iterable[Plan]) -> Judged:
        plans = tuple(each)
        steps = [self._replayed(rank, plan) for rank, plan in enumerate(plans)]
        key = tuple(map(id, steps))
        if key not in self._found:
            step, percent = self._simulated(self._job, steps)
            pairs = zip(steps, self._offsets, strict=True)
            num_bytes = max(rank.peak_reserved_bytes - offset for rank, offset in pairs)
            host_bytes = node_bytes(self._job, [rank.peak_host_bytes for rank in steps])
            self._found[key] = Judged(family, plans, step, num_bytes, host_bytes, percent)
        return self._found[key]

    def slow_percent(self, one: Judged) -> float:
        """Return what a plan takes longer with a slower link, too."""
        if not one.copied_bytes:
            return one.percent
        if id(one) not in self._slow:
            percent = self._simulated(self._slow_job, one.step.ranks)[1]
            self._slow[id(one)] = max(one.percent, percent), one
        return self._slow[id(one)][0]

    def _simulated(self, job: Job, steps: Sequence[RankStep]) -> tuple[Simulation, float]:
        step = simulate_ranks(job, steps)
        self._work_us += _OP_US * sum(len(rank.kinds) for rank in steps)
        return step, math.ceil(1e4 * (step.step_us / self._bare.step_us - 1) - 1e-4) / 100


def replayed(job: Job, rank: int, rows: Sequence[RowConfig], limits: RankSettings) -> RankStep:
    """Return what a rank's streams do where its layers have rows, within limits of a user."""
    return replay(with_rows(job, rows, job.schedule.stages_of(rank)), rank, limits)

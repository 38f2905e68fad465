"""Which rows a described job gets: few plans of the frontier are simulated, and one is chosen.

A candidate says which units run again in all layers, and how much of the link copies shall take.
Each makes a frontier of each pipeline rank. What a plan takes of memory depends on no time, so it
is replayed for one rank alone; how long the step takes is simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product
from typing import NamedTuple, NoReturn, TypeAlias

from megatron_offload.core.row_config import UNITS, RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import TargetError
from megatron_offload.planning.found import FoundStage, RunFrontier
from megatron_offload.planning.frontier import Action, Plan, frontier, total
from megatron_offload.planning.job import UNLIMITED, Job, RankSettings
from megatron_offload.planning.job_rows import (
    WHOLE_SITES,
    RankLayers,
    units_of,
    with_rows,
)
from megatron_offload.planning.replay import RankStep, replay
from megatron_offload.planning.row_choice import ladder
from megatron_offload.planning.simulate import Simulation, simulate, simulate_ranks

SLOW_LINK_SHARE = 0.8
"""Of the bandwidth of copies, what a plan within a limit of time has to do with. One that was to
cost four H200s 0.5 % at most, with all of it, cost them 3.6 % (docs/planning.md)."""

_LINK_SHARES = (1.0, 0.6, 0.0, 1.6, 0.3, 3.0, 0.8, 1.25, 0.45, 2.2)
_MOST_BOUNDARIES = 500_000  # of groups, that are replayed and simulated: some seconds of one core
_MOST_SHOWN = _MOST_BOUNDARIES // 5  # of them, for what plans need that weren't chosen
_POLISHED_PERCENT = 1.0  # of a step: what costs less is good enough
_POLISHING = 3.0  # of those boundaries, and of jobs that are small beside them
_ALIKE = 5e-4  # of a step: the one that copies less is better
_TRIES = (1.0, 0.8, 0.5, 0.0)  # of a limit, where the whole job takes more than the short one


_Units: TypeAlias = tuple[str, ...]
"""That run again in all layers."""


class _Ranks(NamedTuple):
    """What all ranks do: of each the frontier, and the place of its plan in that."""

    units: _Units
    frontiers: tuple[Sequence[Plan], ...]
    places: tuple[int, ...]

    def changed(self, rank: int, plans: Sequence[Plan], place: int) -> _Ranks:
        frontiers, places = list(self.frontiers), list(self.places)
        frontiers[rank], places[rank] = plans, place
        return _Ranks(self.units, tuple(frontiers), tuple(places))


class Planned(NamedTuple):
    """Rows of a job, and the step with them."""

    found: RunFrontier
    rows: tuple[RowConfig, ...]
    step: Simulation


class JobChoice:
    """Finds rows for a described job.

    Args:
        job: the step.
        short: the same with fewer microbatches, in which ranks hold as much; the step itself
            unless given.
        settings: what a user has set.

    Attributes:
        without: the step without offload.
    """

    def __init__(
        self, job: Job, short: Job | None = None, settings: RankSettings = UNLIMITED
    ) -> None:
        self._job, self._short, self._settings = job, short or job, settings
        self.without = simulate(job)

    def under(self, targets: Sequence[int]) -> Planned:
        """Return the quickest plan found that keeps each rank within its target.

        Raises:
            TargetError: one can't be kept.
        """
        search, wanted = _Search(self._short, self._settings), targets
        while True:
            planned = self._planned(search, search.under(wanted), "the targets")
            pairs = zip(planned.step.ranks, targets, strict=True)
            over = [max(0, rank.peak_reserved_bytes - target) for rank, target in pairs]
            if not any(over):
                return planned
            # In the short job a rank needs a little less.
            wanted = [target - more for target, more in zip(wanted, over, strict=True)]

    def within(self, most_slowdown_percent: float) -> Planned:
        """Return the plan found with the least memory that costs no more time, with a slower link.

        What counts is the rank that needs most, then what all need.
        """
        limit_us = self.without.step_us * (1 + most_slowdown_percent / 100)
        search = _Search(self._short, self._settings)
        text = f"at most {most_slowdown_percent:g} % of the step's time"
        for share in _TRIES:
            planned = self._planned(search, search.within(share * most_slowdown_percent), text)
            if planned.step.step_us <= limit_us:
                break
        return planned

    def step(self, rows: Sequence[RowConfig]) -> Simulation:
        """Return the step where layers have rows."""
        ranks = range(self._job.schedule.num_ranks)
        replayed_ranks = [replayed(self._job, rank, rows, self._settings) for rank in ranks]
        return simulate_ranks(self._job, replayed_ranks)

    def _planned(self, search: _Search, chosen: _Ranks, what: str) -> Planned:
        found = search.found(chosen, f"rows of a described job, chosen by simulation for {what}")
        return Planned(found, found.rows(), self.step(found.rows()))


class _Search:
    """Looks for what ranks do in one job."""

    def __init__(self, job: Job, settings: RankSettings) -> None:
        self._job, self._settings = job, settings
        may = settings.recomputable((*UNITS, *WHOLE_SITES))
        self._sites = [site for site in WHOLE_SITES if site in may]
        units = tuple(unit for unit in units_of(job) if unit in may)
        sets = dict.fromkeys(((), units, *((unit,) for unit in units)))
        self._candidates = list(product(_LINK_SHARES, sets))
        self._ranks = range(job.schedule.num_ranks)
        self._bare = simulate(job)
        self._bare_us = max(1.0, self._bare.step_us / job.schedule.num_microbatches)
        rates = ((name, rate) for name, rate in job.machine if "gbps" in name and "p2p" not in name)
        slow = {name: rate and rate * SLOW_LINK_SHARE for name, rate in rates}
        self._slow_job = replace(job, machine=job.machine.model_copy(update=slow))
        self._boundaries = [
            sum(2 * len(job.stages[one.stage].groups) for one in passes)
            for passes in job.schedule.ranks
        ]
        self._passed = 0  # of all boundaries
        # What was asked before is known.
        self._layers = cache(partial(RankLayers, job))
        self._plans = cache(self._frontier)
        self._steps = dict[tuple[object, ...], RankStep]()
        self._simulations = dict[tuple[tuple[int, ...], bool], Simulation]()

    def under(self, targets: Sequence[int]) -> _Ranks:
        """Return what keeps targets; `TargetError` where nothing does."""
        found, order = list[_Ranks](), list(self._ranks)
        for share, units in self._candidates:
            places: dict[int, int] = {}
            for rank in order if self._has_time(0.5) or not found else ():
                place = self._fitting(rank, units, share, targets[rank])
                if place is None:
                    order.sort(key=rank.__ne__)  # if another candidate fails, it does there
                    break
                places[rank] = place
            if len(places) == len(order):
                own = tuple(places[rank] for rank in self._ranks)
                found.append(_Ranks(units, self._frontiers(units, share), own))
                self._simulate(found[-1])
        if not found:
            self._refuse(targets)
        best = self._quickest(found)
        for rank in self._ranks:
            for share, units in self._candidates if self._has_time() else ():
                if units == best.units:
                    place = self._fitting(rank, units, share, targets[rank])
                    if place is not None:
                        other = best.changed(rank, self._plans(rank, units, share), place)
                        best = self._quickest([best, other])
        last, is_small = None, sum(self._boundaries) < _MOST_BOUNDARIES // 100
        good_us = self._bare.step_us * (1 + _POLISHED_PERCENT / 100)
        while is_small and best != last and self._simulate(best).step_us > good_us:
            last = best
            for rank in self._ranks:
                best = self._polished(best, rank, targets[rank])
        return best

    def within(self, percent: float) -> _Ranks:
        """Return what takes so much more of the step at most."""
        limit_us = self._bare.step_us * (1 + percent / 100)
        nothing = self._frontiers((), 1.0)
        found = [_Ranks((), nothing, (0,) * len(nothing))]
        for share, units in self._candidates:
            if self._has_time(0.5):
                every = self._frontiers(units, share)
                rungs = [_Ranks(units, every, places) for places in ladder(every)]
                most_us = percent / 100 * self._bare_us
                most_us -= max(self._layers(rank, units).units_us for rank in self._ranks)
                first = bisect_right(sorted(x.us for own in every for x in own[1:]), most_us)
                found += self._climbed(rungs, first, limit_us)[-1:]
        best = min(found, key=self._memory)
        peaks = [step.peak_reserved_bytes for step in self._steps_of(best)]
        for rank in sorted(self._ranks, key=lambda rank: -peaks[rank]):
            plans, now = best.frontiers[rank], best.places[rank]
            rungs = [best.changed(rank, plans, place) for place in range(now + 1, len(plans))]
            good = self._climbed(rungs, (len(rungs) - 1) // 2, limit_us)
            best = min([best, *good], key=self._memory)
        return best

    def found(self, chosen: _Ranks, said: str) -> RunFrontier:
        """Return all plans of the frontiers on which the chosen ones are."""
        stages = []
        for rank, (plans, followed) in enumerate(zip(chosen.frontiers, chosen.places, strict=True)):
            boundaries = len(plans) * self._boundaries[rank] * len(self._ranks)
            shown = {followed, *range(0, len(plans), 1 + boundaries // _MOST_SHOWN)}
            tried = {place: (None, self._peak(rank, plans[place])) for place in shown}
            bare_bytes = self._bare.ranks[rank].peak_reserved_bytes
            layers = self._layers(rank, chosen.units)
            more, us = layers.units_bytes, layers.units_us
            whole = [x._replace(freed_bytes=more + x.freed_bytes, us=us + x.us) for x in plans]
            found = FoundStage.of(
                *(whole, tried, self._bare_us),
                name=str(rank),
                bare_bytes=bare_bytes,
                followed=followed,
            )
            stages.append(found)
        return RunFrontier(said=said, stages=tuple(stages))

    def _fitting(self, rank: int, units: _Units, share: float, target: int) -> int | None:
        """Return the first plan of a rank that seems to keep a target, if one does."""
        plans = self._plans(rank, units, share)
        place = bisect_left(plans, True, key=lambda plan: self._peak(rank, plan) <= target)
        return place if place < len(plans) else None

    def _climbed(self, rungs: Sequence[_Ranks], place: int, limit_us: float) -> list[_Ranks]:
        """Return rungs that take no longer than they may with a slower link, in their order.

        They are found by halving from a place on; behind the last of them it takes too long, as far
        as there is time to see.
        """
        low, high, found = -1, len(rungs), list[_Ranks]()
        while high - low > 1 and self._has_time():
            if self._simulate(rungs[place], is_slow=True).step_us <= limit_us:
                low = place
                found.append(rungs[place])
            else:
                high = place
            place = (low + high) // 2
        return found

    def _polished(self, best: _Ranks, rank: int, target: int) -> _Ranks:
        """Let single layers of a rank do something else, or two do what the other did."""
        actions = self._layers(rank, best.units).actions(self._sites)
        changes: list[dict[int, Action | int]] = [
            {number: one} for number, own in actions.items() for one in own
        ]
        changes += [{x: y, y: x} for x, y in combinations(actions, 2) if actions[x] == actions[y]]
        for change in changes:
            plans, place = best.frontiers[rank], best.places[rank]
            now = dict(plans[place].actions)
            after = now | {n: now[x] if isinstance(x, int) else x for n, x in change.items()}
            plan = Plan(after, *total(after.values())[1:])
            if self._has_time(_POLISHING) and self._peak(rank, plan) <= target:
                polished = [*plans[:place], plan, *plans[place + 1 :]]
                best = self._quickest([best, best.changed(rank, polished, place)])
        return best

    def _refuse(self, targets: Sequence[int]) -> NoReturn:
        for rank, target in enumerate(targets):
            own = (step for (other, *_), step in self._steps.items() if other == rank)
            least = min(step.peak_reserved_bytes for step in own)
            if least > target:
                sizes = (format_bytes(size, 2) for size in (target, least, least - target))
                raise TargetError(
                    "pipeline rank {} can't be brought under {}: with all that can move it still "
                    "takes {}, {} more".format(rank, *sizes)
                )
        raise TargetError("no units that run again in all layers let all ranks keep their targets")

    def _frontier(self, rank: int, units: _Units, share: float) -> list[Plan]:
        layers = self._layers(rank, units)
        actions = layers.actions(self._sites)
        plans = frontier([actions], layers.link_bytes(SLOW_LINK_SHARE * share))
        return [layers.paced(plan, actions) for plan in plans]

    def _frontiers(self, units: _Units, share: float) -> tuple[list[Plan], ...]:
        return tuple(self._plans(rank, units, share) for rank in self._ranks)

    def _replayed(self, rank: int, plan: Plan) -> RankStep:
        key = rank, tuple((number, action.parts) for number, action in plan.actions.items())
        if key not in self._steps:
            self._steps[key] = replayed(self._job, rank, plan.rows(), self._settings)
            self._passed += self._boundaries[rank]
        return self._steps[key]

    def _peak(self, rank: int, plan: Plan) -> int:
        return self._replayed(rank, plan).peak_reserved_bytes

    def _steps_of(self, ranks: _Ranks) -> list[RankStep]:
        plans = (own[place] for own, place in zip(ranks.frontiers, ranks.places, strict=True))
        return [self._replayed(rank, plan) for rank, plan in enumerate(plans)]

    def _simulate(self, ranks: _Ranks, *, is_slow: bool = False) -> Simulation:
        steps = self._steps_of(ranks)
        key = tuple(map(id, steps)), is_slow
        if key not in self._simulations:
            self._simulations[key] = simulate_ranks(self._slow_job if is_slow else self._job, steps)
            self._passed += sum(self._boundaries)
        return self._simulations[key]

    def _memory(self, ranks: _Ranks) -> tuple[int, int]:
        peaks = [step.peak_reserved_bytes for step in self._steps_of(ranks)]
        return max(peaks), sum(peaks)

    def _quickest(self, found: Sequence[_Ranks]) -> _Ranks:
        """Return the one whose step is shortest; of those that are alike, which copies least."""
        most_us = min(self._simulate(one).step_us for one in found) * (1 + _ALIKE)

        def copied_bytes(one: _Ranks) -> int:
            return sum(rank.offloaded_bytes for rank in self._simulate(one).ranks)

        return min((x for x in found if self._simulate(x).step_us <= most_us), key=copied_bytes)

    def _has_time(self, share: float = 1.0) -> bool:
        return self._passed < share * _MOST_BOUNDARIES


def replayed(
    job: Job, rank: int, rows: Sequence[RowConfig], limits: RankSettings = UNLIMITED
) -> RankStep:
    """Return what a rank's streams do where its layers have rows, within limits of a user."""
    return replay(with_rows(job, rows, job.schedule.stages_of(rank)), rank, limits)

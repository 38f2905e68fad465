"""Which rows a described job gets: few plans of the frontier are simulated, and one is chosen.

A candidate says which units run again in all layers, and how much of the link copies shall take.
Each makes a frontier of each pipeline rank. What a plan takes of memory depends on no time, so it
is replayed for one rank alone; how long the step takes is simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple, NoReturn

from megatron_offload.core.row_config import UNITS, RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import TargetError
from megatron_offload.planning.found import FoundPlan, FoundStage, RunFrontier
from megatron_offload.planning.frontier import KEEP, Action, Plan, frontier, total
from megatron_offload.planning.job import UNLIMITED, Job, RankSettings
from megatron_offload.planning.job_rows import (
    WHOLE_SITES,
    actions_of,
    inflight,
    link_bytes,
    paced,
    units_of,
    with_rows,
    with_units,
)
from megatron_offload.planning.replay import RankStep, replay
from megatron_offload.planning.row_choice import ladder
from megatron_offload.planning.simulate import (
    RELEASE,
    RELOAD,
    Simulation,
    simulate,
    simulate_ranks,
)

RECOMPUTABLE = (*UNITS, *WHOLE_SITES)
"""What rows of a plan recompute, unless less is allowed."""

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


class _Candidate(NamedTuple):
    units: tuple[str, ...]
    share: float
    """Of what the link carries, as much as copies shall take."""


class _Ranks(NamedTuple):
    """What all ranks do: of each the frontier, and the place of its plan in that."""

    units: tuple[str, ...]
    frontiers: tuple[Sequence[Plan], ...]
    places: tuple[int, ...]

    def changed(self, rank: int, plans: Sequence[Plan], place: int) -> _Ranks:
        frontiers, places = list(self.frontiers), list(self.places)
        frontiers[rank], places[rank] = plans, place
        return _Ranks(self.units, tuple(frontiers), tuple(places))


@dataclass(frozen=True)
class Planned:
    """Rows of a job."""

    job: Job
    found: RunFrontier
    rows: tuple[RowConfig, ...]
    programs: list[RankStep]
    """What ranks do with the rows."""

    @cached_property
    def step(self) -> Simulation:
        """The step with the rows."""
        return simulate_ranks(self.job, self.programs)


class JobChoice:
    """Finds rows for a described job.

    Args:
        job: the step.
        short: the same with fewer microbatches, in which ranks hold as much; the step itself
            unless given.
        settings: the limits that a user has set.
        may: the units and sites that may be recomputed.

    Attributes:
        without: the step without offload.
    """

    def __init__(
        self,
        job: Job,
        short: Job | None = None,
        settings: RankSettings = UNLIMITED,
        may: Collection[str] = RECOMPUTABLE,
    ) -> None:
        self._job, self._short, self._settings, self._may = job, short or job, settings, may
        self.without = simulate(job)

    def under(self, targets: Sequence[int]) -> Planned:
        """Return the quickest plan found that keeps each rank within its target.

        Raises:
            TargetError: one can't be kept.
        """
        search, wanted = _Search(self._short, self._settings, self._may), targets
        while True:
            planned = self._planned(search, search.under(wanted), "the targets")
            peaks = [rank.peak_reserved_bytes for rank in planned.programs]
            over = [max(0, peak - target) for peak, target in zip(peaks, targets, strict=True)]
            if not any(over):
                return planned
            # In the short job a rank needs a little less.
            wanted = [target - more for target, more in zip(wanted, over, strict=True)]

    def within(self, most_slowdown_percent: float) -> Planned:
        """Return the plan found with the least memory that costs no more time, with a slower link.

        What counts is the rank that needs most, then what all need.
        """
        limit_us = self.without.step_us * (1 + most_slowdown_percent / 100)
        search = _Search(self._short, self._settings, self._may)
        text = f"at most {most_slowdown_percent:g} % of the step's time"
        for share in _TRIES:
            planned = self._planned(search, search.within(share * most_slowdown_percent), text)
            if planned.step.step_us <= limit_us:
                break
        return planned

    def programs(self, rows: Sequence[RowConfig]) -> list[RankStep]:
        """Return what ranks do where layers have rows."""
        ranks = range(self._job.schedule.num_ranks)
        return [replayed(self._job, rank, rows, self._settings) for rank in ranks]

    def _planned(self, search: _Search, chosen: _Ranks, what: str) -> Planned:
        said = f"rows of a described job, chosen by simulation for {what}"
        found = search.found(chosen, said)
        rows = found.rows_of(stage.plans[stage.followed] for stage in found.stages)
        return Planned(self._job, found, rows, self.programs(rows))


class _Search:
    """Looks for what ranks do in one job."""

    def __init__(self, job: Job, settings: RankSettings, may: Collection[str]) -> None:
        self._job, self._settings = job, settings
        self._sites = [site for site in WHOLE_SITES if site in may]
        units = [unit for unit in units_of(job) if unit in may]
        sets = dict.fromkeys(((), tuple(units), *((unit,) for unit in units)))
        self._jobs = {own: with_units(job, own) for own in sets}
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
        self._plans = dict[tuple[int, _Candidate], list[Plan]]()
        self._programs = dict[tuple[object, ...], RankStep]()
        self._steps = dict[tuple[tuple[int, ...], bool], Simulation]()

    def under(self, targets: Sequence[int]) -> _Ranks:
        """Return what keeps targets; `TargetError` where nothing does."""
        found: list[_Ranks] = []
        order = list(self._ranks)
        for one in self._candidates():
            places: dict[int, int] = {}
            for rank in order if self._has_time(0.5) or not found else ():
                place = self._fitting(rank, one, targets[rank])
                if place is None:
                    order.sort(key=rank.__ne__)  # if another candidate fails, it does there
                    break
                places[rank] = place
            if len(places) == len(order):
                own = tuple(places[rank] for rank in self._ranks)
                found.append(_Ranks(one.units, self._frontiers(one), own))
                self._simulate(found[-1])
        if not found:
            self._refuse(targets)
        best = self._quickest(found)
        for rank in self._by_losses(best):
            for one in self._candidates() if self._has_time() else ():
                if one.units == best.units:
                    place = self._fitting(rank, one, targets[rank])
                    if place is not None:
                        other = best.changed(rank, self._frontier(rank, one), place)
                        best = self._quickest([best, other])
        last, is_small = None, sum(self._boundaries) < _MOST_BOUNDARIES // 100
        good_us = self._bare.step_us * (1 + _POLISHED_PERCENT / 100)
        while is_small and best != last and self._simulate(best).step_us > good_us:
            last = best
            for rank in self._by_losses(best):
                best = self._polished(best, rank, targets[rank])
        return best

    def within(self, percent: float) -> _Ranks:
        """Return what takes so much more of the step at most."""
        limit_us = self._bare.step_us * (1 + percent / 100)
        nothing = self._frontiers(_Candidate((), 1.0))
        found = [_Ranks((), nothing, (0,) * len(nothing))]
        for one in self._candidates():
            if self._has_time(0.5):
                found += self._climbed(one, limit_us)
        best = min(found, key=self._memory)
        for rank in sorted(self._ranks, key=lambda rank: -self._peaks(best)[rank]):
            low, high = best.places[rank], len(best.frontiers[rank])
            while high - low > 1 and self._has_time():
                place = (low + high) // 2
                more = best.changed(rank, best.frontiers[rank], place)
                if self._simulate(more, is_slow=True).step_us <= limit_us:
                    low, best = place, min(best, more, key=self._memory)
                else:
                    high = place
        return best

    def found(self, chosen: _Ranks, said: str) -> RunFrontier:
        """Return all plans of the frontiers on which the chosen ones are."""
        stages = []
        for rank, plans in enumerate(chosen.frontiers):
            units_us, units_bytes = self._units_cost(rank, chosen.units)
            boundaries = len(plans) * self._boundaries[rank] * len(self._ranks)
            shown = {chosen.places[rank], *range(0, len(plans), 1 + boundaries // _MOST_SHOWN)}
            found = (
                FoundPlan(
                    rows=plan.rows(),
                    freed_bytes=units_bytes + plan.freed_bytes,
                    predicted_percent=100 * (units_us + plan.us) / self._bare_us,
                    reserved_bytes=self._peak(rank, chosen.units, plan) if place in shown else None,
                )
                for place, plan in enumerate(plans)
            )
            stages.append(
                FoundStage(
                    name=str(rank),
                    bare_bytes=self._bare.ranks[rank].peak_reserved_bytes,
                    plans=tuple(found),
                    followed=chosen.places[rank],
                )
            )
        return RunFrontier(said=said, besides=unit_rows(chosen.units), stages=tuple(stages))

    # Candidates

    def _candidates(self) -> Iterator[_Candidate]:
        for share, units in product(_LINK_SHARES, self._jobs):
            yield _Candidate(units, share)

    def _fitting(self, rank: int, one: _Candidate, target: int) -> int | None:
        """Return the first plan of a rank that seems to keep a target, if one does."""
        plans = self._frontier(rank, one)
        place, low, high = 0, -1, len(plans)
        while high - low > 1:
            over_bytes = self._peak(rank, one.units, plans[place]) - target
            low, high = (place, high) if over_bytes > 0 else (low, place)
            freed_bytes = plans[place].freed_bytes + over_bytes
            guess = bisect_left(plans, freed_bytes, key=lambda plan: plan.freed_bytes)
            place = min(max(guess, low + 1), high - 1)
        return high if high < len(plans) else None

    def _climbed(self, one: _Candidate, limit_us: float) -> list[_Ranks]:
        """Return the last rung of a candidate's ladder that is within a limit, if one is."""
        plans = self._frontiers(one)
        rungs = [_Ranks(one.units, plans, places) for places in ladder(plans)]
        most_us = (limit_us / self._bare.step_us - 1) * self._bare_us
        most_us -= max(self._units_cost(rank, one.units)[0] for rank in self._ranks)
        us = sorted(plan.us for own in plans for plan in own[1:])
        place, low, high = bisect_right(us, most_us), -1, len(rungs)
        while high - low > 1 and self._has_time():
            is_good = self._simulate(rungs[place], is_slow=True).step_us <= limit_us
            low, high = (place, high) if is_good else (low, place)
            place = (low + high) // 2
        return rungs[low : low + 1] if low >= 0 else []

    def _polished(self, best: _Ranks, rank: int, target: int) -> _Ranks:
        """Let single layers of a rank do something else, or two do what the other did."""
        actions = actions_of(self._jobs[best.units], rank, self._sites)
        changes: list[dict[int, Action | int]] = [
            {number: one} for number, own in actions.items() for one in (KEEP, *own)
        ]
        changes += [{x: y, y: x} for x, y in combinations(actions, 2) if actions[x] == actions[y]]
        for change in changes:
            if not self._has_time(_POLISHING):
                break
            plans, place = best.frontiers[rank], best.places[rank]
            now = dict(plans[place].actions)
            after = now | {n: now[x] if isinstance(x, int) else x for n, x in change.items()}
            if after == now:
                continue
            plan = Plan(after, *total(after.values())[1:])
            if self._peak(rank, best.units, plan) <= target:
                polished = [*plans[:place], plan, *plans[place + 1 :]]
                best = self._quickest([best, best.changed(rank, polished, place)])
        return best

    def _refuse(self, targets: Sequence[int]) -> NoReturn:
        for rank, target in enumerate(targets):
            least = min(
                program.peak_reserved_bytes
                for (other, *_), program in self._programs.items()
                if other == rank
            )
            if least > target:
                sizes = (format_bytes(size, 2) for size in (target, least, least - target))
                raise TargetError(
                    "pipeline rank {} can't be brought under {}: with all that can move it still "
                    "takes {}, {} more; raise the target, mark more modules, or lower the "
                    "microbatch".format(rank, *sizes)
                )
        raise TargetError("no units that run again in all layers let all ranks keep their targets")

    # What was asked before is known

    def _frontier(self, rank: int, one: _Candidate) -> list[Plan]:
        if (rank, one) not in self._plans:
            job = self._jobs[one.units]
            actions = actions_of(job, rank, self._sites)
            slow_share = SLOW_LINK_SHARE * one.share
            plans = frontier(actions, link_bytes(job, rank, slow_share))
            self._plans[rank, one] = [paced(job, rank, plan, actions) for plan in plans]
        return self._plans[rank, one]

    def _frontiers(self, one: _Candidate) -> tuple[list[Plan], ...]:
        return tuple(self._frontier(rank, one) for rank in self._ranks)

    def _program(self, rank: int, units: tuple[str, ...], plan: Plan) -> RankStep:
        parts = ((number, action.parts) for number, action in plan.actions.items())
        key = rank, units, tuple(parts)
        if key not in self._programs:
            rows = (*unit_rows(units), *plan.rows())
            self._programs[key] = replayed(self._job, rank, rows, self._settings)
            self._passed += self._boundaries[rank]
        return self._programs[key]

    def _programs_of(self, ranks: _Ranks) -> list[RankStep]:
        pairs = enumerate(zip(ranks.frontiers, ranks.places, strict=True))
        return [self._program(rank, ranks.units, plans[place]) for rank, (plans, place) in pairs]

    def _peak(self, rank: int, units: tuple[str, ...], plan: Plan) -> int:
        return self._program(rank, units, plan).peak_reserved_bytes

    def _peaks(self, ranks: _Ranks) -> list[int]:
        return [program.peak_reserved_bytes for program in self._programs_of(ranks)]

    def _memory(self, ranks: _Ranks) -> tuple[int, int]:
        peaks = self._peaks(ranks)
        return max(peaks), sum(peaks)

    def _simulate(self, ranks: _Ranks, *, is_slow: bool = False) -> Simulation:
        programs = self._programs_of(ranks)
        key = tuple(map(id, programs)), is_slow
        if key not in self._steps:
            job = self._slow_job if is_slow else self._job
            self._steps[key] = simulate_ranks(job, programs)
            self._passed += sum(self._boundaries)
        return self._steps[key]

    def _quickest(self, found: Sequence[_Ranks]) -> _Ranks:
        """Return the one whose step is shortest; of those that are alike, which copies least."""
        most_us = min(self._simulate(one).step_us for one in found) * (1 + _ALIKE)

        def copied_bytes(one: _Ranks) -> int:
            return sum(rank.offloaded_bytes for rank in self._simulate(one).ranks)

        return min((x for x in found if self._simulate(x).step_us <= most_us), key=copied_bytes)

    def _by_losses(self, ranks: _Ranks) -> list[int]:
        """Return ranks in the order of what copies and recompute cost them, the most first."""
        lost = [
            one.stall_us[RELEASE] + one.stall_us[RELOAD] + one.recompute_us
            for one in self._simulate(ranks).ranks
        ]
        return sorted(self._ranks, key=lambda rank: -lost[rank])

    def _has_time(self, share: float = 1.0) -> bool:
        return self._passed < share * _MOST_BOUNDARIES

    def _units_cost(self, rank: int, units: tuple[str, ...]) -> tuple[float, int]:
        """Return what units take of a microbatch on a rank, and free where it holds most."""
        job, us, freed_bytes = self._jobs[units], 0.0, 0
        for stage, number in inflight(job, rank).items():
            pairs = zip(self._job.stages[stage].groups, job.stages[stage].groups, strict=True)
            for before, after in pairs:
                us += after.backward_us - before.backward_us
                freed_bytes += number * (before.num_bytes - after.num_bytes)
        return us, freed_bytes


def unit_rows(units: Iterable[str]) -> tuple[RowConfig, ...]:
    """Return the rows by which units run again in all layers."""
    return tuple(RowConfig(site=unit, recompute=True) for unit in units)


def replayed(
    job: Job, rank: int, rows: Sequence[RowConfig], limits: RankSettings = UNLIMITED
) -> RankStep:
    """Return what a rank's streams do where its layers have rows, within limits of a user."""
    job = with_rows(job, rows, job.schedule.stages_of(rank))
    own = (job.stages[stage] for stage in job.schedule.stages_of(rank))
    offloads = any(group.is_marked for stage in own for group in stage.groups)
    return replay(job, rank, limits if offloads else None)

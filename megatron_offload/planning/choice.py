"""What to recompute and to offload, and in how much memory, by simulating few candidates.

docs/planning.md ("How groups are chosen") says which. What a candidate takes of memory doesn't
depend on times, so it is replayed; how long its step takes is simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations_with_replacement, cycle, pairwise, product
from typing import NamedTuple, TypeAlias

from megatron_offload.core.policy_config import (
    AutoConfig,
    MemoryTargetConfig,
    PlanFileConfig,
    check_targets,
)
from megatron_offload.core.profile import (
    GroupKey,
    RecomputeUnit,
    StepProfile,
    is_default,
    merge_units,
)
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import TargetError
from megatron_offload.planning.footprint import Footprint
from megatron_offload.planning.job import LIMITS, NO_OFFLOAD, UNLIMITED, Job, RankSettings
from megatron_offload.planning.plan import (
    OffloadPlan,
    UnitChoice,
    by_stage,
    check_profiles,
    plan_of,
    rank_plan,
)
from megatron_offload.planning.policy import plan_by_rule
from megatron_offload.planning.replay import RankWork, half_the_time
from megatron_offload.planning.simulate import (
    RELEASE,
    RELOAD,
    Simulation,
    settings_of,
    simulate,
    simulate_programs,
)

SLOW_LINK_SHARE = 0.8
"""Of the bandwidth of copies, what a plan has to do with. One that was to cost four H200s 0.5 % at
most, with all of it, cost them 3.6 % (docs/planning.md)."""

_NUM_STEPS = 10
_NUM_TARGETS = 64  # parts of the range of targets in the search for the least memory
_MOST_BOUNDARIES = 600_000  # that all candidates of one target pass: some seconds of one core

Planned: TypeAlias = AutoConfig | MemoryTargetConfig | PlanFileConfig
"""Policies of which a plan can be made or predicted."""

_Settings: TypeAlias = tuple[RankSettings, ...]  # of each rank
_Kind: TypeAlias = tuple[str, int]
_Change: TypeAlias = tuple[set[GroupKey], set[_Kind], tuple[float, float]]
"""Groups and kinds that a rank treats otherwise, and how much of each of its limits it has."""


class _Candidate(NamedTuple):
    """How a rank's settings are found for a target: of the candidates one is chosen."""

    step: int = 0  # of the budget that copies have; smaller where the target asks for that
    depth: int = 0  # how many kinds are recomputed; fewer where those alone keep the target
    order: int = 0
    split: float = 0.5  # what of the budget is for groups that are reloaded

    def variants(self, most_depth: int) -> list[list[_Candidate]]:
        """Return what is tried around it: budget steps, depths, orders, and splits."""
        shifts = dict.fromkeys((1, -1, (most_depth + 1) // 4, -(most_depth + 1) // 4))
        steps = (self.step + shift for shift in (-1, 1, 2))
        depths = (self.depth + shift for shift in shifts)
        return [
            [self._replace(step=step) for step in steps if 0 <= step < _NUM_STEPS],
            [self._replace(depth=depth) for depth in depths if 0 <= depth <= most_depth],
            [self._replace(order=order) for order in (0, 1)],
            [self._replace(split=split) for split in (0.25, 0.375, 0.5, 0.625, 0.75)],
        ]


_Candidates: TypeAlias = tuple[_Candidate, ...]  # one of each rank


class _Found(NamedTuple):
    us: float
    candidates: _Candidates
    settings: _Settings


class Chooser:
    """Finds what to recompute and to offload, and in how much memory, by few simulations.

    Args:
        profiles: of each pipeline rank, in any order.
        job: their step.
        limits: what a user has set; the budget that it leaves open is chosen. Nothing is made
            again but what its ``recompute`` has.
        link_share: of the bandwidth of copies, what a plan has to do with: 1 where it is measured.

    Attributes:
        without: the step without offload.
        lowest_bytes: the lowest target that all ranks can keep.
        highest_bytes: the target that every rank keeps without moving anything.
    """

    def __init__(
        self,
        profiles: Collection[StepProfile],
        job: Job,
        limits: RankSettings = UNLIMITED,
        *,
        link_share: float = SLOW_LINK_SHARE,
    ) -> None:
        self._profiles = check_profiles(profiles)
        num_ranks = job.schedule.num_ranks
        self._limits = limits
        given = {name: getattr(limits, name) for name in LIMITS}
        self._user_limits = {name: size for name, size in given.items() if size is not None}
        # Messages between ranks keep what they have.
        rates = ((name, rate) for name, rate in job.machine if "gbps" in name and "p2p" not in name)
        slow = {name: rate and rate * link_share for name, rate in rates}
        self._machines = job.machine, job.machine.model_copy(update=slow)
        kinds = _kinds_of(job)
        if limits.recompute is not None:
            may = dict(enumerate(limits.recompute))
            kinds = [(unit, stage) for unit, stage in kinds if unit in may.get(stage, ())]
        self._kinds = kinds
        self._depths = [by_stage(kinds[:number]) for number in range(len(kinds) + 1)]
        boundaries = sum(
            2 * len(job.stages[one.stage].groups) for passes in job.schedule.ranks for one in passes
        )
        self._most_candidates = max(12, _MOST_BOUNDARIES // max(1, boundaries))
        # None of these holds this: no circle of so many programs.
        self._bare_step = bare_step = cache(
            lambda made: simulate(job, replace(NO_OFFLOAD, recompute=made), record=True)
        )
        self._work = work = cache(partial(RankWork, job))
        self._rank = cache(
            lambda rank, made: Footprint(work(rank, made).profile, bare_step(made).ranks[rank])
        )
        self._program = program = cache(lambda rank, one: work(rank, one.recompute).replay(one))
        self._step = cache(
            lambda machine, settings: simulate_programs(
                replace(job, machine=machine), [program(*one) for one in enumerate(settings)]
            )
        )
        self.without = self._simulate((NO_OFFLOAD,) * num_ranks)
        ends = _Candidate(depth=0), _Candidate(depth=len(kinds))
        self._least_bytes = [
            min(self._peak(rank, self._settings(rank, each)) for each in ends)
            for rank in range(num_ranks)
        ]
        self.lowest_bytes = max(self._least_bytes)
        self.highest_bytes = max(rank.peak_reserved_bytes for rank in self.without.ranks)

    def under(self, targets: Sequence[int]) -> OffloadPlan:
        """Return the quickest plan found that keeps each rank within its target.

        Raises:
            ConfigError: the targets are not as many as the ranks.
            TargetError: one can't be kept.
        """
        check_targets(targets, len(self._profiles))
        for index, (target, least) in enumerate(zip(targets, self._least_bytes, strict=True)):
            if self._peak(index, NO_OFFLOAD) > target and least > target:
                sizes = (format_bytes(size, 2) for size in (target, least, least - target))
                raise TargetError(
                    "pipeline rank {} can't be brought under {}: with all that can move it still "
                    "takes {}, {} more; raise the target, mark more modules, or lower the "
                    "microbatch".format(index, *sizes)
                )
        wanted = [f"the target of {format_bytes(target)}" for target in targets]
        return self._plan("memory_target", self._quickest(targets), wanted)

    def within(self, most_slowdown_percent: float) -> OffloadPlan:
        """Return the plan with the least peak of the fullest rank that costs no more time.

        It does so with a slower link, too.
        """
        limit_us = self.without.step_us * (1 + most_slowdown_percent / 100)
        lowest, highest = self.lowest_bytes, self.highest_bytes
        too_low, kept = -1, _NUM_TARGETS
        num_ranks = len(self._profiles)
        target, best = highest, (NO_OFFLOAD,) * num_ranks
        starts: list[_Candidates] = []
        with half_the_time():
            while kept - too_low > 1 and lowest < highest:
                middle = (too_low + kept) // 2
                tried = lowest + (highest - lowest) * middle // _NUM_TARGETS
                found = self._search((tried,) * num_ranks, starts, limit_us)[0]
                may_look_again = starts and self._most_candidates >= 100  # else it takes too long
                if may_look_again and found.us > limit_us:  # what is near the last best is not all
                    found = self._search((tried,) * num_ranks, (), limit_us)[0]
                starts = [found.candidates, *starts[:1]]
                if found.us <= limit_us:
                    kept, target, best = middle, tried, found.settings
                else:
                    too_low = middle
        least = f"{format_bytes(target)}, the least found for at most {most_slowdown_percent:.3g} %"
        return self._plan("auto", best, [f"{least} of the step's time"] * num_ranks)

    def plan(self, config: Planned) -> OffloadPlan:
        """Return the plan that a section of a configuration asks for, with what it would bring."""
        if isinstance(config, AutoConfig):
            return self.within(config.most_slowdown_percent)
        if isinstance(config, MemoryTargetConfig):
            return self.under(config.targets(len(self._profiles)))
        return self._predicted(plan_by_rule(config, self._profiles))

    def slowdown_percent(self, plan: OffloadPlan) -> float:
        """Return what a plan costs by the count of `within`."""
        us = max(self.simulate(plan, is_slow=slow).step_us for slow in (False, True))
        return 100 * (us / max(self.without.step_us, 1e-3) - 1)

    def simulate(self, plan: OffloadPlan, *, is_slow: bool = False) -> Simulation:
        """Return the step with a plan, with the slower link if that is asked for."""
        return self._simulate(tuple(settings_of(plan, self._limits)), is_slow=is_slow)

    # The search

    def _quickest(self, targets: Sequence[int]) -> _Settings:
        """Return the best candidate that keeps targets which can be kept."""
        found = self._search(targets)
        if all(len(profile.groups) <= 12 for profile in self._profiles):  # each weighs much
            plain = [one for one in found if not any(each.depth for each in one.candidates)]
            with half_the_time():  # with more to choose from the outcome is never worse
                for starts, kinds in ((plain, []), (found, self._kinds)):
                    for one in self._starts(targets, starts):
                        found.append(self._climbed(targets, one, kinds))
        # Steps that differ by less are alike: then those with a slower link decide, then bytes.
        most_us = min(one.us for one in found) * (1 + 5e-4)
        alike = [one.settings for one in found if one.us <= most_us]

        def loss(settings: _Settings) -> tuple[float, int]:
            moved = (rank.offloaded_bytes for rank in self._simulate(settings).ranks)
            return max(self._simulate(settings, is_slow=True).step_us, most_us), sum(moved)

        return min(alike, key=loss)

    def _search(
        self,
        targets: Sequence[int],
        starts: Collection[_Candidates] = (),
        limit_us: float | None = None,
    ) -> list[_Found]:
        """Return candidates that keep targets which can be kept, the quickest first.

        With a limit the time is the longer of those with either link, and the first within it ends
        the search.
        """
        found: dict[_Settings, _Found] = {}
        num_ranks, top = len(targets), len(self._depths) - 1

        def look(many: Iterable[_Candidates]) -> bool:
            """Simulate candidates; return whether it is enough."""
            for candidates in many:
                # No step with so much recomputed is quicker than the one that moves nothing.
                bare = (self._bare_step(self._depths[each.depth]).step_us for each in candidates)
                is_hopeless = limit_us is not None and max(bare) > limit_us
                if len(found) >= self._most_candidates or (is_hopeless and found):
                    continue
                settings = tuple(map(self._choose, range(num_ranks), targets, candidates))
                if settings in found:
                    continue
                us = self._simulate(settings, is_slow=limit_us is not None).step_us
                if limit_us is not None and us <= limit_us:
                    us = max(us, self._simulate(settings).step_us)
                found[settings] = _Found(us, candidates, settings)
                if limit_us is not None and us <= limit_us:
                    return True
            return False

        def best(depth: int = top) -> _Found:
            low = (x for x in found.values() if max(each.depth for each in x.candidates) <= depth)
            return min(low, key=lambda one: one.us)

        def climb(depth: int) -> bool:
            """Look around the best with so many kinds recomputed; return whether it is enough."""
            if best(depth).us > 1.1 * best().us:  # hopeless
                return False
            for index in range(4):  # of all ranks alike
                variants = best(depth).candidates[0].variants(depth)[index]
                if look((each,) * num_ranks for each in variants):
                    return True
            start = best(depth)
            ranks = self._simulate(start.settings).ranks
            lost = [rank.stall_us[RELEASE] + rank.stall_us[RELOAD] for rank in ranks]
            return look(
                (*start.candidates[:rank], each, *start.candidates[rank + 1 :])
                for rank in sorted(range(num_ranks), key=lambda rank: -lost[rank])[:2]
                for variants in start.candidates[rank].variants(depth)
                for each in variants
            )

        num_default = sum(is_default(unit) for unit, _ in self._kinds)
        depths = sorted({0, num_default // 2, num_default, (num_default + top) // 2, top})
        grid = product(depths, range(2, _NUM_STEPS, 3))
        first = list(starts) or [(_Candidate(step, depth),) * num_ranks for depth, step in grid]
        climbs = [top] if starts else sorted({0, num_default, top}) * 2
        if not look(first[:1]):
            with half_the_time():
                _ = look(first[1:]) or any(climb(depth) for depth in climbs)
        return sorted(found.values(), key=lambda one: one.us)

    # Small jobs

    def _starts(self, targets: Sequence[int], found: Sequence[_Found]) -> Iterator[_Found]:
        """Yield what is changed at last: the best of these, and what moves all in several rooms."""
        best = sorted(found, key=lambda one: one.us)[:3]
        yield from best
        for step in range(0, _NUM_STEPS, 3):
            candidates = tuple(each._replace(step=step) for each in best[0].candidates)
            settings = tuple(map(self._settings, range(len(candidates)), candidates))
            if self._keeps(targets, settings):
                yield _Found(self._simulate(settings).step_us, candidates, settings)

    def _keeps(self, targets: Sequence[int], settings: _Settings) -> bool:
        return all(self._peak(rank, one) <= targets[rank] for rank, one in enumerate(settings))

    def _climbed(self, targets: Sequence[int], best: _Found, kinds: Iterable[_Kind]) -> _Found:
        """Go on to a step that no single change of one rank makes quicker."""
        ranks = range(len(targets))
        changes = [(rank, one) for rank in ranks for one in self._changes(rank, kinds)]
        num_in_vain = 0
        for rank, change in cycle(changes):
            if num_in_vain == len(changes):
                break
            num_in_vain += 1
            one = self._changed(rank, best.settings[rank], change)
            settings = (*best.settings[:rank], one, *best.settings[rank + 1 :])
            if self._keeps(targets, settings):
                us = self._simulate(settings).step_us
                if us < best.us:
                    best, num_in_vain = best._replace(us=us, settings=settings), 0
        return best

    def _changes(self, rank: int, kinds: Iterable[_Kind]) -> Iterator[_Change]:
        keys = [group.key for group in self._rank(rank, ()).groups]
        places = pairwise(sorted({key.order for key in keys}))
        for shares in ((0.8, 0.8), (1.25, 1.25), (0.9, 1.1), (1.1, 0.9)):
            yield set(), set(), shares
        for kind, share in product(kinds, (1.0, 0.65)):
            yield set(), {kind}, (share, share)
        for pair in combinations_with_replacement(keys, 2):
            yield set(pair), set(), (1.0, 1.0)
        for two, shares in product(places, ((1.0, 1.0), (1.5, 0.5))):
            yield {key for key in keys if key.order in two}, set(), shares

    def _changed(self, rank: int, settings: RankSettings, change: _Change) -> RankSettings:
        keys, kinds, shares = change
        made = {(unit, stage) for stage, x in enumerate(settings.recompute or ()) for unit in x}
        settings = replace(settings, recompute=by_stage(made ^ kinds))
        if not settings.offloads:
            if not keys:
                return settings
            live = self._rank(rank, settings.recompute or ())
            middle = self._settings(rank, _Candidate(step=_NUM_STEPS // 2))
            settings = replace(middle, kept=live.keys, recompute=settings.recompute)
        sizes = (getattr(settings, name) or 0 for name in LIMITS)
        limits = {x: int(s * y) for x, s, y in zip(LIMITS, shares, sizes, strict=True)}
        return replace(settings, kept=settings.kept ^ keys, **limits | self._user_limits)

    # Candidates

    def _choose(self, rank: int, target: int, one: _Candidate) -> RankSettings:
        """Return what a rank does to keep a target, with the largest budget that this leaves it."""
        if self._peak(rank, self._nothing(one.depth)) <= target:
            still = map(self._nothing, range(one.depth + 1))
            return next(settings for settings in still if self._peak(rank, settings) <= target)
        steps = [one._replace(step=step) for step in range(one.step, -1, -1)]
        least = _Candidate(0, one.depth, one.order), _Candidate(0, len(self._depths) - 1)
        for each in (*steps, *least, _Candidate()):
            everything = self._settings(rank, each)
            if self._peak(rank, everything) <= target:
                break
        live = self._rank(rank, self._depths[each.depth])
        budget_bytes = (everything.max_inflight_bytes or 0) + (everything.prefetch_bytes or 0)
        aim_bytes = target - self._peak(rank, self._nothing(each.depth)) + int(live.rows.max())
        found, least_bytes = everything, min(group.num_bytes for group in live.groups)
        for _ in range(4):  # replaying may show more than rows do: then for a lower target
            settings = self._settings(rank, each, live.cover(each.order, aim_bytes, budget_bytes))
            excess_bytes = self._peak(rank, settings) - target
            if excess_bytes <= 0:
                found = settings
            elif found is not everything:
                break
            if -least_bytes < excess_bytes <= 0:  # no group could be kept besides
                break
            aim_bytes -= excess_bytes
        return found

    def _nothing(self, depth: int) -> RankSettings:
        return replace(NO_OFFLOAD, recompute=self._depths[depth])

    def _settings(
        self, rank: int, one: _Candidate, moved: Collection[GroupKey] | None = None
    ) -> RankSettings:
        recompute = self._depths[one.depth]
        live = self._rank(rank, recompute)
        moved = live.keys if moved is None else moved
        if not moved:
            return self._nothing(one.depth)
        # One group may always be under way.
        least = max(1, *(group.num_bytes // 2 for group in live.groups))
        growth = max(1.0, live.saved_bytes / least)
        budget_bytes = round(least * growth ** (one.step / (_NUM_STEPS - 1)))
        prefetch_bytes = int(budget_bytes * one.split)
        limits = dict(zip(LIMITS, (budget_bytes - prefetch_bytes, prefetch_bytes), strict=True))
        limits |= self._user_limits
        return RankSettings(kept=live.keys.difference(moved), recompute=recompute, **limits)

    def _peak(self, rank: int, settings: RankSettings) -> int:
        return self._program(rank, settings).peak_reserved_bytes

    def _simulate(self, settings: _Settings, *, is_slow: bool = False) -> Simulation:
        return self._step(self._machines[is_slow], settings)

    def _plan(self, kind: str, chosen: _Settings, wanted: Sequence[str]) -> OffloadPlan:
        """Return the plan of what ranks do, for what is wanted of each, in words."""
        plans = []
        for index, (settings, what) in enumerate(zip(chosen, wanted, strict=True)):
            recompute, vp_stages = settings.recompute or (), self._work(index, ()).vp_stages
            recomputed = dict(enumerate(recompute))
            groups = (
                group.with_recompute(recomputed.get(vp_stages[group.key.chunk], ()))
                for group in self._profiles[index].groups
            )
            profile = replace(self._profiles[index], groups=tuple(groups))
            live = self._rank(index, recompute).keys
            moved = live.difference(settings.kept) if settings.offloads else frozenset()
            kept = {
                group.key: f"not needed for {what}" if group.key in live else "has no backward"
                for group in profile.groups
                if group.num_bytes and group.key not in moved
            }
            limits = {name: getattr(settings, name) if moved else None for name in LIMITS}
            by_vp_stage = defaultdict[int, list[RecomputeUnit]](list)
            for group in profile.groups:
                by_vp_stage[vp_stages[group.key.chunk]] += group.recomputed
            units = tuple(
                UnitChoice(stage, name, num_bytes, us, is_recomputed)
                for stage, found in sorted(by_vp_stage.items())
                for name, num_bytes, us, _, is_recomputed in sorted(merge_units(found))
            )
            plans.append(rank_plan(profile, kept, f"moves for {what}", units=units, **limits))
        return self._predicted(plan_of(kind, self._profiles, plans))

    def _predicted(self, plan: OffloadPlan) -> OffloadPlan:
        step = self.simulate(plan)
        us, peaks = step.step_us, [rank.peak_reserved_bytes for rank in step.ranks]
        ranks = (
            replace(rank, predicted_peak_bytes=peak_bytes, predicted_step_us=us)
            for rank, peak_bytes in zip(plan.ranks, peaks, strict=True)
        )
        return replace(plan, ranks=tuple(ranks))


def _kinds_of(job: Job) -> list[tuple[str, int]]:
    """Return the kinds of bytes that can be recomputed, those first that free most for their time.

    A kind is a unit of a virtual stage, the same on all ranks.
    """
    found: set[tuple[str, int]] = set()
    num_bytes, us = defaultdict[str, int](int), defaultdict[str, float](float)
    for rank in range(job.schedule.num_ranks):
        for place, stage in enumerate(job.schedule.stages_of(rank)):
            for unit in (u for g in job.stages[stage].groups if g.is_marked for u in g.units):
                found.add((unit.unit, place))
                num_bytes[unit.unit] += unit.num_bytes
                us[unit.unit] += unit.us
    costs = {unit: us[unit] / max(1, size) for unit, size in num_bytes.items()}
    return sorted(found, key=lambda kind: (costs[kind[0]], *kind))

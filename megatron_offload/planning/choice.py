"""What is made again, which groups move, and in how much room, by simulating few candidates.

A candidate says how many kinds of saved bytes are made again, those first that free most for their
time; an order in which the groups of each rank go to the host until its target is kept; how much
device memory their copies have, and how that is split between the two directions. What a candidate
takes of memory doesn't depend on times, so it is replayed; how long its step takes is simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_offload.core.machine import Machine, MachineConfig
from megatron_offload.core.policy_config import (
    AutoConfig,
    MemoryTargetConfig,
    ModulesConfig,
    PolicyConfig,
)
from megatron_offload.core.profile import GroupKey, StepProfile, is_cheap
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.planning.footprint import Footprint, LiveGroup
from megatron_offload.planning.job import NO_OFFLOAD, Job, RankSettings
from megatron_offload.planning.plan import (
    OffloadPlan,
    UnitChoice,
    check_profiles,
    plan_of,
    rank_plan,
)
from megatron_offload.planning.policy import plan_by_rule
from megatron_offload.planning.replay import RankProgram, RankWork, replay
from megatron_offload.planning.simulate import (
    RankResult,
    Simulation,
    reserved_bytes,
    settings_of,
    simulate,
    simulate_programs,
)
from megatron_offload.planning.streams import RELEASE, RELOAD

_NUM_ROOMS = 10
_NUM_ORDERS = 5

_NUM_TARGETS = 64
"""The range of targets is cut into so many by the search for the least memory."""

_SAME_SHARE = 5e-4
"""Steps that differ by less are alike: then those with a slower link decide, then bytes."""

SLOW_LINK_SHARE = 0.8
"""Of the bandwidth of copies, what a plan has to do with. One that was to cost four H200s 0.5 % at
most, with all of it, cost them 3.6 % (docs/planning.md)."""

_MOST_TRIES = 4
"""So often a choice is made for a lower target, where replaying it shows more than its rows do."""

_MOST_BOUNDARIES = 800_000
"""Of groups, that all candidates of one target pass together: some ten seconds of one core."""

_FEW = 500
"""Where more candidates than these may be tried, the search begins with all rooms."""

_HOPELESS = 1.1
"""A candidate that takes so much longer than the best is not looked around."""

_NOTHING_WANTED = -(2**62)
_NO_LIMITS = RankSettings()

_Settings: TypeAlias = tuple[RankSettings, ...]


class _Way(NamedTuple):
    """How a rank's settings are found for a target."""

    room: float = 0
    """Which of its rooms copies have; where that is too large for the target, the next smaller."""
    level: int = 0
    """How many kinds of bytes are made again; where fewer keep the target alone, so many."""
    order: int = 0
    split: float = 0.5
    """What of the room is for groups that come back."""


_Ways: TypeAlias = tuple[_Way, ...]
"""A candidate: one of each rank."""


class _Found(NamedTuple):
    """How long the step of a candidate takes, and what each rank does."""

    us: float
    ways: _Ways
    settings: _Settings


class Chooser:
    """Finds what is made again, what moves, and in how much room, by simulating few candidates.

    Args:
        profiles: of each pipeline rank, in any order.
        job: their step.
        limits: what a user has set; the room that it leaves open is chosen. Nothing is made
            again but what its ``recompute`` has.

    Attributes:
        without: the step without offload.
        lowest_bytes: the lowest target that all ranks can keep.
        highest_bytes: the target that every rank keeps without moving anything.
    """

    def __init__(
        self, profiles: Collection[StepProfile], job: Job, limits: RankSettings = _NO_LIMITS
    ) -> None:
        self._profiles = check_profiles(profiles)
        num_ranks = job.schedule.num_ranks
        if len(self._profiles) != num_ranks:
            raise ConfigError(
                f"profiles are of {len(self._profiles)} pipeline ranks, the job has {num_ranks}"
            )
        self._job = job
        self._limits = limits
        self._slow_job = replace(job, machine=_with_slow_link(job.machine))
        kinds = _kinds_of(job)
        if limits.recompute is not None:
            may = dict(enumerate(limits.recompute))
            kinds = [(unit, stage) for unit, stage in kinds if unit in may.get(stage, ())]
        self._num_cheap = sum(is_cheap(unit) for unit, _ in kinds)
        self._levels = [_recompute(kinds[:number]) for number in range(len(kinds) + 1)]
        boundaries = sum(
            2 * len(job.stages[one.stage].groups) for passes in job.schedule.ranks for one in passes
        )
        self._most_candidates = max(12, _MOST_BOUNDARIES // max(1, boundaries))
        self._bare_steps: dict[int, Simulation] = {}
        self._rank_ways: dict[tuple[int, int], _Rank] = {}
        self._programs: dict[tuple[int, RankSettings], RankProgram] = {}
        self._steps: dict[tuple[bool, _Settings], Simulation] = {}
        self.without = self._bare_step(0)
        self._least_bytes = [
            min(
                self._peak(rank, self._everything(rank, _Way(level=level)))
                for level in {0, len(kinds)}
            )
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
        if len(targets) != len(self._profiles):
            raise ConfigError(
                f"{len(targets)} memory targets are given for {len(self._profiles)} pipeline "
                "ranks; give one for all, or one for each"
            )
        for index, (target, least) in enumerate(zip(targets, self._least_bytes, strict=True)):
            if self._peak(index, NO_OFFLOAD) > target and least > target:
                sizes = (format_bytes(size, 2) for size in (target, least, least - target))
                raise TargetError(
                    "pipeline rank {} can't be brought under {}: with all that can move it still "
                    "takes {}, {} more; raise the target, mark more modules, or lower the "
                    "microbatch".format(index, *sizes)
                )
        reasons = [f"the target of {format_bytes(target)} is kept without it" for target in targets]
        return self._plan("memory_target", self._quickest(targets), reasons)

    def within(self, most_slowdown_percent: float) -> OffloadPlan:
        """Return the plan with the least peak of the fullest rank that costs no more time.

        It does so with a slower link, too.

        Raises:
            ConfigError: a profile is of a step that moved something.
        """
        moved_bytes = sum(
            profile.offloaded_bytes for profile in self._profiles if profile.waited_us is None
        )
        if moved_bytes:
            raise ConfigError(
                f"the profiled step moved {moved_bytes} bytes, and its times hold what it waited "
                "for them; profile another"
            )
        limit_us = self.without.step_us * (1 + most_slowdown_percent / 100)
        lowest, highest = self.lowest_bytes, self.highest_bytes
        too_low, kept = -1, _NUM_TARGETS
        num_ranks = len(self._profiles)
        target, best = highest, (NO_OFFLOAD,) * num_ranks
        starts: list[_Ways] = []
        while kept - too_low > 1 and lowest < highest:
            middle = (too_low + kept) // 2
            tried = lowest + (highest - lowest) * middle // _NUM_TARGETS
            found = self._search((tried,) * num_ranks, starts, limit_us)[0]
            if starts and found.us > limit_us:  # what is near the last best is not all there is
                found = self._search((tried,) * num_ranks, (), limit_us)[0]
            starts = [found.ways, *starts[:1]]
            if found.us <= limit_us:
                kept, target, best = middle, tried, found.settings
            else:
                too_low = middle
        reason = (
            f"{format_bytes(target)}, the least found for at most {most_slowdown_percent:g} % of "
            "the step's time, are kept without it"
        )
        return self._plan("auto", best, [reason] * num_ranks)

    def plan(self, config: PolicyConfig) -> OffloadPlan:
        """Return the plan that a section of a configuration asks for, with what it would bring."""
        if isinstance(config, AutoConfig):
            return self.within(config.most_slowdown_percent)
        if isinstance(config, MemoryTargetConfig):
            return self.under(config.targets(len(self._profiles)))
        recompute = self._limits.recompute
        profiles = [self._remaking(rank, recompute) for rank in range(len(self._profiles))]
        return self._predicted(plan_by_rule(config, profiles))

    def everything(self) -> OffloadPlan:
        """Return the plan of what the profiled steps did: all moves, or is made again."""
        return self._predicted(plan_by_rule(ModulesConfig(), self._profiles))

    def slowdown_percent(self, plan: OffloadPlan) -> float:
        """Return what a plan costs by the count of `within`."""
        settings = tuple(settings_of(plan, self._limits))
        us = max(self._simulate(settings, is_slow=slow).step_us for slow in (False, True))
        return 100 * (us / self.without.step_us - 1)

    def simulate(self, plan: OffloadPlan) -> Simulation:
        """Return the step with a plan."""
        return self._simulate(tuple(settings_of(plan, self._limits)))

    # The search

    def _quickest(self, targets: Sequence[int]) -> _Settings:
        """Return the best candidate that keeps targets which can be kept."""
        found = self._search(targets)
        most_us = found[0].us * (1 + _SAME_SHARE)
        alike = [one.settings for one in found if one.us <= most_us]

        def loss(settings: _Settings) -> tuple[float, int]:
            moved = (rank.offloaded_bytes for rank in self._simulate(settings).ranks)
            return max(self._simulate(settings, is_slow=True).step_us, most_us), sum(moved)

        return min(alike, key=loss)

    def _search(
        self, targets: Sequence[int], starts: Collection[_Ways] = (), limit_us: float | None = None
    ) -> list[_Found]:
        """Return candidates that keep targets which can be kept, the quickest first.

        With a limit the time is the longer of those with either link, and the first within it ends
        the search.
        """
        found: dict[_Settings, _Found] = {}
        num_ranks, top = len(targets), len(self._levels) - 1

        def look(many: Collection[_Ways]) -> bool:
            """Simulate candidates; return whether it is enough."""
            for ways in many:
                floor_us = max(self._bare_step(way.level).step_us for way in ways)
                is_hopeless = limit_us is not None and floor_us > limit_us
                if len(found) >= self._most_candidates or (is_hopeless and found):
                    continue
                settings = tuple(
                    self._choose(rank, target, way)
                    for rank, (target, way) in enumerate(zip(targets, ways, strict=True))
                )
                if settings in found:
                    continue
                us = self._simulate(settings, is_slow=limit_us is not None).step_us
                if limit_us is not None and us <= limit_us:
                    us = max(us, self._simulate(settings).step_us)
                found[settings] = _Found(us, ways, settings)
                if limit_us is not None and us <= limit_us:
                    return True
            return False

        def best(level: int = top) -> _Found:
            return min(
                (one for one in found.values() if max(way.level for way in one.ways) <= level),
                key=lambda one: one.us,
            )

        def climb(level: int) -> bool:
            """Look around the best with so many kinds made again; return whether it is enough."""
            if best(level).us > _HOPELESS * best().us:
                return False
            return any(look(vary(best(level))) for vary in self._variations(level))

        cheap = self._num_cheap
        levels = sorted({0, cheap // 2, cheap, (cheap + top) // 2, top})
        rooms = range(_NUM_ROOMS) if self._most_candidates > _FEW else range(2, _NUM_ROOMS, 3)
        first = [(_Way(room, level),) * num_ranks for level in levels for room in rooms]
        climbs = [top] if starts else sorted({0, cheap, top}) * 2
        _ = look(starts or first) or any(climb(level) for level in climbs)
        return sorted(found.values(), key=lambda one: one.us)

    def _variations(self, most: int) -> list[Callable[[_Found], list[_Ways]]]:
        """Return what is tried around the best so far, with so many kinds made again at most."""

        def near(level: int) -> list[int]:
            steps = (1, -1, (most + 1) // 4, -(most + 1) // 4)
            return [level + step for step in steps if step and 0 <= level + step <= most]

        def of_ranks(found: _Found) -> list[_Ways]:
            """Change what the two ranks do that lose most to their copies."""
            ways, ranks = found.ways, self._simulate(found.settings).ranks
            lost = [rank.stall_us[RELEASE] + rank.stall_us[RELOAD] for rank in ranks]
            changed = []
            for rank in sorted(range(len(ways)), key=lambda rank: -lost[rank])[:2]:
                one = ways[rank]
                others = [one._replace(order=order) for order in range(_NUM_ORDERS)]
                others += [one._replace(level=level) for level in near(one.level)]
                others += [one._replace(room=one.room + step) for step in (-1, -0.5, 0.5, 1)]
                others += [one._replace(split=one.split + step) for step in (-0.125, 0.125)]
                changed += [(*ways[:rank], other, *ways[rank + 1 :]) for other in others]
            return [ways for ways in changed if all(map(_is_possible, ways))]

        def of_all(change: Callable[[_Way], list[_Way]]) -> Callable[[_Found], list[_Ways]]:
            return lambda found: [(way,) * len(found.ways) for way in change(found.ways[0])]

        return [
            of_all(
                lambda way: [
                    near_by
                    for step in (-1, 1, 2)
                    if _is_possible(near_by := way._replace(room=way.room + step))
                ]
            ),
            of_all(lambda way: [way._replace(level=level) for level in near(way.level)]),
            of_all(lambda way: [way._replace(order=order) for order in range(_NUM_ORDERS)]),
            of_all(lambda way: [way._replace(split=split) for split in (0.25, 0.5, 0.75)]),
            of_ranks,
        ]

    def _choose(self, rank: int, target: int, one: _Way) -> RankSettings:
        """Return what a rank does to keep a target, with the largest room that this leaves it."""
        if self._peak(rank, self._nothing(one.level)) <= target:
            return next(
                settings
                for settings in map(self._nothing, range(one.level + 1))
                if self._peak(rank, settings) <= target
            )
        rooms = [one._replace(room=one.room - step) for step in range(int(one.room) + 1)]
        top = len(self._levels) - 1
        for way in (*rooms, _Way(0, one.level, one.order), _Way(0, top), _Way()):
            everything = self._everything(rank, way)
            if self._peak(rank, everything) <= target:
                break
        live = self._rank(rank, way.level)
        room_bytes = (everything.max_inflight_bytes or 0) + (everything.prefetch_bytes or 0)
        aim_bytes = target - self._peak(rank, self._nothing(way.level)) + int(live.rows.max())
        found, least_bytes = everything, min(group.num_bytes for group in live.groups)
        for _ in range(_MOST_TRIES):
            settings = self._settings(rank, way, live.cover(way.order, aim_bytes, room_bytes))
            excess_bytes = self._peak(rank, settings) - target
            if excess_bytes <= 0:
                found = settings
            elif found is not everything:
                break
            if -least_bytes < excess_bytes <= 0:  # no group could stay besides
                break
            aim_bytes -= excess_bytes
        return found

    def _nothing(self, level: int) -> RankSettings:
        """Return the settings of a rank that moves nothing."""
        return replace(NO_OFFLOAD, recompute=self._levels[level])

    def _everything(self, rank: int, way: _Way) -> RankSettings:
        """Return the settings of a rank that moves all it can."""
        return self._settings(rank, way, self._rank(rank, way.level).keys)

    def _settings(self, rank: int, one: _Way, moved: Collection[GroupKey]) -> RankSettings:
        """Return the settings of a rank that moves these groups; the user's limits go over all."""
        live = self._rank(rank, one.level)
        if not moved:
            return self._nothing(one.level)
        least = max(1, live.largest_bytes // 2)  # one group may always be under way
        room_bytes = round(
            least * max(1.0, live.saved_bytes / least) ** (one.room / (_NUM_ROOMS - 1))
        )
        prefetch_bytes = int(room_bytes * one.split)
        chosen = {
            "max_inflight_bytes": room_bytes - prefetch_bytes,
            "prefetch_bytes": prefetch_bytes,
        }
        free = {name: size for name, size in chosen.items() if getattr(self._limits, name) is None}
        kept = frozenset(live.keys.difference(moved))
        return replace(self._limits, kept=kept, recompute=self._levels[one.level], **free)

    def _rank(self, index: int, level: int) -> _Rank:
        key = index, level
        if key not in self._rank_ways:
            work = RankWork(self._job, index, self._levels[level])
            self._rank_ways[key] = _Rank(work, self._bare_step(level).ranks[index])
        return self._rank_ways[key]

    def _bare_step(self, level: int) -> Simulation:
        """Return the step that moves nothing: no other with so much made again is quicker."""
        if level not in self._bare_steps:
            self._bare_steps[level] = simulate(self._job, self._nothing(level), record=True)
        return self._bare_steps[level]

    def _program(self, rank: int, settings: RankSettings) -> RankProgram:
        key = rank, settings
        if key not in self._programs:
            if settings.recompute in self._levels:
                live = self._rank(rank, self._levels.index(settings.recompute or ()))
                self._programs[key] = live.work.replay(settings)
            else:
                self._programs[key] = replay(self._job, rank, settings)
        return self._programs[key]

    def _peak(self, rank: int, settings: RankSettings) -> int:
        return reserved_bytes(self._job, self._program(rank, settings))

    def _simulate(self, settings: _Settings, *, is_slow: bool = False) -> Simulation:
        key = is_slow, settings
        if key not in self._steps:
            job = self._slow_job if is_slow else self._job
            programs = [self._program(rank, one) for rank, one in enumerate(settings)]
            self._steps[key] = simulate_programs(job, programs)
        return self._steps[key]

    def _plan(self, kind: str, chosen: _Settings, reasons: Sequence[str]) -> OffloadPlan:
        """Return the plan of what ranks do; each rank's reason is that of what need not move."""
        machine = self._job.machine
        num_gpus = min(machine.gpus_per_node, len(chosen) * self._job.gpus_per_rank)
        gbps = min(
            *(machine.both_gbps, machine.d2h_gbps, machine.h2d_gbps),
            machine.node_gbps / 2 / num_gpus,
        )
        plans = []
        for index, (settings, reason) in enumerate(zip(chosen, reasons, strict=True)):
            level = self._levels.index(settings.recompute or ())
            profile = self._remaking(index, settings.recompute)
            kept = {group.key: "has no backward" for group in profile.groups if group.num_bytes}
            moved: dict[GroupKey, str] = {}
            for group in self._rank(index, level).groups:
                copies_us = 2 * group.num_bytes / gbps / 1e3
                times = (
                    f"{group.life_us / 1e3:.1f} ms, and its copies take {copies_us / 1e3:.1f} ms"
                )
                if settings.offloads and group.key not in settings.kept:
                    moved[group.key] = f"not needed for {times}"
                elif copies_us > group.life_us:
                    kept[group.key] = f"needed again after {times}"
                else:
                    kept[group.key] = reason
            kept = {key: why for key, why in kept.items() if key not in moved}
            plans.append(
                rank_plan(
                    profile,
                    kept,
                    moved,
                    max_inflight_bytes=settings.max_inflight_bytes if moved else None,
                    prefetch_bytes=settings.prefetch_bytes if moved else None,
                    units=tuple(_unit_choices(profile, self._stages(index), gbps)),
                )
            )
        return self._predicted(plan_of(kind, self._profiles, plans))

    def _stages(self, rank: int) -> list[int]:
        """Return the virtual stage of each chunk of a rank."""
        own = self._job.schedule.stages_of(rank)
        return [own.index(stage) for stage in RankWork(self._job, rank).chunk_stages]

    def _remaking(self, rank: int, recompute: Sequence[Collection[str]] | None) -> StepProfile:
        """Return the profile of a rank, with units made again as `RankSettings` says."""
        profile, stages = self._profiles[rank], self._stages(rank)
        groups = []
        for group in profile.groups:
            stage = stages[group.key.chunk]
            names: Collection[str] | None = None
            if recompute is not None:
                names = recompute[stage] if stage < len(recompute) else ()
            groups.append(group.making_again(names))
        return replace(profile, groups=tuple(groups))

    def _predicted(self, plan: OffloadPlan) -> OffloadPlan:
        """Return a plan with what its step would be written in."""
        step = self.simulate(plan)
        us, peaks = step.step_us, [rank.peak_reserved_bytes for rank in step.ranks]
        ranks = (
            replace(rank, predicted_peak_bytes=peak_bytes, predicted_step_us=us)
            for rank, peak_bytes in zip(plan.ranks, peaks, strict=True)
        )
        return replace(plan, ranks=tuple(ranks))


class _Rank(Footprint):
    """One rank, and the orders in which its groups go."""

    def __init__(self, work: RankWork, without: RankResult) -> None:
        super().__init__(work.profile, without)
        self.work = work
        self.keys = frozenset(group.key for group in self.groups)
        longest = sorted(self.groups, key=lambda group: -group.life_us)
        half = len(longest) // 2
        self._orders = (
            _spread(longest),
            longest,
            sorted(longest, key=lambda group: -group.life_us / group.num_bytes),
            _spread(longest[:half]) + _spread(longest[half:]),
            sorted(longest, key=lambda group: -group.num_bytes),
        )

    def cover(self, order: int, target_bytes: int, room_bytes: int) -> list[GroupKey]:
        """Return what moves so that its rows keep a target: as the order says, less what need not.

        Of what is live in a row and moves, as much as the room is there still.
        """
        over = self.rows - target_bytes
        lacking = np.where(over > 0, over + room_bytes, _NOTHING_WANTED)
        taken = []
        for group in self._orders[order]:
            rows = lacking[group.first_row : group.end_row]
            if rows.max(initial=0) > 0:
                rows -= group.num_bytes
                taken.append(group)
        moved = []
        for group in reversed(taken):
            rows = lacking[group.first_row : group.end_row]
            if rows.max() + group.num_bytes <= 0:
                rows += group.num_bytes
            else:
                moved.append(group.key)
        return moved


def _kinds_of(job: Job) -> list[tuple[str, int]]:
    """Return the kinds of bytes that can be made again, those first that free most for their time.

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


def _recompute(kinds: Collection[tuple[str, int]]) -> tuple[frozenset[str], ...]:
    """Return kinds by virtual stage."""
    num_stages = 1 + max((stage for _, stage in kinds), default=-1)
    return tuple(
        frozenset(unit for unit, place in kinds if place == stage) for stage in range(num_stages)
    )


def _unit_choices(profile: StepProfile, stages: Sequence[int], gbps: float) -> Iterator[UnitChoice]:
    """Yield what becomes of each unit of each virtual stage, in a step."""
    sums: dict[tuple[int, str], tuple[int, float, bool]] = {}
    for group in profile.groups:
        for unit in group.remade:
            kind = stages[group.key.chunk], unit.unit
            num_bytes, us, _ = sums.get(kind, (0, 0.0, False))
            sums[kind] = num_bytes + unit.num_bytes, us + unit.us, unit.is_remade
    for (stage, name), (num_bytes, us, is_remade) in sorted(sums.items()):
        copies_us = 2 * num_bytes / gbps / 1e3
        verb = "made again" if is_remade else "not needed: made again"
        reason = f"{verb} in {us / 1e3:.1f} ms, where its copies take {copies_us / 1e3:.1f} ms"
        yield UnitChoice(stage, name, num_bytes, us, is_remade, reason)


def _is_possible(way: _Way) -> bool:
    return 0 <= way.room < _NUM_ROOMS and 0 < way.split < 1


def _spread(groups: Sequence[LiveGroup]) -> list[LiveGroup]:
    """Return groups so that the first of them, however many, lie evenly over the step."""
    in_order = sorted(groups, key=lambda group: group.first_row)
    num_bits = len(groups).bit_length()
    return [
        in_order[place]
        for place in sorted(range(len(groups)), key=lambda place: f"{place:0{num_bits}b}"[::-1])
    ]


def _with_slow_link(machine: Machine) -> Machine:
    """Return a machine whose copies have less; messages between ranks keep what they have."""
    rates = {name: getattr(machine, name) for name in MachineConfig.model_fields if "gbps" in name}
    slow = {name: rate and rate * SLOW_LINK_SHARE for name, rate in rates.items()}
    return machine.model_copy(update=slow)

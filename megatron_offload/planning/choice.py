"""Which groups move, and in how much room, chosen by simulating few candidates.

A candidate is an order in which the groups of each rank go to the host until its target is kept,
how much device memory their copies have, and how that is split between the two directions. What a
candidate takes of memory doesn't depend on times, so it is replayed; how long its step takes is
simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from megatron_offload.core.machine import Machine, MachineConfig
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PolicyConfig
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.planning.footprint import Footprint, LiveGroup
from megatron_offload.planning.job import NO_OFFLOAD, Job, RankSettings
from megatron_offload.planning.plan import OffloadPlan, check_profiles, plan_of, rank_plan
from megatron_offload.planning.policy import plan_by_rule
from megatron_offload.planning.replay import replay
from megatron_offload.planning.simulate import Simulation, reserved_bytes, settings_of, simulate

_NUM_ROOMS = 10
_NUM_VARIED = 3
"""So many of the best rooms are tried with other orders, and of those with other splits."""

_NUM_TARGETS = 64
"""The range of targets is cut into so many by the search for the least memory."""

_SAME_SHARE = 5e-4
"""Steps that differ by less are alike: then those with a slower link decide, then bytes."""

SLOW_LINK_SHARE = 0.8
"""Of the bandwidth of copies, what a plan has to do with. One that was to cost four H200s 0.5 % at
most, with all of it, cost them 3.6 % (docs/planning.md)."""

_MOST_TRIES = 4
"""So often a choice is made for a lower target, where replaying it shows more than its rows do."""

_NOTHING_WANTED = -(2**62)
_NO_LIMITS = RankSettings()

_Settings: TypeAlias = tuple[RankSettings, ...]


class _Way(NamedTuple):
    """How a rank's settings are found for a target."""

    room: int = 0
    """Which of its rooms copies have; where that is too large for the target, the next smaller."""
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


def _with(ways: _Ways, **changes: Any) -> _Ways:
    return tuple(way._replace(**changes) for way in ways)


_VARIATIONS: tuple[Callable[[list[_Ways]], list[_Ways]], ...] = (
    lambda best: [_with(best[0], room=room) for room in range(_NUM_ROOMS)],
    lambda best: [_with(ways, order=order) for ways in best for order in (1, 2, 3)],
    lambda best: [_with(ways, split=split) for ways in best for split in (0.25, 0.75)],
    lambda best: [
        (*best[0][:rank], way._replace(order=order), *best[0][rank + 1 :])
        for rank, way in enumerate(best[0])
        for order in range(4)
    ],
)
"""What is tried after the best so far: rooms, orders, splits, and another order for one rank."""


class Chooser:
    """Finds which groups move, and in how much room, by simulating few candidates.

    Args:
        profiles: of each pipeline rank, in any order.
        job: their step.
        limits: what a user has set; the room that it leaves open is chosen.

    Attributes:
        without: the step without offload.
        lowest_bytes: the lowest target that all ranks can keep.
        highest_bytes: the target that every rank keeps without moving anything.
    """

    def __init__(
        self, profiles: Collection[StepProfile], job: Job, limits: RankSettings = _NO_LIMITS
    ) -> None:
        self._profiles = check_profiles(profiles)
        if len(self._profiles) != job.schedule.num_ranks:
            raise ConfigError(
                f"profiles are of {len(self._profiles)} pipeline ranks, the job has "
                f"{job.schedule.num_ranks}"
            )
        self._job = job
        self._limits = limits
        self._slow_job = replace(job, machine=_with_slow_link(job.machine))
        self.without = simulate(job, record=True)
        self._ranks = [_Rank(job, index, self.without) for index in range(len(self._profiles))]
        self._peaks: dict[tuple[int, RankSettings], int] = {}
        self._steps: dict[tuple[bool, _Settings], Simulation] = {}
        self._least_bytes = [
            self._peak(rank, self._settings(rank, _Way(), rank.keys)) for rank in self._ranks
        ]
        self.lowest_bytes = max(self._least_bytes)
        self.highest_bytes = max(rank.peak_reserved_bytes for rank in self.without.ranks)

    def under(self, targets: Sequence[int]) -> OffloadPlan:
        """Return the quickest plan found that keeps each rank within its target.

        Raises:
            ConfigError: the targets are not as many as the ranks.
            TargetError: one can't be kept.
        """
        if len(targets) != len(self._ranks):
            raise ConfigError(
                f"{len(targets)} memory targets are given for {len(self._ranks)} pipeline ranks; "
                "give one for all, or one for each"
            )
        for index, (target, least) in enumerate(zip(targets, self._least_bytes, strict=True)):
            if self._peak(self._ranks[index], NO_OFFLOAD) > target and least > target:
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
        moved_bytes = sum(profile.offloaded_bytes for profile in self._profiles)
        if moved_bytes:
            raise ConfigError(
                f"the profiled step moved {moved_bytes} bytes, and its times hold what it waited "
                "for them; policy 'auto' needs one that moves nothing, 'memory_target' doesn't"
            )
        limit_us = self.without.step_us * (1 + most_slowdown_percent / 100)
        lowest, highest = self.lowest_bytes, self.highest_bytes
        too_low, kept = -1, _NUM_TARGETS
        target, best = highest, (NO_OFFLOAD,) * len(self._ranks)
        while kept - too_low > 1 and lowest < highest:
            middle = (too_low + kept) // 2
            tried = lowest + (highest - lowest) * middle // _NUM_TARGETS
            found = self._search((tried,) * len(self._ranks), limit_us)[0]
            if found.us <= limit_us:
                kept, target, best = middle, tried, found.settings
            else:
                too_low = middle
        reason = (
            f"{format_bytes(target)}, the least found for at most {most_slowdown_percent:g} % of "
            "the step's time, are kept without it"
        )
        return self._plan("auto", best, [reason] * len(self._ranks))

    def plan(self, config: PolicyConfig) -> OffloadPlan:
        """Return the plan that a section of a configuration asks for, with what it would bring."""
        if isinstance(config, AutoConfig):
            return self.within(config.most_slowdown_percent)
        if isinstance(config, MemoryTargetConfig):
            return self.under(config.targets(len(self._ranks)))
        return self._predicted(plan_by_rule(config, self._profiles))

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

    def _search(self, targets: Sequence[int], limit_us: float | None = None) -> list[_Found]:
        """Return candidates that keep targets which can be kept, the quickest first.

        With a limit the time is the longer of those with either link, and the first within it ends
        the search.
        """
        found: dict[_Settings, _Found] = {}
        best: list[_Found] = []
        for vary in _VARIATIONS:
            for ways in vary(
                [one.ways for one in best[:_NUM_VARIED]] or [(_Way(),) * len(targets)]
            ):
                settings = tuple(map(self._choose, self._ranks, targets, ways))
                if settings in found:
                    continue
                us = self._simulate(settings, is_slow=limit_us is not None).step_us
                if limit_us is not None and us <= limit_us:
                    us = max(us, self._simulate(settings).step_us)
                found[settings] = _Found(us, ways, settings)
                if limit_us is not None and us <= limit_us:
                    return [found[settings]]
            best = sorted(found.values(), key=lambda one: one.us)
        return best

    def _choose(self, rank: _Rank, target: int, one: _Way) -> RankSettings:
        """Return what a rank does to keep a target, with the largest room that this leaves it."""
        if self._peak(rank, NO_OFFLOAD) <= target:
            return NO_OFFLOAD
        rooms = [one._replace(room=room) for room in range(one.room, -1, -1)]
        for way in (*rooms, _Way(order=one.order)):
            everything = self._settings(rank, way, rank.keys)
            if self._peak(rank, everything) <= target:
                break
        room_bytes = (everything.max_inflight_bytes or 0) + (everything.prefetch_bytes or 0)
        aim_bytes = target - self._peak(rank, NO_OFFLOAD) + int(rank.rows.max())
        for _ in range(_MOST_TRIES):
            settings = self._settings(rank, way, rank.cover(way.order, aim_bytes, room_bytes))
            excess_bytes = self._peak(rank, settings) - target
            if excess_bytes <= 0:
                return settings
            aim_bytes -= excess_bytes
        return everything

    def _settings(self, rank: _Rank, one: _Way, moved: Collection[GroupKey]) -> RankSettings:
        """Return the settings of a rank that moves these groups; the user's limits go over all."""
        least = 2 * rank.largest_bytes
        growth = max(1.0, rank.saved_bytes / least) if least else 0.0
        room_bytes = round(least * growth ** (one.room / (_NUM_ROOMS - 1)))
        prefetch_bytes = int(room_bytes * one.split)
        chosen = {
            "max_inflight_bytes": room_bytes - prefetch_bytes,
            "prefetch_bytes": prefetch_bytes,
        }
        free = {name: size for name, size in chosen.items() if getattr(self._limits, name) is None}
        kept = frozenset(rank.keys.difference(moved))
        return replace(self._limits, kept=kept, **free) if moved else NO_OFFLOAD

    def _peak(self, rank: _Rank, settings: RankSettings) -> int:
        key = rank.index, settings
        if key not in self._peaks:
            self._peaks[key] = reserved_bytes(self._job, replay(self._job, rank.index, settings))
        return self._peaks[key]

    def _simulate(self, settings: _Settings, *, is_slow: bool = False) -> Simulation:
        key = is_slow, settings
        if key not in self._steps:
            self._steps[key] = simulate(self._slow_job if is_slow else self._job, settings)
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
        ranks = zip(self._profiles, self._ranks, chosen, reasons, strict=True)
        for profile, rank, settings, reason in ranks:
            kept = {group.key: "has no backward" for group in profile.groups if group.num_bytes}
            moved: dict[GroupKey, str] = {}
            for group in rank.groups:
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
                )
            )
        return self._predicted(plan_of(kind, self._profiles, plans))

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

    def __init__(self, job: Job, index: int, without: Simulation) -> None:
        super().__init__(job, index, without.ranks[index].trace)
        self.index = index
        self.keys = frozenset(group.key for group in self.groups)
        longest = sorted(self.groups, key=lambda group: -group.life_us)
        half = len(longest) // 2
        self._orders = (
            _spread(longest),
            longest,
            sorted(longest, key=lambda group: -group.life_us / group.num_bytes),
            _spread(longest[:half]) + _spread(longest[half:]),
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

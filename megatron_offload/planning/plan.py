"""What moves on every pipeline rank, and why: the outcome of planning, as data.

A plan decides on every group of its run, in the order of their commits, each with a reason. It only
ever costs time or memory; exactness does not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from megatron_offload.core.profile import IS_STRICT, Amount, Duration, GroupKey, Name, StepProfile
from megatron_offload.errors import ConfigError

_Identity = tuple[GroupKey, str, int]


class MeasuredCost(NamedTuple):
    """What a step has shown a plan to cost."""

    step_us: Duration
    """Length of the step on the rank that took longest."""
    lost_us: Duration
    """What the step as a whole has lost by the plan: it is that much longer for it."""

    @property
    def slowdown_percent(self) -> float:
        """What was lost, of the rest of the step."""
        # A step that does nothing but wait is taken to have done something for a nanosecond.
        return 100 * self.lost_us / max(self.step_us - self.lost_us, 1e-3)

    def __str__(self) -> str:
        return f"{self.slowdown_percent:.2f} % of a step of {self.step_us / 1e3:.1f} ms"


class GroupChoice(NamedTuple):
    """What becomes of one group."""

    key: GroupKey
    name: Name
    num_bytes: Amount
    moves: bool
    """Whether it is offloaded; else it is kept on the device."""
    reason: Name
    """In a few words, for people."""
    externally_referenced_bytes: Amount = 0
    """What it saves besides that something else keeps."""
    recomputed_bytes: Amount = 0
    """What it saves besides that is recomputed."""

    @property
    def identity(self) -> _Identity:
        """What every run of the job has. Keepers are found out late, so all parts count as one."""
        other_bytes = self.externally_referenced_bytes + self.recomputed_bytes
        return self.key, self.name, self.num_bytes + other_bytes


class UnitChoice(NamedTuple):
    """What becomes of all that one virtual stage saves of one unit, in a step."""

    vp_stage: Amount
    unit: Name
    num_bytes: Amount
    us: Duration
    """What recompute takes, or would."""
    is_recomputed: bool
    """Whether it is recomputed; else it is kept or offloaded with its groups."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one pipeline rank does. Peaks and times are None where there are none."""

    __pydantic_config__ = IS_STRICT

    choices: tuple[GroupChoice, ...]
    """One for each group of its step, in the order of their commits."""
    max_inflight_bytes: Amount | None = None
    """Device memory for groups on their way to the host: how late each is released. None leaves it
    to the engine, as in ``OffloadConfig``."""
    prefetch_bytes: Amount | None = None
    """The same for groups that are back ahead of their use."""
    predicted_peak_bytes: Amount | None = None
    predicted_step_us: Duration | None = None
    measured_peak_bytes: Amount | None = None
    """Most that the rank was seen to reserve."""
    units: tuple[UnitChoice, ...] | None = None
    """What is recomputed, and what could be; None leaves that to ``OffloadConfig``."""

    @property
    def recompute(self) -> tuple[frozenset[str], ...] | None:
        """The units that are recomputed, by virtual stage; None where it doesn't say."""
        if self.units is None:
            return None
        return by_stage((unit.unit, unit.vp_stage) for unit in self.units if unit.is_recomputed)

    @property
    def kept(self) -> dict[GroupKey, str]:
        """The groups that are kept, each with the reason."""
        return {choice.key: choice.reason for choice in self.choices if not choice.moves}

    @property
    def moved_bytes(self) -> int:
        """What a step copies to the host, and back."""
        return sum(choice.num_bytes for choice in self.choices if choice.moves)

    @property
    def saved_bytes(self) -> int:
        """What all groups hold together, less what is recomputed."""
        return sum(choice.num_bytes for choice in self.choices)

    @property
    def recomputed_bytes(self) -> int:
        """What a step recomputes."""
        return sum(choice.recomputed_bytes for choice in self.choices)


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What all pipeline ranks do, in their order, as a policy of some kind has found it."""

    __pydantic_config__ = IS_STRICT

    policy: Name
    num_microbatches: Amount
    vp_size: Amount
    ranks: tuple[RankPlan, ...]
    bandwidths: str = ""
    """Where the bandwidths come from that it rests on, in words; empty for none."""
    measured: MeasuredCost | None = None
    """What steps that follow it were measured to cost; None where none were."""

    @property
    def moved_bytes(self) -> int:
        """What a step copies to the host, and back, on all ranks together."""
        return sum(rank.moved_bytes for rank in self.ranks)

    @property
    def pp_size(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    def check_sizes(self, num_microbatches: int, pp_size: int, vp_size: int) -> None:
        """Raise `ConfigError`, with the first difference, unless made for such a pipeline."""
        for what, planned_size, found_size in (
            ("microbatches", self.num_microbatches, num_microbatches),
            ("pipeline ranks", self.pp_size, pp_size),
            ("virtual stages", self.vp_size, vp_size),
        ):
            if planned_size != found_size:
                raise _another_run(f"it is for {planned_size} {what}, and there are {found_size}")

    def check(self, profile: StepProfile) -> None:
        """Raise `ConfigError`, with the first difference, unless made for a profile's run."""
        run = profile.run
        self.check_sizes(run.num_microbatches, run.pp_size, run.vp_size)
        known = {unit.unit for group in profile.groups for unit in group.recomputed}
        lacking = frozenset[str]().union(*(self.ranks[run.pp_rank].recompute or ())) - known
        if lacking:
            raise _another_run(
                f"it recomputes {min(lacking)!r} on pipeline rank {run.pp_rank}, and the "
                "run has no recipe of that name (OffloadConfig.recompute lists what has one)"
            )
        groups = [(group.key, group.name, group.saved_bytes) for group in profile.groups]
        choices = [choice.identity for choice in self.ranks[run.pp_rank].choices]
        pairs = list(zip_longest(choices, groups))
        if _is_nearly_the_same(pairs):
            return
        index = next(index for index, (planned, found) in enumerate(pairs) if planned != found)
        planned, found = map(_describe, pairs[index])
        raise _another_run(
            f"group {index} of pipeline rank {run.pp_rank} is {planned} in the plan and {found} in "
            "the run"
        )


def by_stage(kinds: Iterable[tuple[str, int]]) -> tuple[frozenset[str], ...]:
    """Return units, each with its virtual stage, by virtual stage."""
    found = set(kinds)
    num_stages = 1 + max((stage for _, stage in found), default=-1)
    return tuple(
        frozenset(unit for unit, place in found if place == stage) for stage in range(num_stages)
    )


def plan_of(policy: str, profiles: Sequence[StepProfile], ranks: Iterable[RankPlan]) -> OffloadPlan:
    """Return the plan of all ranks, made by a kind of policy from profiles that were checked."""
    run = profiles[0].run
    return OffloadPlan(policy, run.num_microbatches, run.vp_size, tuple(ranks))


def rank_plan(
    profile: StepProfile, kept: Mapping[GroupKey, str], moved: str, **settings: Any
) -> RankPlan:
    """Return the plan of a rank: what is kept, each with its reason; ``moved`` is of the others.

    Groups without bytes are kept; ``settings`` are further attributes of `RankPlan`.
    """
    choices = []
    for group in profile.groups:
        key = group.key
        moves = group.num_bytes > 0 and key not in kept
        recomputed_bytes = sum(unit.num_bytes for unit in group.recomputed if unit.is_recomputed)
        nothing = "is all recomputed" if recomputed_bytes else "holds nothing worth offloading"
        reason = moved if moves else kept.get(key, nothing)
        sizes = (group.externally_referenced_bytes, recomputed_bytes)
        choices.append(GroupChoice(key, group.name, group.num_bytes, moves, reason, *sizes))
    return RankPlan(tuple(choices), **settings)


def check_profiles(profiles: Collection[StepProfile]) -> tuple[StepProfile, ...]:
    """Return the profiles by pipeline rank; `ConfigError` unless they are one run's, all of it."""
    in_order = tuple(sorted(profiles, key=lambda profile: profile.run.pp_rank))
    first = in_order[0].run
    ranks = [profile.run.pp_rank for profile in in_order]
    if ranks != list(range(first.pp_size)):
        raise ConfigError(
            f"a plan needs one profile of each of {first.pp_size} pipeline ranks, got those of "
            f"{', '.join(map(str, ranks))}"
        )
    for run in (profile.run for profile in in_order):
        for name in ("num_microbatches", "pp_size", "vp_size", "modules", "versions"):
            ours, others = getattr(first, name), getattr(run, name)
            if ours != others:
                raise ConfigError(
                    f"the profiles of pipeline ranks 0 and {run.pp_rank} are of different runs: "
                    f"{name} {ours} and {others}"
                )
    return in_order


def _is_nearly_the_same(pairs: list[tuple[_Identity | None, _Identity | None]]) -> bool:
    """Whether the same groups save the same, to 2 %: offload changes which group counts first."""
    differing_bytes = planned_bytes = 0
    for planned, found in pairs:
        if planned is None or found is None or planned[:2] != found[:2]:
            return False
        differing_bytes += abs(planned[2] - found[2])
        planned_bytes += planned[2]
    return differing_bytes <= 0.02 * planned_bytes


def _another_run(difference: str) -> ConfigError:
    return ConfigError(
        f"the plan was made for another run: {difference}; make one from this run's profiles"
    )


def _describe(group: _Identity | None) -> str:
    if group is None:
        return "missing"
    key, name, num_bytes = group
    return f"{name!r} (chunk {key.chunk}, {num_bytes} bytes)"

"""Which plan of rows comes next, by what those that were followed have taken.

Ranks that have the same layers are one stage, and follow one plan. Under a limit of time all stages
take moves in the order of what these take, as the slowest decides; a target each keeps by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_offload.core.policy_config import AutoConfig
from megatron_offload.core.row_config import EXPERTS, MODEL, MOE_ACT, UNITS
from megatron_offload.core.units import format_bytes
from megatron_offload.planning.frontier import Action, Layers, Part, Plan, frontier

NOTHING = (
    "nothing of what its layers save can be freed: tensors smaller than 1 MiB, or of which a copy "
    "takes over one and a half times as long as their layer, aren't offloaded, and layers that "
    "aren't of transformers or Megatron, are given a cache or have hooks aren't recomputed unless "
    "'recompute' or 'rows' name them (docs/rows.md)"
)

_MOST_MEASURED = 20  # steps of one plan
_MOST_UNKNOWN = 40  # of which nothing is known by then
_LEAST_ERROR = 1.0  # in points, of what is predicted, and in shares of it
_ERROR_SHARE = 0.5
_BLIND_ERROR = 2.0  # times that, where steps don't show what is true
_NEAR_SHARE = 0.3  # likewise of what another plan has taken, and this one more or less
_WIDTH = 2.1  # of standard errors, on both sides, of what is said
MOST_DOUBT = 10.0  # in points: of an interval that is wider nothing is known
_AIM_SHARE = 0.9  # of what a step may cost, so that one that costs a little more is kept
_TRUST = 0.6  # likewise where no step shows what a plan takes
_HOPE = 1.4  # times of that, what is tried where no plan takes less
_LEAST_GAIN_SHARE = 64  # plans that differ by less of the memory are the same
_LARGE_GAIN_SHARE = 16  # likewise where one will do already
_MARGIN_SHARE = 96  # of a target, what is left to spare
_SHORT_SHARE = 0.98  # of what the longest forward needs with a plan, what others need without
_MOST_FITS = 6  # so many plans are followed until a target is kept


class Slowdown(NamedTuple):
    """By how much rows make steps longer, in percent of the time without."""

    percent: float
    low: float
    high: float

    @classmethod
    def of(cls, percent: float, error: float) -> Slowdown:
        """Return what has such a standard error, in points: it lies inside in 19 of 20 cases."""
        return cls(percent, percent - _WIDTH * error, percent + _WIDTH * error)

    @property
    def width(self) -> float:
        """In points, between the ends."""
        return self.high - self.low

    @property
    def error(self) -> float:
        """The standard error."""
        return self.width / (2 * _WIDTH)

    @property
    def most(self) -> float:
        """What is held against a limit: one error more."""
        return self.percent + self.error

    def beside(self, other: Slowdown) -> Slowdown:
        """Return the mean of both by how sure they are; itself where it is far above the other."""
        together = math.hypot(self.error, other.error)
        if not together or self.percent - other.percent > 2 * together:
            return self
        share = (self.error / together) ** 2
        percent = self.percent + share * (other.percent - self.percent)
        return Slowdown.of(percent, self.error * other.error / together)

    def __str__(self) -> str:
        return f"{self.percent:+z.1f} % ({self.low:+z.1f} to {self.high:+z.1f})"


@dataclass(eq=False)
class Stage:
    """Ranks that have the same layers.

    Args:
        kinds: the layers, as in `frontier`, in one microbatch; the first kind begins with nothing.
        link_bytes: as in `frontier`.
        num_inflight: microbatches whose backward is still to come, at most.
        bare_bytes: what is needed without rows.
        reserved_bytes: what was reserved; None where that isn't known.
        target_bytes: what is to be reserved at most; None where that doesn't matter.
        tokens: of forwards so far, where their lengths may decide what is done in each.
        growth: the power of its tokens by which a forward's time grows.
        ready_bytes: what the first plan may copy, as far as one does: so much memory is ready.
        saved_bytes: in a forward of the size that ``kinds`` are of.

    Attributes:
        plans: the frontier of what wasn't refused.
        place: of the plan that is followed.
        tried: by the place of each that was followed, what it has cost, and what was reserved.
    """

    kinds: Sequence[Layers]
    link_bytes: Mapping[int, float] | None = None
    num_inflight: float = 1.0
    bare_bytes: int = 0
    reserved_bytes: int | None = 0
    target_bytes: int | None = None
    tokens: Sequence[float] = ()
    saved_bytes: int = 0
    growth: float = 1.0
    ready_bytes: float = math.inf

    def __post_init__(self) -> None:
        self._refused = set[Part]()
        self.refuse(())

    def refuse(self, parts: Iterable[Part]) -> None:
        """Plan without these from here on."""
        self._refused |= set(parts)
        kinds = [{x: self._left(own, x) for x, own in layers.items()} for layers in self.kinds]
        self.plans = [self._when_long(plan) for plan in frontier(kinds, self.link_bytes)]
        self.place, self.tried = 0, dict[int, tuple[Slowdown | None, int]]()

    def _left(self, actions: Sequence[Action], number: int) -> list[Action]:
        """Return what of a layer's actions isn't refused; where the first is, of the first kind."""
        is_left = self._refused.isdisjoint(actions[0].parts)
        own = actions if is_left else self.kinds[0][number]
        return [one for one in own if self._refused.isdisjoint(one.parts)]

    def _when_long(self, plan: Plan) -> Plan:
        """Let a plan be followed in long forwards alone: others need less than those with it.

        What it takes is then that of all forwards together.
        """
        sites = {site for action in plan.actions.values() for site, _ in action.parts}
        # What is in no layer, or is given what has been routed to it, has no length.
        has_length = not any(x in (MODEL, *UNITS) or x.endswith((EXPERTS, MOE_ACT)) for x in sites)
        if not (self.tokens and plan.freed_bytes and has_length):
            return plan
        share = max(0.0, 1 - plan.freed_bytes / max(1, self.saved_bytes))
        min_tokens = int(_SHORT_SHARE * share * max(self.tokens))
        busy = busy_share(self.tokens, min_tokens, self.growth)
        return plan if busy == 1 else plan._replace(us=busy * plan.us, min_tokens=min_tokens)

    @property
    def plan(self) -> Plan:
        """What is followed."""
        return self.plans[self.place]

    def next_place(self) -> tuple[int, bool, str]:
        """Return the plan to follow for the target, whether it is final, and why in words."""
        target_bytes = self.target_bytes
        if target_bytes is None:
            return self.place, True, ""
        wanted_bytes = target_bytes - target_bytes // _MARGIN_SHARE
        sizes = {place: size for place, (_, size) in self.tried.items()}
        good = min((place for place, size in sizes.items() if size <= target_bytes), default=None)
        lowest = 1 + max(
            (place for place, size in sizes.items() if size > target_bytes), default=-1
        )
        highest = (len(self.plans) if good is None else good) - 1
        if self.tried:
            freed_bytes = self.freed_bytes(self.place) + sizes[self.place] - wanted_bytes
            is_near = good is not None and sizes[good] >= target_bytes - target_bytes // 24
            if is_near or lowest > highest or len(self.tried) >= _MOST_FITS:
                if good is None:  # what frees no more than a lighter plan isn't worth its time
                    least_bytes = min(sizes.values())
                    near = (
                        p for p, size in sizes.items() if size <= least_bytes + target_bytes // 96
                    )
                    good = min(near)
                place = good
                found, _ = self.tried[place]
                cost = f"; a step takes {found}" if found else ""
                size, target = (format_bytes(x, 2) for x in (sizes[place], target_bytes))
                return place, True, f"{size} are reserved, at most {target} is wanted{cost}"
        elif self.reserved_bytes is None:
            return 0, True, "what this device has in use isn't known, so no target can be kept"
        else:
            freed_bytes = max(self.reserved_bytes, self.bare_bytes) - wanted_bytes
            if freed_bytes <= 0:
                return 0, True, "all fits"
        places = range(len(self.plans))
        wanted = next((p for p in places if self.freed_bytes(p) >= freed_bytes), highest)
        return min(max(lowest, wanted), highest), False, ""

    def within(self, us: float) -> int:
        """Return the last plan that takes no longer; at least the first."""
        return bisect_right(self.plans, us, lo=1, key=lambda plan: plan.us) - 1

    def is_ready(self, us: float) -> bool:
        """Whether host memory that was touched has room for what that plan copies."""
        return self.plans[self.within(us)].copied_bytes <= self.ready_bytes

    def freed_bytes(self, place: int) -> float:
        """Return what a plan frees of all microbatches that are held."""
        return self.num_inflight * self.plans[place].freed_bytes


def busy_share(tokens: Sequence[float], min_tokens: float, growth: float = 1.0) -> float:
    """Return how much of the time of these forwards is in those that are so long."""
    longest = max(tokens, default=1.0)
    times = [((x / longest) ** growth, x >= min_tokens) for x in tokens]
    return sum(time for time, is_long in times if is_long) / max(1e-9, sum(x for x, _ in times))


class RowChoice:
    """Chooses a plan for each stage, until what was tried keeps what was promised.

    Where steps differ too much to see that, one follows that is predicted to by a wide margin.

    Args:
        policy: how long steps may take, where memory isn't what matters.
        stages: by name.
        bare_us: what a microbatch takes without rows, on the rank that takes longest.

    Attributes:
        is_blind: whether steps differ too much, so that no other plan is measured.
    """

    def __init__(
        self, policy: AutoConfig | None, stages: Mapping[str, Stage], bare_us: float
    ) -> None:
        self._policy, self.stages, self.bare_us = policy, stages, bare_us
        self._num_measured = 0
        self.is_blind = False
        self._begin()

    def _begin(self) -> None:
        every = {plan.us for stage in self.stages.values() for plan in stage.plans[1:]}
        self._rungs = [-math.inf, *sorted(every)]
        """What plans take, in order; at first nothing is done."""
        self._rung = 0
        self._tried: dict[int, Slowdown] = {}

    @property
    def _limited(self) -> AutoConfig | None:
        """The limit of time, where no stage has a target."""
        has_target = any(stage.target_bytes is not None for stage in self.stages.values())
        return None if has_target else self._policy

    def refuse(self, refused: Mapping[str, Sequence[Part]]) -> None:
        """Plan without these parts of stages from here on, as if nothing had been tried."""
        for name, parts in refused.items():
            self.stages[name].refuse(parts)
        self._begin()

    def note(self, found: Slowdown | None, reserved: Mapping[str, int], num_steps: int) -> bool:
        """Take what so many more steps have shown of what is followed; return whether it will do.

        ``found`` is what all have shown on the rank that lost most.
        """
        self._num_measured += num_steps
        policy = self._limited
        if policy is not None:
            limit = policy.most_slowdown_percent
            most_doubt = max(MOST_DOUBT, 4 * limit)
            is_known = found is not None and (found.low > limit or found.width <= most_doubt)
            is_over = self._num_measured >= (_MOST_MEASURED if is_known else _MOST_UNKNOWN)
            self.is_blind |= is_over and not is_known
            expected = self._expected(self._rung)
            if found is None:
                found = expected
            elif is_known or found.percent - found.error <= limit:  # else it speaks against it
                found = found.beside(expected)
            is_clear = is_known and abs(found.percent - limit) > found.error
            if not (is_clear or is_over):
                return False
            self._tried[self._rung] = found
        self._num_measured = 0
        for name, stage in self.stages.items():
            stage.tried[stage.place], stage.ready_bytes = (found, reserved.get(name, 0)), math.inf
        return True

    def next(self) -> tuple[bool, str]:
        """Choose what each stage follows; return whether that is final, and why in words."""
        if all(len(stage.plans) == 1 for stage in self.stages.values()):
            return True, NOTHING
        policy = self._limited
        if policy is not None:
            self._rung, is_final, text = self._next_rung(policy)
            places = [stage.within(self._rungs[self._rung]) for stage in self.stages.values()]
        else:
            answers = [stage.next_place() for stage in self.stages.values()]
            is_final = all(one[1] for one in answers)
            # What is said is of the stage that does most.
            places, text = [one[0] for one in answers], max(answers)[2]
        for place, stage in zip(places, self.stages.values(), strict=True):
            stage.place = place
        return is_final, text

    def predicted(self) -> str:
        """Say what a step takes with what is followed, where that isn't measured."""
        percent = 100 * max(stage.plan.us for stage in self.stages.values()) / self.bare_us
        why = ", as steps differ too much to see it" if self.is_blind else ""
        return f"a step is predicted to take {percent:+z.1f} %{why}"

    def _expected(self, rung: int) -> Slowdown:
        """Return what a step will take with a plan, by what the nearest one has taken.

        Before any was measured it is what is predicted.
        """
        us = self._rungs[rung]
        seen = {self._rungs[other]: found for other, found in self._tried.items()}
        if not seen:
            percent, wide = 100 * us / self.bare_us, _BLIND_ERROR if self.is_blind else 1.0
            return Slowdown.of(percent, wide * max(_LEAST_ERROR, _ERROR_SHARE * percent))
        near_us = min(seen, key=lambda other_us: abs(other_us - us))
        found, share = seen[near_us], max(us, 1e-3) / max(near_us, 1e-3)
        error = math.hypot(share * found.error, _NEAR_SHARE * (share - 1) * found.percent)
        return Slowdown.of(share * found.percent, error)

    def _next_rung(self, policy: AutoConfig) -> tuple[int, bool, str]:
        limit, stages = policy.most_slowdown_percent, self.stages.values()
        us_of = self._rungs
        points = {0: (0.0, 0.0)}
        points |= {rung: (us_of[rung], seen.most) for rung, seen in self._tried.items()}
        quick = max(rung for rung, (_, percent) in points.items() if percent <= limit)
        slow = min(
            (p for p, (_, percent) in points.items() if percent > limit and p > quick),
            default=len(us_of),
        )
        freed = [sum(stage.freed_bytes(stage.within(us)) for stage in stages) for us in us_of]
        share = _LARGE_GAIN_SHARE if quick else _LEAST_GAIN_SHARE
        least_bytes = freed[quick] + sum(stage.bare_bytes for stage in stages) // share
        more = [rung for rung in range(quick + 1, slow) if freed[rung] >= least_bytes]
        if self.is_blind:
            good = [rung for rung in more if self._expected(rung).most <= limit]
            if good and not quick:
                return max(good), False, ""
        elif len(self._tried) < max(1, policy.measured_plans):
            aim = (_AIM_SHARE if policy.measured_plans else _TRUST) * limit
            us, percent = points[quick]
            if slow < len(us_of):
                slow_us, slow_percent = points[slow]
                most_us = us + (slow_us - us) * max(0.0, aim - percent) / (slow_percent - percent)
            else:  # as much again at most as it seems to take
                most_us = us * min(4.0, aim / max(percent, 0.05)) or aim / 100 * self.bare_us
            for hope in (1.0, _HOPE) if policy.measured_plans and not self._tried else (1.0,):
                good = [rung for rung in more if us_of[rung] <= hope * most_us]
                ready = [x for x in good if all(one.is_ready(us_of[x]) for one in stages)]
                if good:
                    return max(ready or good), False, ""
            # One that seemed to take too much may have met slow steps.
            if self._tried and not quick and more and self._expected(more[0]).low <= limit:
                return more[0], False, ""
        found = self._tried.get(quick)
        if found is not None:
            takes = "seems to take" if self.is_blind else "takes"
            return quick, True, f"a step {takes} {found}, at most {limit:g} % is wanted"
        percent = 100 * min(us_of[1:]) / self.bare_us
        least = f"the least that frees anything is predicted to cost {percent:.1f} %"
        if self.is_blind:
            least = f"steps differ too much to see what rows cost, and {least}"
        elif self._tried:
            least = f"the least costly plan that was tried takes {min(self._tried.values())}"
        return 0, True, f"{least}, and at most {limit:g} % is wanted"

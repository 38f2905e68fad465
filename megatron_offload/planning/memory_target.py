"""Plans that keep every pipeline rank within a memory target.

A rank's copies get what the others of its node leave, at least an equal share; pipeline ranks lie
on nodes in order. What a target has above the lowest that can be kept goes to the device memory of
moved groups first, until that is what the engine would take without a plan; then groups stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.planning.cover import Problem, Solution
from megatron_offload.planning.footprint import Footprint
from megatron_offload.planning.plan import OffloadPlan, RankPlan, check_profiles, plan_of, rank_plan
from megatron_offload.planning.solver import solve

_AUTO_SHARE = 8
"""As in the engine's budget: an eighth of what a step saves at its peak, for each of two limits."""

_MACHINE = Machine()


@dataclass(frozen=True)
class Resources:
    """What plans for memory may use: ``gpus_per_rank`` GPUs of a node do the same at the same time.

    Both budgets are as in ``OffloadConfig``; None follows the target.
    """

    machine: Machine = _MACHINE
    gpus_per_rank: int = 1
    max_inflight_bytes: int | None = None
    prefetch_bytes: int | None = None


_RESOURCES = Resources()


@dataclass(frozen=True)
class MemoryTargetPolicy:
    """Fits every rank into so many bytes, and copies as little as that takes.

    ``target_bytes`` is the most to reserve: one number for all pipeline ranks, or one each.
    """

    kind: ClassVar[str] = "memory_target"

    target_bytes: int | tuple[int, ...]
    resources: Resources = _RESOURCES

    def make_plan(self, profiles: Collection[StepProfile]) -> OffloadPlan:
        """Return the plan of all ranks; `TargetError` where one can't be brought so low."""
        planner = MemoryPlanner(profiles, self.resources)
        target = self.target_bytes
        targets = (target,) * len(planner.ranks) if isinstance(target, int) else target
        return planner.plan(targets, self.kind)


class MemoryPlanner:
    """Plans one run for any number of targets; ``ranks`` are the footprints of its profiles."""

    def __init__(
        self,
        profiles: Collection[StepProfile],
        resources: Resources = _RESOURCES,
        solver: Callable[[Problem], Solution] = solve,
    ) -> None:
        self.ranks = [Footprint.of(profile) for profile in check_profiles(profiles)]
        self._machine = resources.machine
        self._gpus_per_rank = resources.gpus_per_rank
        self._solver = solver
        self._budgets = [_DeviceRoom(rank, self._fair_gbps, resources) for rank in self.ranks]

    @property
    def lowest_bytes(self) -> int:
        """The lowest target that all ranks can keep."""
        return max(budget.lowest_target_bytes for budget in self._budgets)

    @property
    def highest_bytes(self) -> int:
        """The target that every rank keeps without moving anything."""
        return max(rank.peak_bytes for rank in self.ranks)

    def plan(self, target_bytes: Sequence[int], kind: str) -> OffloadPlan:
        """Return a plan, of a kind of policy, that keeps each rank within its target.

        Raises:
            ConfigError: the targets are not as many as the ranks.
            TargetError: one can't be kept.
        """
        if len(target_bytes) != len(self.ranks):
            raise ConfigError(
                f"{len(target_bytes)} memory targets are given for {len(self.ranks)} pipeline "
                "ranks; give one for all, or one for each"
            )
        links_gbps = self._links_gbps(target_bytes)
        num_ranks = len(self.ranks)
        # The solver leaves other threads alone while it searches, which is nearly all of the time.
        with ThreadPoolExecutor(min(num_ranks, os.cpu_count() or 1)) as threads:
            plans = list(threads.map(self._plan_rank, range(num_ranks), target_bytes, links_gbps))
        return plan_of(kind, [rank.profile for rank in self.ranks], plans)

    def _plan_rank(self, index: int, target_bytes: int, link_gbps: float) -> RankPlan:
        rank, room = self.ranks[index], self._budgets[index]
        device_bytes = room.bytes_under(target_bytes)
        problem = rank.problem(target_bytes, device_bytes, link_gbps)
        try:
            solution = self._solver(problem)
        except ConfigError as error:
            if problem.least_peak_bytes() <= problem.target_bytes:
                raise
            least_bytes = problem.least_peak_bytes() + rank.waste_bytes
            sizes = (target_bytes, least_bytes, least_bytes - target_bytes)
            target, least, more = (format_bytes(size, 2) for size in sizes)
            raise TargetError(
                f"pipeline rank {index} can't be brought under {target}: with all that can move in "
                f"time it still takes {least}, {more} more; raise the target, mark more modules, "
                "or lower the microbatch"
            ) from error
        moved = {rank.keys[position] for position in solution.moved}
        prefetch_bytes = room.prefetch_bytes(device_bytes)
        return rank_plan(
            rank.profile,
            {key: reason for key, reason in _kept(rank, problem) if key not in moved},
            _moved_reasons(rank, link_gbps),
            max_inflight_bytes=device_bytes - prefetch_bytes if moved else None,
            prefetch_bytes=prefetch_bytes if moved else None,
            predicted_peak_bytes=problem.peak_bytes(solution.moved) + rank.waste_bytes,
        )

    # The node's bandwidth.

    @cached_property
    def _fair_gbps(self) -> float:
        """What each GPU gets each way when all of a node copy both ways."""
        num_gpus = min(self._machine.ranks_per_node, len(self.ranks)) * self._gpus_per_rank
        return min(self._most_gbps, self._machine.node_gbps / 2 / num_gpus)

    @property
    def _most_gbps(self) -> float:
        machine = self._machine
        return min(machine.both_gbps, machine.d2h_gbps, machine.h2d_gbps)

    def _links_gbps(self, target_bytes: Sequence[int]) -> list[float]:
        """Return what each rank's copies get each way."""
        used_gbps = []
        for rank, room, target in zip(self.ranks, self._budgets, target_bytes, strict=True):
            problem = rank.problem(target, room.bytes_under(target), self._fair_gbps)
            demand_bytes = int(problem.demand_bytes.max(initial=0))
            used_gbps.append(demand_bytes / rank.profile.step_us / 1e3 if demand_bytes else 0.0)
        size = self._machine.ranks_per_node
        links = []
        for index, own_gbps in enumerate(used_gbps):
            first = index // size * size
            others_gbps = sum(used_gbps[first : first + size]) - own_gbps
            left_gbps = self._machine.node_gbps / 2 / self._gpus_per_rank - others_gbps
            links.append(min(max(left_gbps, self._fair_gbps), self._most_gbps))
        return links


class _DeviceRoom:
    """How much device memory the moved groups of one rank get."""

    def __init__(self, rank: Footprint, link_gbps: float, resources: Resources) -> None:
        largest, share = rank.largest_bytes, rank.saved_peak_bytes // _AUTO_SHARE
        inflight, prefetch = resources.max_inflight_bytes, resources.prefetch_bytes
        self._is_given = inflight is not None and prefetch is not None
        if inflight is None:
            inflight = max(largest, share)
        self._prefetch_bytes = max(2 * largest, share) if prefetch is None else prefetch
        self._wanted_bytes = inflight + self._prefetch_bytes
        self._least_bytes = self._wanted_bytes
        if not self._is_given:
            self._least_bytes = min(2 * largest, self._wanted_bytes)
        lowest = rank.problem(0, self._least_bytes, link_gbps).least_peak_bytes()
        self.lowest_target_bytes = lowest + rank.waste_bytes

    def bytes_under(self, target_bytes: int) -> int:
        """Return the room under a target: it grows with it, but never faster."""
        spare = max(0, target_bytes - self.lowest_target_bytes)
        return min(self._least_bytes + spare, self._wanted_bytes)

    def prefetch_bytes(self, device_bytes: int) -> int:
        """Return the part of the room for what is back ahead of its use."""
        most_bytes = device_bytes if self._is_given else device_bytes // 2
        return min(self._prefetch_bytes, most_bytes)


def _kept(rank: Footprint, problem: Problem) -> list[tuple[GroupKey, str]]:
    """Return why each group would stay."""
    movable = set(problem.movable)
    reasons = dict.fromkeys(
        (group.key for group in rank.profile.groups if group.num_bytes),
        "has no backward in the step",
    )
    for position, (key, item) in enumerate(zip(rank.keys, rank.items, strict=True)):
        reasons[key] = (
            "memory is low enough without it"
            if position in movable
            else f"needed again after {_ms(item.backward_us - item.committed_us)}, and its copies "
            f"take {_ms(2 * item.num_bytes / problem.link_gbps / 1e3)}"
        )
    return list(reasons.items())


def _moved_reasons(rank: Footprint, link_gbps: float) -> dict[GroupKey, str]:
    return {
        key: f"not needed for {_ms(item.backward_us - item.committed_us)} around the peak; its "
        f"copies take {_ms(2 * item.num_bytes / link_gbps / 1e3)}"
        for key, item in zip(rank.keys, rank.items, strict=True)
    }


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms"

"""The choice of groups that moves the fewest bytes, by mixed-integer programming.

Owns two programs for HiGHS, through `scipy.optimize.milp`: the fewest bytes that keep the target,
and among all choices of that many bytes one whose copies keep the compute stream waiting least. In
the second each direction of the link is a queue: copies join it at the commit (or, in reversed
time, at the backward), it is emptied at the link's speed, and it may hold half of ``device_bytes``;
what goes beyond is waited for. Bytes come first, so that more memory never means more traffic.

Must not know how the quick choice is made that stands in where the time limit strikes.

Invariants: every answer is checked in integers; the same problem gets the same answer, unless one
machine keeps the time limit and another doesn't. Let one rank plan for all.
Read next: `megatron_offload.planning.cover`, which states the problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from megatron_offload.errors import ConfigError
from megatron_offload.planning.cover import Problem, Solution
from megatron_offload.planning.greedy import solve_greedy

__all__ = ["TIME_LIMIT_S", "solve"]

TIME_LIMIT_S = 10.0

_WAITING_GAP = 0.01
"""Waiting within a hundredth of the least is as good: the times are estimates."""

_RISK_SHARE = 1e-3
"""A byte that fills the whole time between commit and backward with its copies counts as much as
this of a byte that is waited for."""


def solve(problem: Problem, *, time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """Return a choice that moves the fewest bytes, and of those one with the least waiting.

    Where it can't be found within the time limit, `solve_greedy` answers.

    Args:
        problem: one rank's step.
        time_limit_s: for each of the two searches.

    Raises:
        ConfigError: nothing keeps the target, or scipy is not installed.
    """
    problem.check()
    if not problem.demand_bytes.any():
        return Solution.of(problem, (), "exact")
    program = _Program(problem, time_limit_s)
    fewest = program.fewest_bytes()
    if fewest is None:
        return solve_greedy(problem)
    return Solution.of(problem, program.least_waiting(fewest) or fewest, "exact")


class _Program:
    """The rows of one problem as a matrix.

    Bytes are counted in their greatest common divisor, so that they are whole numbers, and small.
    """

    def __init__(self, problem: Problem, time_limit_s: float) -> None:
        try:
            self._optimize = import_module("scipy.optimize")
            self._sparse = import_module("scipy.sparse")
        except ImportError as error:
            raise ConfigError(
                "solving for a memory target needs scipy; install megatron-offload[plan]"
            ) from error
        self._time_limit_s = time_limit_s
        self._problem = problem
        self._items = [problem.items[position] for position in problem.movable]
        self._sizes = np.array([item.num_bytes for item in self._items], dtype=np.int64)
        self._unit = math.gcd(*self._sizes.tolist())
        live, wanted = self._rows()
        self._costs = (self._sizes // self._unit).astype(float)
        self._covers = (self._sparse.csr_array(live * self._costs), wanted, np.inf)

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which items are live in which demanding rows, and the demands in units.

        Rows one after the other in which the same items are live are one row.
        """
        demand = self._problem.demand_bytes
        rows = np.flatnonzero(demand)[:, None]
        first = np.array([item.first_row for item in self._items])
        end = np.array([item.end_row for item in self._items])
        live = (first <= rows) & (rows < end)
        is_new = np.append(True, (live[1:] != live[:-1]).any(axis=1))
        starts = np.flatnonzero(is_new)
        wanted = np.maximum.reduceat(demand[rows[:, 0]], starts)
        return live[starts], -(-wanted // self._unit).astype(float)

    def fewest_bytes(self) -> frozenset[int] | None:
        """Return a choice of the fewest bytes; None where the time is not enough."""
        found = self._search(self._costs, [self._covers], len(self._items), gap=0.0)
        return self._chosen(found)

    def least_waiting(self, fewest: frozenset[int]) -> frozenset[int] | None:
        """Return a choice that moves as many bytes as ``fewest``, with the least waiting."""
        num = len(self._items)
        problem = self._problem
        per_us = problem.link_gbps * 1e3 / self._unit
        room = max(problem.device_bytes / 2 / self._unit, self._costs.max())
        commits = np.array([item.committed_us for item in self._items])
        backwards = np.array([item.backward_us for item in self._items])
        # Unknowns: who moves, then of each queue its length behind every copy, and the waits.
        queues = [self._queue(commits, per_us), self._queue(-backwards, per_us)]
        none = self._sparse.csr_array((num, 2 * num))
        rows = self._sparse.vstack(
            [
                self._sparse.hstack([queues[0][0], queues[0][1], none]),
                self._sparse.hstack([queues[1][0], none, queues[1][1]]),
            ]
        )
        total = sum(problem.items[position].num_bytes for position in fewest) // self._unit
        pad = self._sparse.csr_array((self._covers[0].shape[0], 4 * num))
        constraints = [
            (self._sparse.hstack([self._covers[0], pad]), *self._covers[1:]),
            (rows, np.concatenate([queues[0][2], queues[1][2]]), np.inf),
            (np.append(self._costs, np.zeros(4 * num))[None, :], -np.inf, total),
        ]
        share = 2 * self._costs / (per_us * np.maximum(backwards - commits, 1e-9))
        wait = np.append(np.zeros(num), np.ones(num))
        costs = np.concatenate([_RISK_SHARE * share * self._costs, wait, wait])
        most = np.append(np.full(num, room), np.full(num, np.inf))
        found = self._search(
            costs, constraints, num, gap=_WAITING_GAP, most=np.concatenate([most, most])
        )
        chosen = self._chosen(found)
        if chosen is None or sum(problem.items[position].num_bytes for position in chosen) > sum(
            problem.items[position].num_bytes for position in fewest
        ):
            return None
        return chosen

    def _queue(self, at_us: np.ndarray, per_us: float) -> tuple[Any, Any, np.ndarray]:
        """Return the rows of one queue: length - the one before - own copy + wait >= -emptied."""
        num = len(at_us)
        order = np.argsort(at_us, kind="stable")
        place = np.arange(num)
        joins = self._sparse.csr_array((-self._costs[order], (place, order)), shape=(num, num))
        lengths = self._sparse.eye_array(num) - self._sparse.eye_array(num, k=-1)
        waits = self._sparse.eye_array(num)
        emptied = per_us * np.diff(at_us[order], prepend=at_us[order[:1]])
        return joins, self._sparse.hstack([lengths, waits]), -emptied

    def _search(
        self,
        costs: np.ndarray,
        constraints: Sequence[tuple[Any, Any, Any]],
        num_choices: int,
        *,
        gap: float,
        most: np.ndarray | None = None,
    ) -> np.ndarray | None:
        ones = np.ones(num_choices)
        upper = ones if most is None else np.append(ones, most)
        whole = np.zeros(len(costs))
        whole[:num_choices] = 1
        found = self._optimize.milp(
            costs,
            integrality=whole,
            bounds=self._optimize.Bounds(0, upper),
            constraints=[self._optimize.LinearConstraint(*each) for each in constraints],
            options={"time_limit": self._time_limit_s, "mip_rel_gap": gap},
        )
        return found.x if found.status == 0 else None

    def _chosen(self, found: np.ndarray | None) -> frozenset[int] | None:
        """Return the positions that a vector chooses; None where integers say that they fail."""
        if found is None:
            return None
        chosen = frozenset(
            position
            for position, value in zip(self._problem.movable, found, strict=False)
            if value > 0.5
        )
        keeps = self._problem.peak_bytes(chosen) <= self._problem.target_bytes
        return chosen if keeps else None

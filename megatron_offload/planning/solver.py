"""The choice of groups that moves the fewest bytes, by mixed-integer programming.

Two programs for HiGHS: the fewest bytes that keep the target, and among all choices of that many
bytes one whose copies keep the compute stream waiting least. Every answer is checked in integers
and moves no more than the quick choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import NamedTuple

import numpy as np

from megatron_offload.errors import require
from megatron_offload.planning.cover import Problem, Solution
from megatron_offload.planning.greedy import solve_greedy

TIME_LIMIT_S = 10.0

_MOST_UNITS = 2**14
"""Of the largest item. With numbers of ten digits HiGHS 1.15 ran far past its time limit."""

_FEWEST_NODES = 100
"""The most that the search for the fewest bytes branches. In the four profiles of the benchmark job
(160 items, 150 to 250 rows) what is found by then is within 1 % of the bound; small problems are
solved to their end."""

_WAITING_GAP = 0.05
"""Waiting within a twentieth of the least is as good: the times are estimates."""

_WAITING_SHARE = 2e-4
"""So is waiting for this share of what moves more than the least."""

_WAITING_NODES = 50
"""The most that the search for less waiting branches. On the benchmark job 20, 50 and 200 gave
plans of one step time and peak. A count, because a time would make plans differ by machine."""

_RISK_SHARE = 1e-3
"""A byte that fills the whole time between commit and backward with its copies counts as much as
this of a byte that is waited for."""


def solve(problem: Problem, *, time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """Return a choice that moves the fewest bytes, and of those one with the least waiting.

    Where the fewest can't be proven within ``time_limit_s`` for each of two searches, it is the
    best that was found, from `solve_greedy`'s on. Where bytes have no large common divisor, the
    fewest are so up to what rounding each demand costs: a ``1 / _MOST_UNITS`` of the largest item.

    Raises:
        ConfigError: nothing keeps the target, or highspy is not installed.
    """
    problem.check()
    if not problem.demand_bytes.any():
        return Solution.of(problem, (), "exact")
    # HiGHS takes another number of threads only where none of its programs has run before.
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(_solve, problem, time_limit_s).result()


def _solve(problem: Problem, time_limit_s: float) -> Solution:
    program = _Program(problem, time_limit_s)
    quick = solve_greedy(problem)
    fewest, is_proven = program.fewest_bytes(quick.moved)
    if fewest is None or quick.moved_bytes < problem.bytes_of(fewest):
        fewest = quick.moved
    moved = program.least_waiting(fewest) or fewest
    return Solution.of(problem, moved, "exact" if is_proven else "best found")


class _Entries(NamedTuple):
    """Numbers of a program, by row (0 is the first of those being added) and by unknown."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray


class _Program:
    """The rows of one problem for HiGHS: which items move, and how much is away in each row.

    Bytes are counted in their greatest common divisor, so that they are whole numbers, and small.
    Where they would not be small, which floating-point programs take badly, they are counted in a
    ``1 / _MOST_UNITS`` of the largest item, which a demand is rounded up to.
    """

    def __init__(self, problem: Problem, time_limit_s: float) -> None:
        require("highspy")
        highspy = import_module("highspy")
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._integer = highspy.HighsVarType.kInteger
        self._highs = highspy.Highs()
        self._highs.silent()
        self._highs.setOptionValue("threads", 1)  # ranks are planned for side by side
        self._highs.setOptionValue("time_limit", time_limit_s)
        self._problem = problem
        self._items = [problem.items[position] for position in problem.movable]
        sizes = np.array([item.num_bytes for item in self._items], dtype=np.int64)
        self._unit = max(math.gcd(*sizes.tolist()), int(sizes.max()) // _MOST_UNITS)
        self._sizes = sizes / self._unit
        self._moves = self._add_unknowns(self._sizes, 0.0, 1.0, is_whole=True)
        self._add_memory()

    def _add_memory(self) -> None:
        """Count what is away in each row that demands anything, and ask for the demand.

        What is away is an unknown of its own: an item then stands in two rows, and not in each that
        it is live in, and HiGHS is done far sooner. Rows with the same live items are one.
        """
        demand = self._problem.demand_bytes
        rows = np.flatnonzero(demand)[:, None]
        first = np.array([item.first_row for item in self._items])
        end = np.array([item.end_row for item in self._items])
        live = ((first <= rows) & (rows < end)).astype(np.int8)
        changes = np.diff(live, axis=0, prepend=np.zeros((1, len(self._items)), dtype=np.int8))
        starts = np.flatnonzero(changes.any(axis=1))
        wanted = np.ceil(np.maximum.reduceat(demand[rows[:, 0]], starts) / self._unit)
        wanted = np.minimum(wanted, live[starts] @ self._sizes)
        away = self._add_unknowns(np.zeros(len(starts)), wanted, np.inf)
        changing, items = np.nonzero(changes[starts])
        signs = changes[starts][changing, items]
        entries = [_each(away), _each(away[:-1], -1.0, first_row=1)]
        entries.append(_Entries(changing, self._moves[items], -signs * self._sizes[items]))
        self._add_rows(entries, np.zeros(len(starts)), 0.0)

    def fewest_bytes(self, quick: frozenset[int]) -> tuple[frozenset[int] | None, bool]:
        """Return the choice of the fewest bytes found, and whether none has fewer."""
        return self._search(quick, gap=0.0, most_nodes=_FEWEST_NODES)

    def least_waiting(self, fewest: frozenset[int]) -> frozenset[int] | None:
        """Return a choice that moves no more than ``fewest``, with the least waiting found, if any.

        The program is about waiting from here on.
        """
        fewest_bytes = self._problem.bytes_of(fewest)
        total = fewest_bytes / self._unit
        zeros = np.zeros_like(self._moves)
        self._add_rows([_Entries(zeros, self._moves, self._sizes)], np.array([-np.inf]), total)
        per_us = self._problem.link_gbps * 1e3 / self._unit
        commits = np.array([item.committed_us for item in self._items])
        backwards = np.array([item.backward_us for item in self._items])
        share = 2 * self._sizes / (per_us * np.maximum(backwards - commits, 1e-9))
        self._highs.changeColsCost(len(self._moves), self._moves, _RISK_SHARE * share * self._sizes)
        for times in (commits, -backwards):
            self._add_queue(times, per_us)
        self._highs.setOptionValue("mip_abs_gap", _WAITING_SHARE * total)
        chosen, _ = self._search(fewest, gap=_WAITING_GAP, most_nodes=_WAITING_NODES)
        if chosen is None or self._problem.bytes_of(chosen) > fewest_bytes:
            return None
        return chosen

    def _add_queue(self, at_us: np.ndarray, per_us: float) -> None:
        """Have copies join a queue at these times; what goes beyond its room costs its bytes.

        Its length behind each copy is at least the one before, less what was emptied or waited for,
        and the copy; and at least the copy.
        """
        order = np.argsort(at_us, kind="stable")
        emptied = per_us * np.diff(at_us[order], prepend=at_us[order[:1]])
        room = max(self._problem.device_bytes / 2 / self._unit, self._sizes.max())
        none = np.zeros(len(order))
        lengths = self._add_unknowns(none, 0.0, room)
        waits = self._add_unknowns(none + 1.0, 0.0, np.inf)
        joins = _Entries(np.arange(len(order)), self._moves[order], -self._sizes[order])
        before = _each(lengths[:-1], -1.0, first_row=1)
        self._add_rows([joins, _each(lengths), before, _each(waits)], -emptied, np.inf)
        self._add_rows([joins, _each(lengths)], none, np.inf)

    # HiGHS

    def _add_unknowns(
        self,
        costs: np.ndarray,
        lower: np.ndarray | float,
        upper: np.ndarray | float,
        *,
        is_whole: bool = False,
    ) -> np.ndarray:
        """Add as many unknowns as there are costs; return their columns."""
        number = len(costs)
        columns = self._highs.getNumCol() + np.arange(number, dtype=np.int32)
        self._highs.addVars(number, np.broadcast_to(lower, number), np.broadcast_to(upper, number))
        self._highs.changeColsCost(number, columns, costs)
        if is_whole:
            kinds = np.full(number, int(self._integer), dtype=np.uint8)
            self._highs.changeColsIntegrality(number, columns, kinds)
        return columns

    def _add_rows(self, entries: Sequence[_Entries], lower: np.ndarray, upper: float) -> None:
        """Add as many rows as there are lower bounds."""
        rows, columns, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        order = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[order], np.arange(len(lower))).astype(np.int32)
        self._highs.addRows(
            len(lower),
            lower,
            np.full(len(lower), upper),
            len(order),
            starts,
            columns[order].astype(np.int32),
            values[order].astype(float),
        )

    def _search(
        self, start: frozenset[int], *, gap: float, most_nodes: int
    ) -> tuple[frozenset[int] | None, bool]:
        """Return the positions that move, and whether this is the best choice.

        None where no choice was found in time, or integers say that it fails. ``gap`` above the
        least cost, as a share of it, is as good.
        """
        self._highs.setOptionValue("mip_rel_gap", gap)
        self._highs.setOptionValue("mip_max_nodes", most_nodes)
        moves = np.array([float(position in start) for position in self._problem.movable])
        self._highs.setSolution(len(self._moves), self._moves, moves)
        self._highs.run()
        if not self._highs.getSolution().value_valid:
            return None, False
        found = np.array(self._highs.getSolution().col_value)[self._moves]
        chosen = frozenset(
            position
            for position, value in zip(self._problem.movable, found, strict=True)
            if value > 0.5
        )
        if self._problem.peak_bytes(chosen) > self._problem.target_bytes:
            return None, False
        return chosen, self._highs.getModelStatus() == self._optimal


def _each(columns: np.ndarray, value: float = 1.0, *, first_row: int = 0) -> _Entries:
    """Return the same number once for each of these unknowns, one row behind the other."""
    rows = first_row + np.arange(len(columns))
    return _Entries(rows, columns, np.full(len(columns), value))

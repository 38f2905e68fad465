"""A choice of groups that moves few bytes, found in little time and with no library.

For intervals of one size, letting the one go that ends last whenever there are too many keeps the
most (Faigle and Nawijn, Discrete Applied Mathematics 58, 1995). For other sizes that is a start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, combinations

import numpy as np

from megatron_offload.planning.cover import Item, Problem, Solution

_MOST_LOOKS = 10_000
"""So often one improvement looks whether a group need not move, at most."""

_NOTHING_WANTED = 2**62
"""Slack of a row that demands nothing."""

# When a row is over by so many bytes, the item leaves for which this is least.
_LeavesFirst = Callable[[Item, int], tuple[int, ...]]
_RULES: tuple[_LeavesFirst, ...] = (
    lambda item, over_bytes: (-item.end_row, -item.num_bytes),
    lambda item, over_bytes: (item.num_bytes < over_bytes, abs(item.num_bytes - over_bytes)),
    lambda item, over_bytes: (item.num_bytes, -item.end_row),
)


def solve_greedy(problem: Problem) -> Solution:
    """Return a choice that keeps the target and moves few bytes; `ConfigError` where none does."""
    problem.check()
    if not problem.demand_bytes.any():
        return Solution.of(problem, (), "greedy")
    least_bytes = problem.demand_bytes.max()
    best: Solution | None = None
    for backwards in (False, True):
        for rule in _RULES:
            moved = _improve(problem, _sweep(problem, rule, backwards=backwards))
            found = Solution.of(problem, moved, "greedy")
            if best is None or found.moved_bytes < best.moved_bytes:
                best = found
            if best.moved_bytes == least_bytes:
                return best
    assert best is not None
    return best


def _sweep(problem: Problem, rule: _LeavesFirst, *, backwards: bool) -> set[int]:
    """Keep every group, row by row, and have some move wherever that is too much."""
    num_rows = len(problem.memory_bytes)
    demand = problem.demand_bytes
    room = np.where(
        demand > 0, problem.live_bytes(problem.movable) - demand, _NOTHING_WANTED
    ).tolist()
    items = {position: problem.items[position] for position in problem.movable}
    if backwards:
        room.reverse()
        items = {
            position: item._replace(
                first_row=num_rows - item.end_row, end_row=num_rows - item.first_row
            )
            for position, item in items.items()
        }
    begins: dict[int, list[int]] = defaultdict(list)
    for position, item in items.items():
        begins[item.first_row].append(position)
    moved: set[int] = set()
    live: dict[int, Item] = {}
    for row, room_bytes in enumerate(room):
        live = {position: item for position, item in live.items() if item.end_row > row}
        live.update((position, items[position]) for position in begins[row])
        over_bytes = sum(item.num_bytes for item in live.values()) - room_bytes
        while over_bytes > 0:
            leaves = min(live, key=lambda position: (rule(live[position], over_bytes), position))
            over_bytes -= live.pop(leaves).num_bytes
            moved.add(leaves)
    return moved


def _improve(problem: Problem, moved: set[int]) -> set[int]:
    """Bring in up to three groups for others that are larger together, while that finds any."""
    slack = np.where(
        problem.demand_bytes > 0, problem.live_bytes(moved) - problem.demand_bytes, _NOTHING_WANTED
    )
    by_size = sorted(problem.movable, key=lambda position: -problem.items[position].num_bytes)
    moved = moved - _dropped(
        problem, [position for position in by_size if position in moved], slack
    )
    num_looks, is_better = 0, True
    while is_better:
        is_better = False
        staying = [position for position in by_size if position not in moved]
        leaving = [position for position in by_size if position in moved]
        for incoming in chain.from_iterable(combinations(staying, num) for num in (1, 2, 3)):
            if num_looks > _MOST_LOOKS:
                return moved
            num_looks += len(leaving)
            is_better = _exchange(problem, moved, slack, incoming, leaving)
            if is_better:
                break
    return moved


def _exchange(
    problem: Problem,
    moved: set[int],
    slack: np.ndarray,
    incoming: tuple[int, ...],
    leaving: list[int],
) -> bool:
    """Let groups move, and others stay for them; change nothing unless fewer bytes move."""
    items = [problem.items[position] for position in incoming]
    tried = slack.copy()
    for item in items:
        tried[item.first_row : item.end_row] += item.num_bytes
    first = min(item.first_row for item in items)
    end = max(item.end_row for item in items)
    near = [
        p for p in leaving if problem.items[p].first_row < end and problem.items[p].end_row > first
    ]
    dropped = _dropped(problem, near, tried)
    if problem.bytes_of(dropped) <= problem.bytes_of(incoming):
        return False
    moved.update(incoming)
    moved -= dropped
    slack[:] = tried
    return True


def _dropped(problem: Problem, moving: Sequence[int], slack: np.ndarray) -> set[int]:
    """Return which of these need not move, taken in this order; their bytes leave the slack."""
    dropped = set()
    for position in moving:
        num_bytes, first, end, *_ = problem.items[position]
        rows = slack[first:end]
        if rows.min() >= num_bytes:
            rows -= num_bytes
            dropped.add(position)
    return dropped

"""The plans of a described job that are simulated.

First those that a person would write (`planning.alternatives`), then plans at levels of memory. For
a level each pipeline rank has the first plan of a frontier that fits; a `Family` says which units
run again in all layers, and how much of the link copies shall take. Which family is simulated next
is what promises most by a count of compute and copies. In the end single layers do something else.
All that doesn't depend on what is asked. `Search.narrowed` looks between two neighbours of a
frontier, and each plan that it finds there is a neighbour of both.

The same job gives the same plans: no clock and no chance is in it.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product

from megatron_offload.core.row_config import UNITS, RowConfig
from megatron_offload.planning.alternatives import alternatives
from megatron_offload.planning.frontier import Action, Part, Plan, total
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.job_judge import NOTHING, Counted, Family, Judge, Judged, Ranks
from megatron_offload.planning.job_rows import units_of
from megatron_offload.planning.simulate import Simulation

_LINK_SHARES = (1.0, 0.6, 0.0, 1.6, 0.3, 3.0, 0.8, 1.25, 0.45, 2.2)
_NUM_LEVELS = 24
_SMALL_US = 32_000  # a simulation of a job of which single layers are changed, for as much work
_SMALL_WORK = 1.5
_MOST_WORK_US = 3.2e6  # as `Judge` counts it, of one core
_NARROWED = 0.5  # as much again, to narrow down what is asked
_WRITTEN = 0.5  # of the work for what a person would write, which counts
_SEARCHED = 0.6  # of the work at levels, the rest by single layers that do something else
_LEAST_HOPE = 0.02  # of what a step costs with 1 % more
_FILLED = 0.04  # of the work, between two plans
_NUM_HALVES = 4
_MOST_TRIED = 2  # families at each of them


class Search(Judge):
    """Simulates plans of one job.

    Args:
        levels: of memory, for which plans are made besides.

    Attributes:
        judged: all that was simulated; first nothing.
        alternatives: those of them that a person would write, in words.
    """

    def __init__(
        self,
        job: Job,
        bare: Simulation,
        settings: RankSettings,
        offsets: Sequence[int],
        levels: Sequence[int] = (),
    ) -> None:
        super().__init__(job, bare, settings, offsets)
        units = tuple(unit for unit in units_of(job) if unit in self._may)
        sets = dict.fromkeys(((), units, *((unit,) for unit in units)))
        self._families = [Family(own, share) for share, own in product(_LINK_SHARES, sets)]
        self._losses = list[Counted]()
        self._is_small = self._simulation_us < _SMALL_US
        self._most_us = _MOST_WORK_US * (_SMALL_WORK if self._is_small else 1)
        fullest = max(self._ranks, key=self._bare_bytes)
        busiest = max(self._ranks, key=lambda rank: self.layers(rank, ()).counted_us(NOTHING, 1.0))
        self._counted_ranks = {fullest, busiest}
        rows = alternatives(job, settings)
        self.alternatives = {what: self._judge(self._written(own)) for what, own in rows}
        self._work_us *= _WRITTEN
        self._at_levels(levels)
        self._fill_all()
        self.judged = [*self._found.values()]
        self._known = self._found, self._steps, self._errors, self._losses
        self._found, self._steps = self._found.copy(), self._steps.copy()

    def narrowed(
        self,
        more: Judged,
        less: Judged,
        took: Callable[[Judged], float],
        fits: Callable[[Judged], bool],
        may: Callable[[Judged], bool],
    ) -> tuple[Judged, Judged]:
        """Return neighbours that are nearer to each other than two of a frontier.

        The first needs more memory and takes less time than the second. In between a plan is looked
        for at half the memory, on that side of it again which ``fits`` says, and so on. What is
        found before depends on nothing but the two; so what another question finds is in order.

        Args:
            more: what needs more memory.
            less: what takes more time.
            took: the time.
            fits: whether what is asked lies between this and ``less``.
            may: whether a plan may be taken.
        """
        found, steps, errors, losses = self._known
        self._found, self._steps = found.copy(), steps.copy()
        self._errors, self._losses = errors.copy(), losses.copy()
        self._work_us = 0.0
        share = _NARROWED if self._is_small else _NARROWED / 2
        for number in range(1, _NUM_HALVES + 1):
            self._fill(more, less, took, share * number / _NUM_HALVES)
            inside = [
                one
                for one in self._found.values()
                if less.num_bytes <= one.num_bytes < more.num_bytes
                if took(more) <= took(one) < took(less) and may(one)
            ]
            if inside:
                one = min(inside, key=lambda one: (took(one), one.num_bytes))
                more, less = (one, less) if fits(one) else (more, one)
        return more, less

    def _fill(
        self, more: Judged, less: Judged, took: Callable[[Judged], float], share: float
    ) -> None:
        """Simulate plans about two neighbours of a frontier, until so much work is done."""
        level, left = (more.num_bytes + less.num_bytes) // 2, [*self._families]
        for _ in range(_MOST_TRIED):
            if self._has_time(share):
                self._try_level({level: left}, 1.0)
        for may_copy in (False, True):
            self._lessen(more, less.num_bytes, share, may_copy)
        self._other_shares(more, level, took, share)
        small = [x for x in self._found.values() if x.num_bytes < more.num_bytes]
        polished = self._polished(min(small, key=took), more.num_bytes - 1, took)
        while self._has_time(share) and next(polished, self) is None:
            pass

    def _lessen(self, one: Judged, level: int, share: float, may_copy: bool) -> None:
        """Let layers of the fullest rank free more, each time for least, down to a level."""
        while one.num_bytes > level and self._has_time(share):
            family, plans = one.ranks
            rank = self._fullest(plans)
            now = plans[rank].actions
            moves = [
                (freed_bytes / max(1e-3, action.us - now[number].us), number, action)
                for number, own in self._actions(rank, family.units).items()
                for action in own
                if may_copy or action.copied_bytes <= now[number].copied_bytes
                if (freed_bytes := action.freed_bytes - now[number].freed_bytes) > 0
            ]
            _, number, action = max(moves, default=(0.0, 0, None), key=lambda move: move[0])
            other = (
                self._with(one, rank, {**now, number: action}, self._need(rank, plans[rank]))
                if action
                else one
            )
            if other is one:
                break
            one = other

    def _other_shares(
        self, one: Judged, level: int, took: Callable[[Judged], float], share: float
    ) -> None:
        """Let ranks, from the fullest on, have plans that copy another share, down to a level."""
        while one.num_bytes > level and self._has_time(share):
            family, plans = one.ranks
            rank = self._fullest(plans)
            fitting = [self._fitting(rank, family._replace(share=x), level) for x in _LINK_SHARES]
            good = [x for x in fitting if self._need(rank, x) <= level]
            others = [
                self._judge(Ranks(family, (*plans[:rank], plan, *plans[rank + 1 :])))
                for plan in good
                if self._has_time(share)
            ]
            if not others:
                break
            one = min(others, key=took)

    # What is simulated

    def _written(self, rows: Sequence[RowConfig]) -> Ranks:
        """Return what rows say, in the actions of layers."""
        units = tuple(row.site for row in rows if row.site in UNITS)
        plans = []
        for rank in self._ranks:
            taken = dict[int, Action]()
            for number, actions in self._actions(rank, units).items():
                parts: list[Part] = [
                    (row.site, "recompute" if row.recompute else "all")
                    for row in rows
                    if row.site not in units and row.has_layer(number)
                ]
                own = (x for x in actions if {*parts} <= {*x.parts})
                taken[number] = next(own, Action((*actions[0].parts, *parts)))
            plans.append(Plan(taken, *total(taken.values())[1:]))
        return Ranks(Family(units, 1.0), tuple(plans))

    def _at_levels(self, more: Sequence[int]) -> None:
        """Simulate plans at levels of memory, of each level once, then twice, while it promises."""
        bare, fullest = max((self._bare_bytes(rank), rank) for rank in self._ranks)
        last = (self._predicted(fullest, x, self.plans(fullest, x)[-1]) for x in self._families)
        step = (bare - min(last)) // _NUM_LEVELS
        self._near_bytes = step // 2
        self._levels = [x for x in (*more, self._job.machine.device_bytes) if x < bare]
        self._levels += [bare - number * step for number in range(1, _NUM_LEVELS + 1)]
        left = {level: [*self._families] for level in self._levels}
        there = self._job.machine.device_bytes
        for _ in range(_MOST_TRIED if there in left else 0):
            self._try_level({there: left[there]}, 1.0)  # what is asked first, where not all fits
        for trust, most_tried in product((1.0, 0.0), range(1, len(self._families) + 1)):
            least_left = len(self._families) - most_tried
            some = {level: own for level, own in left.items() if len(own) > least_left}
            while self._has_time(_SEARCHED if self._is_small else 1.0):
                level = self._try_level(some, trust)
                if level is None:
                    break
                some.pop(level)

    def _try_level(self, levels: Mapping[int, list[Family]], trust: float) -> int | None:
        """Simulate what promises most at levels, and take it from what is left; return where.

        It may promise nothing. With ``trust`` it is taken to lose as much as what was simulated
        with as full a link.
        """
        best, found = _LEAST_HOPE, None
        for level, families in levels.items():
            there = [x for x in self._found.values() if x.num_bytes <= level]
            now = min((x.percent for x in there), default=1e3)
            now_slow = min((x.slow_percent for x in there), default=1e3)
            for family in families if now_slow > 0 else ():
                counted = self._counted(self._counted_ranks, family, level)
                hopes = (
                    (took - one.percent - trust * self._loss(one.load)) / (took + 1)
                    for took, one in zip((now, now_slow), counted, strict=False)
                )
                hope = max(hopes, default=0.0)
                if hope > best:
                    best, found = hope, (level, family, counted)
        if found is None:
            return None
        level, family, counted = found
        levels[level].remove(family)
        plans = [self._fitting(rank, family, level) for rank in self._ranks]
        one = self._judge(Ranks(family, tuple(plans)))
        for took, own in zip((one.percent, one.slow_percent), counted, strict=True):
            if took < math.inf:
                insort(self._losses, Counted(own.load, took - own.percent))
        return level

    def _loss(self, load: float) -> float:
        """Return what was lost with the fullest link that was no fuller, in percent."""
        place = bisect_right(self._losses, load, key=lambda one: one.load)
        return self._losses[place - 1].percent if place else 0.0

    def _fill_all(self) -> None:
        """Look for plans between neighbours of the frontier, first where least is known.

        Most is looked for where the device's memory ends.
        """
        there = self._job.machine.device_bytes
        filled = set[tuple[int, int]]()
        least = max(_FILLED, 6 * self._simulation_us / self._most_us)
        while self._has_time():
            edge = frontier_of(self._found.values(), lambda x: x.percent)
            pairs = [x for x in pairwise(edge) if (id(x[0]), id(x[1])) not in filled]
            if not pairs:
                break
            ends = [x for x in pairs if x[1].num_bytes <= there < x[0].num_bytes]
            is_end = bool(ends) and len(filled) < _NUM_HALVES
            more, less = ends[0] if is_end else max(pairs, key=_hole)
            filled.add((id(more), id(less)))
            share = self._work_us / self._most_us + (3 if is_end else 1) * least
            self._fill(more, less, lambda x: x.percent, min(1.0, share))

    def _polished(
        self, best: Judged, level: int, took: Callable[[Judged], float]
    ) -> Iterator[None]:
        """Look for quicker plans that keep to a level, and yield after each that is made."""
        last = None
        while best is not last:
            last = best
            for rank, change in self._changes(best.ranks.family.units):
                now = best.ranks.plans[rank].actions
                after = {x: now[y] if isinstance(y, int) else y for x, y in change.items()}
                done = total(after.values()), total([now[x] for x in after])
                is_quicker = len(change) > 1 or done[0].us < done[1].us
                least = done[1].freed_bytes - level + best.num_bytes
                if is_quicker and done[0].freed_bytes >= least:
                    other = self._with(best, rank, {**now, **after}, level)
                    best = min(best, other, key=took)
                    yield

    def _with(self, best: Judged, rank: int, actions: Mapping[int, Action], level: int) -> Judged:
        """Return the same with other actions of a rank, if that keeps to a level."""
        family, plans = best.ranks
        plan = Plan(actions, *total(actions.values())[1:])
        if self._need(rank, plan) > level:
            return best
        return self._judge(Ranks(family, (*plans[:rank], plan, *plans[rank + 1 :])))

    def _changes(self, units: tuple[str, ...]) -> Iterator[tuple[int, dict[int, Action | int]]]:
        """Yield a rank and what some of its layers could do, or whose part they could take."""
        for rank in self._ranks:
            for number, own in self._actions(rank, units).items():
                for one in own:
                    yield rank, {number: one}
        for rank in self._ranks:
            actions = self._actions(rank, units)
            for x, y in combinations(actions, 2):
                if actions[x] == actions[y]:
                    yield rank, {x: y, y: x}

    def _need(self, rank: int, plan: Plan) -> int:
        return self.peak(rank, plan) - self._offsets[rank]

    def _fullest(self, plans: Sequence[Plan]) -> int:
        return max(self._ranks, key=lambda rank: self._need(rank, plans[rank]))

    def _has_time(self, share: float = 1.0) -> bool:
        return self._work_us < share * self._most_us


def frontier_of(found: Iterable[Judged], took: Callable[[Judged], float]) -> list[Judged]:
    """Return those that are better than all others in memory or time, from most memory on."""
    best = list[Judged]()
    for one in sorted(found, key=lambda x: (x.num_bytes, took(x), x.copied_bytes)):
        if not best or took(one) < took(best[-1]):
            best.append(one)
    return best[::-1]


def _hole(pair: tuple[Judged, Judged]) -> float:
    """Return how much lies between two neighbours of a frontier; short times count more."""
    more, less = pair
    return (more.num_bytes - less.num_bytes) * (less.percent - more.percent) / (1 + more.percent)

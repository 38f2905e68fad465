"""The plans of a described job that are simulated.

First those that a person would write (`alternatives`) and the one that frees most, then,
again and again, some between two neighbours of the frontier: where the device's memory ends, and
where the largest gap is. At a level of memory each pipeline rank has the first plan of a frontier
that fits; a `Family` says which units run again in all layers, and how much of the link copies
shall take. Those are simulated that promise most by a count of compute and copies. Then layers of
ranks that need too much free more, and in the end single layers do something else. All that
doesn't depend on what is asked. `Search.narrowed` looks between two neighbours of a frontier, and
what it finds there is a neighbour of both.

The same job gives the same plans: no clock and no chance is in it.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from operator import attrgetter

from megatron_offload.core.row_config import UNITS, RowConfig
from megatron_offload.planning.frontier import Action, Part, Plan, frontier
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.job_judge import SLOW_LINK_SHARE, Family, Judge, Judged
from megatron_offload.planning.job_rows import alternatives, units_of
from megatron_offload.planning.simulate import Simulation

_LINK_SHARES = (1.0, 0.6, 0.0, 1.6, 0.3, 3.0, 0.8, 1.25, 0.45, 2.2)
_ANY_SHARE = 10.0  # of the link: what copies take doesn't matter
_MOST_WORK_US = 4.8e6  # as `Judge` counts it, of one core
_WRITTEN = 0.4  # of the work for what a person would write, which counts
_NARROWED = 0.1, 0.2, 0.3  # as much again in all, by rounds that narrow down what is asked
_POLISHED = 0.02  # of it, at a time
_PLACES = 0.5, 0.25, 0.75  # of a gap, where plans are made
_NUM_COARSE = 32  # plans, from which on all of a frontier count
_WAYS = "anew", "reruns", "copies"
"""To make them: of a promising family, or by layers of the one that needs more that free more,
without copies and with."""
_NARROW_WAYS = "anew", "next", *_WAYS[1:], "single"
"""Likewise for what is asked: of the next family, too, or by single layers that do otherwise."""
_MOST_FILLED = 36  # plans in a gap
_LITTLE = 0.5  # percent: below, gaps count as much
_LESS_HOPE = 0.7  # times that, for each

percent_of: Callable[[Judged], float] = attrgetter("percent")
"""What a step takes longer."""


class Search(Judge):
    """Simulates plans of one job.

    Attributes:
        judged: all that was simulated and keeps to the host's memory; first nothing.
        alternatives: those that a person would write, in words, whatever they need.
    """

    def __init__(
        self, job: Job, bare: Simulation, settings: RankSettings, offsets: Sequence[int]
    ) -> None:
        super().__init__(job, bare, settings, offsets)
        units = tuple(unit for unit in units_of(job) if unit in self._may)
        sets = dict.fromkeys(((), units, *((unit,) for unit in units)))
        self._families = [Family(own, share) for share, own in product(_LINK_SHARES, sets)]
        self._losses = list[tuple[float, float]]()  # of loads
        rows = alternatives(job, settings)
        self.alternatives = {what: self._written(own) for what, own in rows}
        self._work_us *= _WRITTEN
        fullest = max(self._ranks, key=self._bare_bytes)
        freeing = (x for x in self._families if x.share == max(_LINK_SHARES))
        most = min(freeing, key=lambda x: self._predicted(fullest, x, self.plans(fullest, x)[-1]))
        self._judge(most, (self.plans(rank, most)[-1] for rank in self._ranks))
        self._fill_gaps(self._allowed, percent_of, _WAYS, 1.0)
        self.judged = self._allowed()
        names = ("_found", "_steps", "_errors", "_losses")
        self._known = {name: getattr(self, name) for name in names}

    def narrowed(
        self,
        more: Judged,
        less: Judged,
        took: Callable[[Judged], float],
        keeps: Callable[[Judged], bool],
    ) -> tuple[Judged, Judged]:
        """Return neighbours that are nearer to each other than two of a frontier.

        The first needs more memory and ``took`` less time than the second; one of them ``keeps``
        what is asked. What is found before depends on nothing but the two, and lies between them;
        so what another question finds is in order.
        """
        vars(self).update({name: value.copy() for name, value in self._known.items()})
        self._work_us, is_kept = 0.0, keeps(more)
        for share in _NARROWED:
            between = partial(self._between, more, less, took)
            self._fill_gaps(between, took, _NARROW_WAYS, share)
            edge = frontier_of(between(), took)
            place = [keeps(one) for one in edge].count(is_kept)
            more, less = edge[max(place, 1) - 1], edge[min(place, len(edge) - 1)]
            if more is less:
                break
        return more, less

    def _between(self, more: Judged, less: Judged, took: Callable[[Judged], float]) -> list[Judged]:
        """Return two plans, and those between them than which none that is written is better."""
        written = self.alternatives.values()
        some = (x for x in self._allowed() if less.num_bytes <= x.num_bytes < more.num_bytes)
        fine = (x for x in some if not any(is_better(other, x) for other in written))
        return [more, less, *(one for one in fine if took(more) <= took(one) < took(less))]

    def _allowed(self) -> list[Judged]:
        return [one for one in self._found.values() if one.host_bytes <= self._host_bytes]

    def _fill_gaps(
        self,
        found: Callable[[], list[Judged]],
        took: Callable[[Judged], float],
        ways: Sequence[str],
        share: float,
    ) -> None:
        """Simulate plans between neighbours of a frontier until so much work is done.

        First that is where the device's memory ends, then where the gap is largest; between
        corners of the frontier alone while few are known.
        """
        there, num_filled = self._job.machine.device_bytes, Counter[tuple[int, int]]()

        def hope(pair: tuple[Judged, Judged]) -> float:
            more, less = map(took, pair)
            gap = (pair[0].num_bytes - pair[1].num_bytes) * (less - more) / (_LITTLE + more)
            return gap * _LESS_HOPE ** num_filled[_ids(pair)]

        while self._work_us < share * _MOST_WORK_US:
            edge = frontier_of(found(), took)
            edge = lowest(edge, took) if len(self._found) < _NUM_COARSE else edge
            pairs = [pair for pair in pairwise(edge) if num_filled[_ids(pair)] < _MOST_FILLED]
            if not pairs:
                break
            at_end = [x for x in pairs if x[1].num_bytes <= there < x[0].num_bytes]
            pair = max(at_end if num_filled.total() < len(ways) and at_end else pairs, key=hope)
            times, way = divmod(num_filled[_ids(pair)], len(ways))
            self._fill(*pair, times, ways[way])
            num_filled[_ids(pair)] += 1

    def _fill(self, more: Judged, less: Judged, times: int, way: str) -> None:
        """Simulate a plan between two others."""
        gap_bytes = more.num_bytes - less.num_bytes
        level = less.num_bytes + int(gap_bytes * _PLACES[times % len(_PLACES)])
        there = self._job.machine.device_bytes
        if not times and less.num_bytes <= there < more.num_bytes:
            level = there
        self._near_bytes = gap_bytes // 8
        units, plans = more.family.units, more.plans
        if way in ("anew", "next"):
            number = 2 * times + (way == "next")
            for family, (load, percent) in self._promising(level)[number:][:1]:
                fitting = (
                    self._fitting(x, family, level, self.plans(x, family)) for x in self._ranks
                )
                one = self._judge(family, fitting)
                insort(self._losses, (load, one.percent - percent))
        elif way == "single":
            self._polish(level if times % 2 else more.num_bytes - 1)
        else:
            family = Family(units, _ANY_SHARE if way == "copies" else 0.0)
            freeing = list[Plan]()
            for rank, plan in enumerate(plans):
                own = self._actions(rank, units)
                choices = {x: (now, *own[x]) for x, now in plan.actions.items()}
                link = self.layers(rank, units).link_bytes(SLOW_LINK_SHARE * family.share)
                freeing.append(self._fitting(rank, family, level, frontier([choices], link)))
            self._judge(family, freeing)

    def _polish(self, level: int) -> None:
        """Let single layers of the quickest plan that fits a level do what is quicker."""
        best, last = min((x for x in self._allowed() if x.num_bytes <= level), key=percent_of), None
        most_work_us, family = self._work_us + _POLISHED * _MOST_WORK_US, best.family
        changes = [
            (rank, number, action)
            for rank in self._ranks
            for number, own in self._actions(rank, family.units).items()
            for action in own
        ]
        while best is not last:
            last = best
            for rank, number, action in changes:
                plans = best.plans
                now, plan = plans[rank], Plan.of({**plans[rank].actions, number: action})
                least_bytes = now.freed_bytes + best.num_bytes - level
                if plan.us >= now.us or plan.freed_bytes < least_bytes:
                    continue
                if self._replayed(rank, plan).peak_reserved_bytes - self._offsets[rank] <= level:
                    one = self._judge(family, (*plans[:rank], plan, *plans[rank + 1 :]))
                    if one.host_bytes <= self._host_bytes:
                        best = min(best, one, key=percent_of)
                if self._work_us >= most_work_us:
                    return

    def _promising(self, level: int) -> list[tuple[Family, tuple[float, float]]]:
        """Return the families that promise most at a level, and what is counted of them.

        They are taken to lose as much as what was simulated with the fullest link that was no
        fuller.
        """

        def hope(pair: tuple[Family, tuple[float, float]]) -> tuple[float, float]:
            load, percent = pair[1]
            place = bisect_right(self._losses, (load, math.inf))
            return percent + (self._losses[place - 1][1] if place else 0.0), load

        pairs = ((family, self._counted(family, level)) for family in self._families)
        return sorted(((family, x) for family, x in pairs if x is not None), key=hope)

    def _written(self, rows: Sequence[RowConfig]) -> Judged:
        """Return what rows do, in the actions of layers."""
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
            plans.append(Plan.of(taken))
        return self._judge(Family(units, 1.0), plans)


def frontier_of(found: Iterable[Judged], took: Callable[[Judged], float]) -> list[Judged]:
    """Return those that are better than all others in memory or time, from most memory on."""
    best = list[Judged]()
    for one in sorted(found, key=lambda x: (x.num_bytes, took(x), x.copied_bytes)):
        if not best or took(one) < took(best[-1]):
            best.append(one)
    return best[::-1]


def lowest(edge: Sequence[Judged], took: Callable[[Judged], float]) -> list[Judged]:
    """Return the corners of a frontier: none lies above a line between two others."""

    def slope(more: Judged, less: Judged) -> float:
        return (took(less) - took(more)) / (more.num_bytes - less.num_bytes)

    corners = list[Judged]()
    for one in edge:
        while len(corners) > 1 and slope(*corners[-2:]) >= slope(corners[-2], one):
            corners.pop()
        corners.append(one)
    return corners


def is_better(one: Judged, other: Judged) -> bool:
    """Whether one needs no more and takes no longer, and differs in one of both."""
    pairs = (one.num_bytes, one.percent), (other.num_bytes, other.percent)
    return pairs[0] != pairs[1] and all(x <= y for x, y in zip(*pairs, strict=True))


def _ids(pair: tuple[Judged, Judged]) -> tuple[int, int]:
    return id(pair[0]), id(pair[1])

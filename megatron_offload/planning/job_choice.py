"""Which rows a described job gets: one frontier of simulated plans answers all questions.

What is simulated doesn't depend on what is asked (`planning.job_search`), so a looser limit never
gives a worse plan, and no plan that a person would write is better than the one that is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, NoReturn

from megatron_offload.core.row_config import RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import TargetError
from megatron_offload.planning.found import FoundPlan, FoundStage, RunFrontier
from megatron_offload.planning.job import UNLIMITED, Job, RankSettings
from megatron_offload.planning.job_judge import SLOW_LINK_SHARE, Judged
from megatron_offload.planning.job_search import Search, frontier_of, is_better, lowest, percent_of
from megatron_offload.planning.simulate import Simulation, simulate

_MOST_OTHERS = 20  # plans besides the chosen one


class Planned(NamedTuple):
    """Rows of a job, and the step with them."""

    found: RunFrontier
    rows: tuple[RowConfig, ...]
    step: Simulation
    slow_link: Mapping[str, float]
    """Where a limit of time was asked, what each alternative takes longer with a slower link."""


class MissedTargetError(TargetError):
    """No plan keeps the targets.

    Attributes:
        step: with the plan that needs least.
    """

    def __init__(self, text: str, step: Simulation) -> None:
        super().__init__(text)
        self.step = step


class JobChoice:
    """Finds rows for a described job.

    Args:
        job: the step.
        settings: what a user has set.

    Attributes:
        without: the step without offload.
    """

    def __init__(self, job: Job, settings: RankSettings = UNLIMITED) -> None:
        self._job, self._settings = job, settings
        self.without = simulate(job)
        self._searches = dict[tuple[int, ...], Search]()

    @property
    def alternatives(self) -> Mapping[str, Simulation]:
        """What a person would do, in words, and the step with it; the first is nothing."""
        found = self._search([0] * len(self.without.ranks)).alternatives
        return {what: one.step for what, one in found.items()}

    def under(self, targets: Sequence[int]) -> Planned:
        """Return the quickest plan found that keeps each rank within its target.

        Of those that are as quick it is the one that needs least; nothing is done where that fits.

        Raises:
            MissedTargetError: one can't be kept.
        """
        search, target = self._search(targets), min(targets)
        edge = frontier_of(search.judged, percent_of)
        place = next((x for x, one in enumerate(edge) if one.num_bytes <= target), None)
        if place is None:
            self._refuse(search, edge[-1], targets)
        chosen = edge[place]
        if search.judged[0].num_bytes <= target:
            chosen = search.judged[0]
        elif place:
            pairs = pairwise(lowest(edge, percent_of))
            more, less = next(pair for pair in pairs if pair[1].num_bytes <= target)
            _, one = search.narrowed(more, less, percent_of, lambda x: x.num_bytes <= target)
            chosen = min(chosen, one, key=percent_of)
        return self._planned(search, chosen, "the memory of each rank")

    def within(self, most_slowdown_percent: float) -> Planned:
        """Return the plan found with the least memory that costs no more time, with a slower link.

        What counts is the rank that needs most. Plans than which one that a person would write is
        better are left out; such a one may cost something with a slower link if it costs nothing.
        """
        search = self._search([0] * len(self.without.ranks))
        took = partial(_slow_percent, search)

        def keeps(one: Judged) -> bool:
            return one.percent <= most_slowdown_percent and took(one) <= most_slowdown_percent

        some = sorted(search.judged, key=lambda one: (one.num_bytes, one.percent))
        written = search.alternatives.values()
        fine = (one for one in some if not any(is_better(other, one) for other in written))
        chosen = next(filter(keeps, fine))
        edge = [search.judged[0], *frontier_of(search.judged, percent_of)]
        place = next(x for x in reversed(range(len(edge))) if keeps(edge[x]))
        if place + 1 < len(edge):
            one, _ = search.narrowed(edge[place], edge[place + 1], took, keeps)
            chosen = min(one, chosen, key=lambda one: one.num_bytes)
        text = f"at most {most_slowdown_percent:g} % of the step's time"
        text += f", with {SLOW_LINK_SHARE:g} of the bandwidth to the host, too"
        slow = {what: search.slow_percent(one) for what, one in search.alternatives.items()}
        return self._planned(search, chosen, text)._replace(slow_link=slow)

    def _search(self, targets: Sequence[int]) -> Search:
        """Return what was simulated for targets that differ as these do."""
        offsets = tuple(target - min(targets) for target in targets)
        if offsets not in self._searches:
            self._searches[offsets] = Search(self._job, self.without, self._settings, offsets)
        return self._searches[offsets]

    def _planned(self, search: Search, chosen: Judged, what: str) -> Planned:
        """Return the rows, among other plans of the frontier, each of which needs less."""
        edge = frontier_of(search.judged, percent_of)
        some = [*edge[:: -(-len(edge) // _MOST_OTHERS)], edge[-1]]
        others = {one.num_bytes: one for one in some if not is_better(chosen, one)}
        others[search.judged[0].num_bytes] = search.judged[0]
        each = sorted((others | {chosen.num_bytes: chosen}).items(), reverse=True)
        bare_bytes = search.judged[0].num_bytes
        plans = [
            FoundPlan(
                rows=one.rows(),
                freed_bytes=max(0, bare_bytes - num_bytes),
                predicted_percent=100 * (one.step.step_us / self.without.step_us - 1),
                slow_link_percent=_slow_percent(search, one),
                reserved_bytes=num_bytes,
            )
            for num_bytes, one in each
        ]
        ranks = range(len(self.without.ranks))
        stage = FoundStage(
            name="-".join(map(str, sorted({ranks[0], ranks[-1]}))),
            bare_bytes=bare_bytes,
            plans=tuple(plans),
            followed=[one for _, one in each].index(chosen),
        )
        said = f"rows of a described job, chosen by simulation for {what}"
        found = RunFrontier(said=said, stages=(stage,))
        return Planned(found, found.rows(), chosen.step, {})

    def _refuse(self, search: Search, least: Judged, targets: Sequence[int]) -> NoReturn:
        """Say by how much the plan misses that needs least."""
        sizes = [rank.peak_reserved_bytes for rank in least.step.ranks]
        pairs = zip(sizes, targets, strict=True)
        _, rank = max((size - target, rank) for rank, (size, target) in enumerate(pairs))
        size, target = sizes[rank], targets[rank]
        words = (format_bytes(x, 2) for x in (target, size, size - target))
        text = (
            "pipeline rank {} can't be brought under {}: with what needs least it still "
            "takes {}, {} more".format(rank, *words)
        )
        if any(one.num_bytes < least.num_bytes for one in search.alternatives.values()):
            text += ", as a node's host has no more memory (machine.host_bytes)"
        raise MissedTargetError(text, least.step)


def _slow_percent(search: Search, one: Judged) -> float:
    """Return what a plan takes longer, with a slower link too; nothing if written and free."""
    is_free = one.percent <= 0 and any(one is other for other in search.alternatives.values())
    return 0.0 if is_free else max(one.percent, search.slow_percent(one))

"""A plan's distances, corrected on each rank by its next steps.

Owns what is done with the manager for that. Must not know which changes are tried, how ranks talk,
nor how the plan was made.

Each rank corrects its own distances, for its own reasons, and no bit depends on them. Only at the
end, which is at the same step on all ranks, do they tell each other what they have found.

Both distances together never exceed those of the plan. But a plan may have been made for more than
a rank should reserve, because it was seen to reserve less; so where there is a target, a change
after which it is missed is taken back, whatever else it brought.

Invariant: no distances stay that have missed a target which those before them kept.
Read next: `megatron_offload.planning.adapt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megatron_offload.backends.base import Wait
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.step_memory import WeighedStep, can_weigh, weigh_step
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.planning.adapt import Adaptation, Distances, Seen
from megatron_offload.planning.plan import OffloadPlan, with_distances

__all__ = ["DistanceCheck", "PlanCorrection"]


class PlanCorrection:
    """Corrects the distances in force, one step at a time.

        while not correction.is_over:
            with correction.step():
                train_step()  # up to and with the manager's reset

    Args:
        manager: follows a plan; nothing else may set its limits meanwhile.
        num_steps: to look at. The first step that is taken counts on top: what it shows is how the
            plan's host memory gets pinned.
        target_bytes: most that this process should reserve; None for any, and where nobody can
            tell.
    """

    def __init__(
        self, manager: PipelineOffloadManager, num_steps: int, target_bytes: int | None = None
    ) -> None:
        budget = manager.budget
        distances = Distances(budget.max_inflight_bytes, budget.prefetch_bytes)
        largest_bytes, most_bytes = budget.bounds_bytes()[0] // 2, sum(distances)
        self._manager = manager
        self._search = Adaptation(distances, min(largest_bytes, most_bytes // 2), most_bytes)
        self._target_bytes = target_bytes if can_weigh(manager) else None
        self._num_steps_left = 1 + num_steps if num_steps else 0
        self._is_first = True

    @property
    def is_over(self) -> bool:
        """Whether all steps were taken, and the best distances that they showed are in force."""
        return self._num_steps_left == 0

    @property
    def distances(self) -> Distances:
        """The best distances that were seen."""
        return self._search.best

    @contextmanager
    def step(self) -> Iterator[None]:
        """Look at the step that is taken inside, its ``reset`` included, and correct.

        Raises:
            RuntimeError: the manager is being traced or profiled already.
        """
        if self._is_first or self._search.is_frozen:
            yield
        else:
            with self._weighing() as weighed, trace_step(self._manager) as trace:
                yield
            stall_us, stats = trace.summary().stall_us, self._manager.last_step
            seen = Seen(
                stats.num_late_reloads,
                stats.num_early_returns,
                stall_us.get(Wait.W2.name, 0.0),
                stall_us.get(Wait.W4.name, 0.0),
                max(0, weighed.reserved_bytes - (self._target_bytes or 0)) if weighed else 0,
            )
            self._manager.budget.set_limits(*self._search.follow(seen))
        self._is_first = False
        self._num_steps_left -= 1
        if self.is_over:
            self._manager.budget.set_limits(*self._search.best)

    def _weighing(self) -> AbstractContextManager[WeighedStep | None]:
        if self._target_bytes is None:
            return nullcontext()
        return weigh_step(self._manager, empties=True)


class DistanceCheck:
    """Corrects the distances of a plan, and has it say so.

    Args:
        manager: follows the plan.
        num_steps: as for `PlanCorrection`.
        target_bytes: likewise.
        gather: tells every pipeline rank's distances to all, in order; collective.

    Attributes:
        plan: what the manager follows, on this rank with the distances in force once it is over.
    """

    plan: OffloadPlan

    def __init__(
        self,
        manager: PipelineOffloadManager,
        num_steps: int,
        target_bytes: int | None,
        gather: Callable[[Distances], Sequence[Distances]],
    ) -> None:
        self._manager = manager
        self._num_steps = num_steps
        self._target_bytes = target_bytes
        self._gather = gather
        self._correction: PlanCorrection | None = None

    def begin(self, plan: OffloadPlan) -> bool:
        """Take a plan; return whether there is a step to take."""
        self.plan = plan
        self._correction = PlanCorrection(self._manager, self._num_steps, self._target_bytes)
        return not self._correction.is_over

    @contextmanager
    def step(self) -> Iterator[None]:
        """Look at the step that is taken inside, and correct."""
        assert self._correction is not None
        with self._correction.step():
            yield

    def note(self) -> tuple[bool, str]:
        """Return whether it is over, and which ranks have other distances then; collective then."""
        correction, before = self._correction, self.plan
        assert correction is not None
        if not correction.is_over:
            return False, ""
        self.plan = with_distances(before, self._gather(correction.distances))
        pairs = zip(before.ranks, self.plan.ranks, strict=True)
        changed = [str(rank) for rank, (old, new) in enumerate(pairs) if old != new]
        text = f"distances corrected on pipeline ranks {', '.join(changed)}" if changed else ""
        return True, text

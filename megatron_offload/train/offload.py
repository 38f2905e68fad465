"""Switches offloading on for one run's model chunks, and everything back off at its end.

Owns the order: manager first, then megatron-core's own call sites, then the extra groups that need
module hooks. Must not know the loop. Read next: `megatron_offload.engine.manager`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize

from megatron_offload.config import OffloadConfig, split_modules
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PolicyConfig
from megatron_offload.core.profile import RunShape, StepProfile
from megatron_offload.core.trace import StepTrace
from megatron_offload.observe.live_bytes import LiveActivationMeter
from megatron_offload.planning.bandwidths import Bandwidths

if TYPE_CHECKING:
    from megatron_offload.autotune.plan_run import PlanCheck
    from megatron_offload.observe.recorder import RecordedStep

__all__ = ["OffloadSession", "open_offload"]


class OffloadSession:
    """One run's offloading, or none: then every counter is 0.

    Args:
        manager: offloads; None where nothing does.
        policy: what the run plans by, if it does.
        resets_itself: whether megatron-core's schedules end the step.
    """

    def __init__(
        self,
        manager: Any = None,
        policy: PolicyConfig | None = None,
        *,
        resets_itself: bool = False,
    ) -> None:
        self._manager = manager
        self._policy = policy
        self._resets_itself = resets_itself

    def trace(self, rank: int) -> contextlib.AbstractContextManager[StepTrace | None]:
        """Trace the step that is taken inside, `end_step` included; None where nothing moves."""
        if self._manager is None:
            return contextlib.nullcontext()
        from megatron_offload.observe.trace_step import trace_step

        return trace_step(self._manager, rank)

    def profile(
        self, run: RunShape, *, moves: bool
    ) -> contextlib.AbstractContextManager[RecordedStep | None]:
        """Profile the step that is taken inside, `end_step` included; None where nothing moves.

        Args:
            run: which part of the run this rank is.
            moves: whether the step moves what others would.
        """
        if self._manager is None:
            return contextlib.nullcontext()
        from megatron_offload.observe.recorder import profile_step

        return profile_step(self._manager, run=run, moves=moves)

    def bandwidths(self, group: Any) -> Bandwidths:
        """Return what to plan with, measured if need be; collective over all ranks.

        Where the policy is one that needs none, it is what `AutoConfig` would plan with.
        """
        from megatron_offload.autotune.agree import agree_on_bandwidths

        policy = self._policy
        if not isinstance(policy, (AutoConfig, MemoryTargetConfig)):
            policy = AutoConfig(kind="auto")
        return agree_on_bandwidths(self._manager, policy, group=group)

    def plan(self, profile: StepProfile, bandwidths: Bandwidths, group: Any) -> PlanCheck:
        """Plan from a profiled step, and follow the plan from the next on; collective.

        Returns the plan, and how it is held against the steps that come.

        Args:
            profile: this rank's.
            bandwidths: those of all ranks.
            group: all ranks.

        Raises:
            ConfigError: no plan can be made; on all ranks.
        """
        from megatron_offload.autotune.plan_run import check_plan

        return check_plan(self._manager, profile, self._policy, bandwidths=bandwidths, group=group)

    def end_step(self) -> dict[str, Any]:
        """End a training step; return its counters under the names of `RankStep`."""
        if self._manager is None:
            return {}
        if not self._resets_itself:
            self._manager.reset()
        stats = self._manager.last_step
        return {
            "offloaded_bytes": stats.offloaded_bytes,
            "reloaded_bytes": stats.reloaded_bytes,
            "num_late_reloads": stats.num_late_reloads,
            "num_early_returns": stats.num_early_returns,
            "num_refused_blocks": stats.num_refused_blocks,
            "num_unpinnable_blocks": stats.num_unpinnable_blocks,
            "num_memory_shortages": stats.num_memory_shortages,
            "peak_host_bytes": stats.peak_host_bytes,
            "pinned_host_bytes": self._manager.host_pool.stats.slab_bytes_total,
            "groups": tuple(asdict(group) for group in stats.by_name.values()),
        }


@contextlib.contextmanager
def open_offload(
    offload: OffloadConfig,
    chunks: Sequence[Any],
    meter: LiveActivationMeter | None,
    pp_rank: int,
    *,
    is_timed: bool = False,
) -> Iterator[OffloadSession]:
    """Offload inside this context as ``offload`` says; does nothing where it is disabled.

    Args:
        offload: what moves.
        chunks: this rank's model chunks, each wrapped for data parallelism.
        meter: told of every saved tensor and reload target; None for no measuring.
        pp_rank: this rank's place in the pipeline.
        is_timed: whether a timeline or a profile will be taken. A simulated device then lets
            compute take the time that it really does, or there would be nothing to see.
    """
    if not offload.enabled:
        yield OffloadSession()
        return
    from megatron_offload.engine.manager import PipelineOffloadManager
    from megatron_offload.frontends.modules import offload_modules
    from megatron_offload.integrations import megatron_core

    core, extra, patterns = split_modules(offload.modules)
    manager = PipelineOffloadManager.get_instance()
    offload = _with_one_limit(offload)
    policy = offload.policy
    if isinstance(policy, (MemoryTargetConfig, AutoConfig)):  # the session plans
        offload = offload.model_copy(update={"policy": None})
    if is_timed:
        simulated = offload.simulated.model_copy(update={"host_time": True})
        offload = offload.model_copy(update={"simulated": simulated})
    manager.configure(offload)
    megatron_core.install()
    with contextlib.ExitStack() as stack:
        if meter is not None:
            stack.enter_context(manager.observed_by(meter))
        if extra or patterns:
            names = [*extra, *patterns]
            stack.enter_context(offload_modules(chunks, names, pp_rank=pp_rank))
        try:
            # Megatron's schedules end the step themselves where its own option is set.
            yield OffloadSession(manager, policy, resets_itself=bool(core))
        finally:
            manager.abort()
            megatron_core.uninstall()


def _with_one_limit(offload: OffloadConfig) -> OffloadConfig:
    """Settle the smallest size that moves, for Megatron's groups and for module groups alike.

    Megatron's call sites bring a limit in elements of their own, against which only values that a
    user has set count.
    """
    return offload.model_copy(update={"min_tensor_bytes": ByteSize(offload.smallest_tensor[0])})

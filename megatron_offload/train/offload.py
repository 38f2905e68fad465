"""Offloading in one run: switched on for its model chunks, looked at, planned by its own steps.

Invariant: every rank takes the same turns at the same steps, by numbers that all of them know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from megatron_offload.autotune.agree import agree_on_bandwidths
from megatron_offload.autotune.plan_run import PlanCheck, check_plan
from megatron_offload.config import OffloadConfig, split_modules
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PolicyConfig
from megatron_offload.core.profile import RunShape, StepProfile
from megatron_offload.core.trace import StepTrace
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.integrations import megatron_core
from megatron_offload.observe.live_bytes import LiveActivationMeter
from megatron_offload.observe.measure import MeasuredStep
from megatron_offload.observe.recorder import RecordedStep, profile_step
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.planning.bandwidths import BANDWIDTHS_NAME, save_bandwidths
from megatron_offload.planning.plan_file import save_plan
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.parallel import Parallel
from megatron_offload.train.records import RankStep
from megatron_offload.train.run_folder import PLAN_NAME

_PLANNING = (AutoConfig, MemoryTargetConfig)


@dataclass
class OffloadSession:
    """One run's offloading, or none: then every counter is 0."""

    manager: PipelineOffloadManager | None = None
    policy: PolicyConfig | None = None
    resets_itself: bool = False
    """Whether megatron-core's schedules end the step."""
    _check: PlanCheck | None = None
    _plan_path: Path | None = None
    _is_looked_at: bool = False

    def trace(self, rank: int) -> contextlib.AbstractContextManager[StepTrace | None]:
        """Trace the step that is taken inside, `end_step` included; None where nothing moves."""
        return trace_step(self.manager, rank) if self.manager else contextlib.nullcontext()

    def profile(
        self, run: RunShape, *, moves: bool
    ) -> contextlib.AbstractContextManager[RecordedStep | None]:
        """Profile the step that is taken inside, `end_step` included; None where nothing moves."""
        if self.manager is None:
            return contextlib.nullcontext()
        return profile_step(self.manager, run=run, moves=moves)

    def plan(self, profile: StepProfile, parallel: Parallel, config: TrainConfig) -> None:
        """Leave the bandwidths that count beside a profiled step, and plan if asked; collective.

        Whoever plans later needs the bandwidths too. Where the policy is one that needs none, they
        are what `AutoConfig` would plan with. The plan is followed from the next step on; one that
        can't be made is a `ConfigError` on all ranks.
        """
        assert self.manager is not None
        group, policy, output = parallel.host_group, self.policy, config.run.output
        plans_by = policy if isinstance(policy, _PLANNING) else AutoConfig(kind="auto")
        bandwidths = agree_on_bandwidths(self.manager, plans_by, group=group)
        if parallel.is_owner:
            save_bandwidths(bandwidths, output / BANDWIDTHS_NAME)
        if config.plans:
            self._plan_path = output / PLAN_NAME if parallel.is_owner else None
            self._save(
                check_plan(self.manager, profile, policy, bandwidths=bandwidths, group=group)
            )

    @property
    def is_planning(self) -> bool:
        """Whether more steps have to tell what becomes of the run's plan."""
        return self._check is not None

    def looking(self) -> contextlib.AbstractContextManager[MeasuredStep | None]:
        """Measure the step that is taken inside where it tells of the plan; None elsewhere."""
        self._is_looked_at = self._check is not None
        return contextlib.nullcontext() if self._check is None else self._check.step()

    def look_back(self) -> str:
        """Do what follows from a step that was looked at; return what there is to say of it."""
        if self._check is None or not self._is_looked_at:
            return ""
        self._is_looked_at = False
        text = self._check.note()
        if text:
            self._save(self._check)
        return text

    def _save(self, check: PlanCheck) -> None:
        if self._plan_path is not None:
            save_plan(check.plan, self._plan_path)
        self._check = None if check.is_over else check

    def end_step(self) -> dict[str, Any]:
        """End a training step; return its counters under the names of `RankStep`."""
        if self.manager is None:
            return {}
        if not self.resets_itself:
            self.manager.reset()
        stats = self.manager.last_step
        return {
            **{x.name: getattr(stats, x.name) for x in fields(RankStep) if hasattr(stats, x.name)},
            "pinned_host_bytes": self.manager.host_pool.stats.slab_bytes_total,
            "groups": tuple(stats.by_name.values()),
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

    Where a timeline or a profile will be taken (``is_timed``), a simulated device lets compute take
    the time that it really does, or there would be nothing to see.
    """
    if not offload.enabled:
        yield OffloadSession()
        return
    core, extra, patterns = split_modules(offload.modules)
    manager = PipelineOffloadManager.get_instance()
    # Megatron's call sites bring a limit in elements of their own, against which only values that a
    # user has set count; this settles it for module groups too.
    limit_bytes = ByteSize(offload.smallest_tensor[0])
    offload = offload.model_copy(update={"min_tensor_bytes": limit_bytes})
    policy = offload.policy
    if isinstance(policy, _PLANNING):  # the session plans
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

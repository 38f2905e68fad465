"""Offloading in one run: switched on for its model chunks, looked at, planned by its own steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from megatron_offload.autotune.loop import MeasuredLoop, tune
from megatron_offload.config import OffloadConfig, split_modules
from megatron_offload.core.policy_config import SolvedConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.integrations import megatron_core
from megatron_offload.observe.live_bytes import LiveActivationMeter
from megatron_offload.planning.plan_file import save_plan
from megatron_offload.train.records import RankStep
from megatron_offload.train.run_folder import PLAN_NAME


@dataclass
class OffloadSession:
    """One run's offloading, or none: then every counter is 0."""

    manager: PipelineOffloadManager | None = None
    loop: MeasuredLoop | None = None
    resets_itself: bool = False
    """Whether megatron-core's schedules end the step."""

    @property
    def is_planning(self) -> bool:
        """Whether steps are looked at to find what moves."""
        return self.loop is not None and not self.loop.is_settled

    def keep_plan(self, output: Path | None) -> str:
        """Write the plan that stays into a folder, unless that is None; return what to say."""
        if self.loop is None:
            return ""
        if self.loop.plan is not None and output is not None:
            save_plan(self.loop.plan, output / PLAN_NAME)
        return self.loop.said

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

    Where a timeline or a profile will be taken (``is_timed``), or a policy plans by time, a
    simulated device lets compute take the time that it really does.
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
    if is_timed or isinstance(offload.policy, SolvedConfig):
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
            yield OffloadSession(manager, tune(manager), resets_itself=bool(core))
        finally:
            manager.abort()
            megatron_core.uninstall()

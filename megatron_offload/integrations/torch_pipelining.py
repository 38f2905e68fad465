"""Offload under the schedules of ``torch.distributed.pipelining``: each forward is a chunk."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.config import OffloadConfig
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.stats import StepStats
from megatron_offload.errors import IntegrationError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.frontends.around import AroundForwards, followed, leave_search
from megatron_offload.recompute.patches import Call, PatchStack


class PipelineOffload(PatchStack):
    """What `offload_pipeline` has set; ``stages`` are the indices of this rank's stages.

    `remove`, or its end as a context, leaves schedule and stages as they were, and gives all memory
    back.
    """

    def __init__(self, schedule: Any, stages: list[Any], manager: PipelineOffloadManager) -> None:
        super().__init__()
        self.manager = manager
        self.stages = [stage.stage_index for stage in stages]
        models = [stage.submod for stage in stages]
        groups = AutomaticGroups(manager, "stage", finds_steps=False)
        self.on_undo(manager.close)
        hook = partial(self._hook, models)
        if manager.config.tuned_policy is not None:
            manager.tuner = RowSearch(models, manager, hook)
            self.on_undo(leave_search, manager)
        hook()
        for place, stage in enumerate(stages):
            where = {"vp_stage": place, "pp_rank": stage.group_rank}
            name = f"stage {stage.stage_index}"
            context = AroundForwards(groups, stage.submod, name=name, **where)
            self.wrap(stage, "forward_one_chunk", partial(_run_forward, stage, context))
        self.wrap(schedule, "step", partial(_run_step, schedule, groups))

    remove = PatchStack.undo

    @property
    def last_step(self) -> StepStats:
        """Counters of the last step."""
        return self.manager.last_step

    def _hook(self, models: list[nn.Module]) -> None:
        """Set the hooks of the rows that are followed."""
        for model in models:
            self.on_undo(adopt_model(model, self.manager, is_part=True))


def _run_forward(
    stage: Any, context: AroundForwards, forward: Call, *args: Any, **kwargs: Any
) -> Any:
    with context if stage.has_backward else nullcontext():
        return forward(*args, **kwargs)


def _run_step(schedule: Any, groups: AutomaticGroups, step: Call, *args: Any, **kwargs: Any) -> Any:
    with groups.step() if schedule._has_backward else nullcontext():
        return step(*args, **kwargs)


def offload_pipeline(
    schedule: Any,
    *,
    config: OffloadConfig | None = None,
    manager: PipelineOffloadManager | None = None,
) -> PipelineOffload:
    """Offload what a schedule's stages save, on this rank.

    Each call of ``schedule.step`` is a training step; ``schedule.eval`` offloads nothing. The loss
    is computed outside the last stage, so what it saves is kept on the device: it is needed at
    once.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``.
        config: what is offloaded (``min_tensor_bytes``) and within which bounds.
        manager: a manager that nothing else uses, in place of ``config``.

    Raises:
        IntegrationError: ``schedule`` is none, or is offloaded already.
        ValueError: both ``config`` and ``manager`` are given.
        ConfigError: ``modules`` are set: a stage is offloaded as a whole.
    """
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if not callable(getattr(schedule, "step", None)) or any(
        not hasattr(stage, "forward_one_chunk") for stage in stages
    ):
        raise IntegrationError(
            "offload_pipeline takes a schedule of torch.distributed.pipelining, such as "
            f"Schedule1F1B; got a {type(schedule).__name__}"
        )
    if "step" in vars(schedule) or any("forward_one_chunk" in vars(stage) for stage in stages):
        raise IntegrationError(
            "this schedule, or one that shares its stages, is wrapped already: remove() that first"
        )
    manager, settings = followed("offload_pipeline", config, manager)
    return PipelineOffload(schedule, stages, manager or PipelineOffloadManager(settings))

"""Offload in a `Trainer` of transformers, TRL's trainers too, by a class in front of theirs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from megatron_offload.config import OffloadConfig
from megatron_offload.frontends.whole_model import get_act_offloading_ctx_manager


class OffloadMixin:
    """Moves what the model saves for backward: ``class OffloadTrainer(OffloadMixin, Trainer)``.

    What a step moved stands beside the loss in what the trainer logs. No callback can do this: its
    methods run before and after a forward and its backward together.
    """

    offload_config: OffloadConfig | None = None
    """Set it on the class or the trainer, before training."""

    model: Any

    @cached_property
    def offload(self) -> Any:
        """The context around each forward, with its ``last_step``."""
        return get_act_offloading_ctx_manager(
            self.model, config=self.offload_config, warn_if_no_head=False
        )

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        with self.offload:
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log the counters of the last step wherever a training loss is logged."""
        if "loss" in logs:
            logs |= self.offload.last_step.metrics()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

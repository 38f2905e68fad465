"""Offload under Lightning's `Trainer`, by a callback."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from megatron_offload.engine.patches import Call, PatchStack
from megatron_offload.frontends.whole_model import get_act_offloading_ctx_manager


class OffloadCallback(Callback):
    """Moves what ``training_step`` saves for backward, and logs the counters of each step.

    Args:
        options: arguments of `OffloadActivations`, such as ``config``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"warn_if_no_head": False, **options}
        self._patches = PatchStack()
        self.offload: Any = None
        """The context around each training step, with its ``last_step``; None before ``fit``."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the context around each training step."""
        self._patches.undo()
        self.offload = get_act_offloading_ctx_manager(pl_module, **self._options)

        def offloaded(training_step: Call, *args: Any, **kwargs: Any) -> Any:
            with self.offload:
                return training_step(*args, **kwargs)

        self._patches.wrap(trainer.strategy, "training_step", offloaded)
        self._patches.on_undo(self.offload.close)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log what the last step that is over has moved: mostly this one."""
        self.offload.end_step()
        pl_module.log_dict({name: float(x) for name, x in self.offload.last_step.metrics().items()})

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Free all memory, and leave the trainer as it was."""
        self._patches.undo()

    on_exception = teardown

"""Offload under Lightning's `Trainer`, by a callback."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from megatron_offload.frontends.whole_model import get_act_offloading_ctx_manager
from megatron_offload.recompute.patches import Call, PatchStack

_logger = logging.getLogger(__name__)

_SPAWNED = (
    "the ranks of this strategy are processes of their own: where fit() was called "
    "OffloadCallback.offload is None, and loggers or OffloadCallback(report=FOLDER) have counters"
)


class OffloadCallback(Callback):
    """Offloads what ``training_step`` saves, and logs its sizes every ``log_every_n_steps``.

    Args:
        all_counters: whether all counters are logged, as by `StepStats.metrics`.
        report: a folder for what ``megatron-offload report`` shows, once ``fit`` has ended.
        options: arguments of `OffloadActivations`, such as ``config``.
    """

    def __init__(
        self, *, all_counters: bool = False, report: str | Path | None = None, **options: Any
    ) -> None:
        self._all_counters, self._report = all_counters, report
        self._options = {"warn_if_no_head": False, **options}
        self._patches = PatchStack()
        self.offload: Any = None
        """The context around each training step, with its ``last_step``; None before ``fit``, and
        where that has run in other processes."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the context around each training step."""
        self._patches.undo()
        if trainer.is_global_zero and hasattr(trainer.strategy.launcher, "_start_method"):
            _logger.warning("%s", _SPAWNED)
        self.offload = get_act_offloading_ctx_manager(pl_module, **self._options)

        def offloaded(training_step: Call, *args: Any, **kwargs: Any) -> Any:
            with self.offload:
                return training_step(*args, **kwargs)

        self._patches.wrap(trainer.strategy, "training_step", offloaded)
        self._patches.on_undo(self.offload.close)
        if self._report is not None:
            self._patches.on_undo(partial(self.offload.save_report, self._report))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Give the loggers this batch's counters where Lightning gives them what it logs."""
        self.offload.end_step()
        fit, metrics = trainer.fit_loop, self.offload.last_step.metrics
        accumulates = pl_module.automatic_optimization and fit._should_accumulate()
        if trainer._logger_connector.should_update_logs and not accumulates:
            for logger in trainer.loggers:
                found = metrics(all_counters=self._all_counters)
                logger.log_metrics(found, step=fit.epoch_loop._batches_that_stepped)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Free all memory, and leave the trainer as it was."""
        self._patches.undo()

    on_exception = teardown

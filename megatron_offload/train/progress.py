"""What a person sees while a run goes on: one line every few steps, a bar on a terminal, tables.

Owns the printing of the rank that it is given to; silent on the others. Must not know torch.
Read next: `megatron_offload.train.loop`.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_offload.report.console import console
from megatron_offload.train.records import StepRecord

__all__ = ["StepPrinter"]


class StepPrinter:
    """Prints steps on the rank that owns the output."""

    def __init__(self, title: str, steps: int, interval: int, *, owner: bool) -> None:
        self._title = title
        self._steps = steps
        self._interval = interval
        self._console = console(stderr=True, quiet=not owner)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (owner and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task(title, total=steps)

    def resumed(self, path: Path | None, step: int) -> None:
        """Say where the run goes on; ``path`` is the checkpoint, None where there was none."""
        self._progress.update(self._task, completed=step)
        if path is None:
            text = "no checkpoint to resume from; starting with the first step"
        else:
            text = f"resumed from {path}; going on after step {step}"
        self._console.print(f"{self._title}: {text}")

    def saved(self, path: Path) -> None:
        """Say that a checkpoint is whole."""
        self._console.print(f"{self._title}: saved {path}")

    def planned(self, text: str) -> None:
        """Say what has become of the plan."""
        self._console.print(f"{self._title}: {text}")

    def stopped(self, step: int, number: int) -> None:
        """Say that a signal ends the run."""
        name = signal.Signals(number).name
        self._console.print(f"{self._title}: {name}; stopping after step {step}")

    def step(self, record: StepRecord) -> None:
        """Show one finished step."""
        self._progress.advance(self._task)
        if record.step % self._interval and record.step not in (1, self._steps):
            return
        self._console.print(
            f"{self._title}: step {record.step}/{self._steps}  loss {record.loss:.6f}  "
            f"grad norm {record.grad_norm:.4f}  lr {record.lr:.2e}  "
            f"{1e3 * record.step_time_s:.0f} ms  "
            f"{record.tokens / max(record.step_time_s, 1e-9):,.0f} tokens/s"
        )

    def evaluation(self, step: int, loss: float) -> None:
        """Show one finished evaluation."""
        self._console.print(f"{self._title}: evaluation after step {step}  loss {loss:.6f}")

    def __enter__(self) -> StepPrinter:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

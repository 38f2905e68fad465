"""What a person sees while a run goes on: one line every few steps, and a bar on a terminal."""

from __future__ import annotations

import sys

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_offload.report.console import console
from megatron_offload.train.config import RunConfig
from megatron_offload.train.records import StepRecord


class StepPrinter:
    """Prints steps on the rank that owns the output."""

    def __init__(self, title: str, run: RunConfig, *, owner: bool) -> None:
        self._title = title
        self._run = run
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
        self._task = self._progress.add_task(title, total=run.steps)

    def resume(self, step: int) -> None:
        """Begin behind a step."""
        self._progress.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """Say anything; nothing where it is empty."""
        if text:
            self._console.print(f"{self._title}: {text}")

    def step(self, record: StepRecord) -> None:
        """Show one finished step."""
        self._progress.advance(self._task)
        if record.step % self._run.log_interval and record.step not in (1, self._run.steps):
            return
        self.say(
            f"step {record.step}/{self._run.steps}  loss {record.loss:.6f}  "
            f"grad norm {record.grad_norm:.4f}  lr {record.lr:.2e}  "
            f"{1e3 * record.step_time_s:.0f} ms  "
            f"{record.tokens / max(record.step_time_s, 1e-9):,.0f} tokens/s"
        )

    def __enter__(self) -> StepPrinter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

"""Trains twice, without and with offload, and says whether the two runs are the same bits.

Owns the comparison and its report. Must not know how a run is done. Read next:
`megatron_offload.train.launch`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from megatron_offload.files import replace_text
from megatron_offload.reporting.plots import plot_comparison
from megatron_offload.reporting.summary import (
    compare_table,
    group_table,
    memory_table,
    rank_table,
)
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.launch import launch
from megatron_offload.train.records import RunReport, StepRecord

__all__ = ["Comparison", "compare", "compare_reports"]

_FOLDERS = ("without_offload", "with_offload")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, step by step. Each tuple holds one answer for each step, or for each rank."""

    losses: tuple[bool, ...]
    grad_norms: tuple[bool, ...]
    gradients: tuple[bool, ...]
    """By rank: digests of all gradients, in every step that has them."""
    parameters: tuple[bool, ...]
    """By rank: digests of the final parameters."""
    evaluations: bool

    @property
    def identical(self) -> bool:
        """Whether nothing differs by a single bit."""
        parts = (self.losses, self.grad_norms, self.gradients, self.parameters)
        return self.evaluations and all(part and all(part) for part in parts)


def compare_reports(without: RunReport, offloaded: RunReport) -> Comparison:
    """Compare two runs of the same configuration bit by bit."""
    steps = list(zip(without.steps, offloaded.steps, strict=True))
    return Comparison(
        losses=tuple(_same(a.loss, b.loss) and _same_losses(a, b) for a, b in steps),
        grad_norms=tuple(
            all(_same(x.grad_norm, y.grad_norm) for x, y in zip(a.ranks, b.ranks, strict=True))
            for a, b in steps
        ),
        gradients=tuple(
            all(a.ranks[rank].gradients == b.ranks[rank].gradients for a, b in steps)
            and without.steps[-1].ranks[rank].gradients is not None
            for rank in range(len(without.steps[-1].ranks))
        ),
        parameters=tuple(
            a == b for a, b in zip(without.parameters, offloaded.parameters, strict=True)
        ),
        evaluations=without.evaluations.keys() == offloaded.evaluations.keys()
        and all(
            _same(without.evaluations[s], offloaded.evaluations[s]) for s in without.evaluations
        ),
    )


def compare(config: TrainConfig) -> int:
    """Run without and with offload, print and write the comparison.

    Args:
        config: the run; whether it has offload enabled makes no difference.

    Returns:
        0 where the runs are bitwise identical, else 1; 0 on torchrun's ranks other than 0.

    Raises:
        ConfigError: nothing was started.
    """
    plain, offloaded = (_variant(config, folder) for folder in _FOLDERS)
    reports = launch([("without offload", plain), ("with offload", offloaded)])
    if reports is None:
        return 0
    result = compare_reports(*reports)
    console = Console()
    _print(console, reports, result)
    _write(config, reports, result)
    console.print(f"report: {config.run.output / 'compare.json'}", soft_wrap=True)
    console.print(f"plot: {_plot(config, reports)}", soft_wrap=True, markup=False)
    return 0 if result.identical else 1


def _variant(config: TrainConfig, folder: str) -> TrainConfig:
    """Return the same run with or without offload, writing into a folder of its own."""
    # Copies and not new objects: which offload settings were given must not change.
    return config.model_copy(
        update={
            "offload": config.offload.model_copy(update={"enabled": folder == _FOLDERS[1]}),
            # A comparison is of whole runs, from the first step on.
            "run": config.run.model_copy(
                update={
                    "output": config.run.output / folder,
                    "resume": False,
                    "checkpoint_interval": 0,
                    "max_restarts": 0,
                }
            ),
        }
    )


def _print(console: Console, reports: list[RunReport], result: Comparison) -> None:
    without, offloaded = reports
    rows = [
        {
            "step": a.step,
            "loss": (a.loss, b.loss),
            "grad_norm": (a.grad_norm, b.grad_norm),
            "equal": result.losses[index] and result.grad_norms[index],
        }
        for index, (a, b) in enumerate(zip(without.steps, offloaded.steps, strict=True))
    ]
    console.print(compare_table(rows))
    ranks = offloaded.peaks()
    console.print(rank_table(ranks, "With offload: bytes of the last step, peaks over all steps"))
    console.print(group_table(ranks, "Groups of the last step"))
    if ranks[0]["peak_live_activation_bytes"] is not None:
        console.print(memory_table(without.peaks(), ranks))
    on_gpu = ranks[0]["peak_reserved_bytes"] is not None
    times = [_median([step.step_time_s for step in report.steps[1:]]) for report in reports]
    if times[0]:
        console.print(
            f"median step time: {1e3 * times[0]:.1f} ms without, {1e3 * times[1]:.1f} ms with "
            f"offload ({100 * (times[1] / times[0] - 1):+.1f} %)"
            + ("" if on_gpu else "; on a CPU the device is simulated and its speed means nothing")
        )
    for name, equal in _findings(result).items():
        console.print(f"{name}: {'equal' if equal else 'DIFFERENT'}")
    console.print(f"bitwise identical: {'yes' if result.identical else 'no'}", style="bold")


def _plot(config: TrainConfig, reports: list[RunReport]) -> str:
    """Draw both runs; return the file's path, or why there is none."""
    path = config.run.output / "compare.png"
    key, title = "peak_live_activation_bytes", "Peak live saved activations"
    if reports[0].peaks()[0][key] is None:
        if reports[0].peaks()[0]["peak_reserved_bytes"] is None:
            return "left out: nothing was measured; set run.measure_live_bytes: true"
        key, title = "peak_reserved_bytes", "Peak reserved device memory"
    without, offloaded = reports
    drawn = plot_comparison(
        path,
        ([step.loss for step in without.steps], [step.loss for step in offloaded.steps]),
        ([rank[key] for rank in without.peaks()], [rank[key] for rank in offloaded.peaks()]),
        title,
    )
    if drawn:
        return str(path)
    return "left out: matplotlib is missing; install megatron-offload[plots]"


def _findings(result: Comparison) -> dict[str, bool]:
    return {
        f"losses of {len(result.losses)} steps": all(result.losses),
        f"gradient norms of {len(result.grad_norms)} steps": all(result.grad_norms),
        f"gradients of {len(result.gradients)} ranks": all(result.gradients),
        f"final parameters of {len(result.parameters)} ranks": all(result.parameters),
        **({} if result.evaluations else {"evaluation losses": False}),
    }


def _write(config: TrainConfig, reports: list[RunReport], result: Comparison) -> None:
    content: dict[str, Any] = {
        "identical": result.identical,
        "losses_equal": result.losses,
        "grad_norms_equal": result.grad_norms,
        "gradients_equal_by_rank": result.gradients,
        "parameters_equal_by_rank": result.parameters,
        "evaluations_equal": result.evaluations,
        "config": config.model_dump(mode="json"),
    }
    for folder, report in zip(_FOLDERS, reports, strict=True):
        content[folder] = {
            "losses": [step.loss.hex() for step in report.steps],
            "grad_norms": [step.grad_norm.hex() for step in report.steps],
            "parameters": report.parameters,
            "ranks": report.peaks(),
        }
    config.run.output.mkdir(parents=True, exist_ok=True)
    replace_text(config.run.output / "compare.json", json.dumps(content, indent=2) + "\n")


def _same(a: float, b: float) -> bool:
    """Compare the bits that matter: equal values of one sign, or both not a number."""
    return float(a).hex() == float(b).hex()


def _same_losses(a: StepRecord, b: StepRecord) -> bool:
    pairs = zip(a.ranks, b.ranks, strict=True)
    return all(
        (x.loss is None and y.loss is None)
        or (x.loss is not None and y.loss is not None and _same(x.loss, y.loss))
        for x, y in pairs
    )


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0

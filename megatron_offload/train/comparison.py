"""Whether two runs are the same bits, and the file that says so.

Invariant: what was not measured in both runs is no proof, and counts as different.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, read_model
from megatron_offload.files.text import replace_text
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import RunReport

COMPARISON_NAME = "compare.json"

FOLDERS = ("without_offload", "with_offload")
"""Where the two runs lie in the comparison's own folder."""

_MAX_BYTES = 256 * 1024**2


class Comparison(StrictModel):
    """Two runs, step by step. Each tuple holds one answer for each step, or for each rank."""

    losses_equal: tuple[bool, ...]
    grad_norms_equal: tuple[bool, ...]
    gradients_equal_by_rank: tuple[bool, ...]
    """Digests of all gradients, in every step that has them."""
    parameters_equal_by_rank: tuple[bool, ...]
    """Digests of the final parameters."""
    evaluations_equal: bool

    @property
    def identical(self) -> bool:
        """Whether nothing differs by a single bit."""
        return all(self.findings.values())

    @property
    def findings(self) -> dict[str, bool]:
        """Return what was compared, in words, and whether it was equal."""
        parts = {
            "losses of {} steps": self.losses_equal,
            "gradient norms of {} steps": self.grad_norms_equal,
            "gradients of {} ranks": self.gradients_equal_by_rank,
            "final parameters of {} ranks": self.parameters_equal_by_rank,
        }
        found = {words.format(len(part)): bool(part) and all(part) for words, part in parts.items()}
        return found | ({} if self.evaluations_equal else {"evaluation losses": False})


def compare_reports(without: RunReport, offloaded: RunReport) -> Comparison:
    """Compare two runs of the same configuration bit by bit."""
    steps = list(zip(without.steps, offloaded.steps, strict=True))
    by_rank = [list(zip(a.ranks, b.ranks, strict=True)) for a, b in steps]
    return Comparison(
        losses_equal=tuple(
            _same(a.loss, b.loss) and all(_same(x.loss, y.loss) for x, y in ranks)
            for (a, b), ranks in zip(steps, by_rank, strict=True)
        ),
        grad_norms_equal=tuple(
            all(_same(x.grad_norm, y.grad_norm) for x, y in ranks) for ranks in by_rank
        ),
        gradients_equal_by_rank=tuple(
            all(x.gradients == y.gradients for x, y in of_rank)
            and of_rank[-1][0].gradients is not None
            for of_rank in zip(*by_rank, strict=True)
        ),
        parameters_equal_by_rank=tuple(
            a == b for a, b in zip(without.parameters, offloaded.parameters, strict=True)
        ),
        evaluations_equal=without.evaluations.keys() == offloaded.evaluations.keys()
        and all(_same(x, offloaded.evaluations[step]) for step, x in without.evaluations.items()),
    )


class _RunFile(StrictModel):
    """What the file says of one of the two runs."""

    losses: tuple[str, ...]
    grad_norms: tuple[str, ...]
    parameters: tuple[str, ...]
    ranks: tuple[dict[str, Any], ...]


class _ComparisonFile(Comparison):
    """The file's form."""

    is_identical: bool = Field(alias="identical")
    config: dict[str, Any]
    without_offload: _RunFile
    with_offload: _RunFile


def write_comparison(
    config: TrainConfig, reports: Sequence[RunReport], result: Comparison, folder: Path
) -> Path:
    """Write what two runs came to; return the file's path."""
    content: dict[str, Any] = {
        "identical": result.identical,
        **result.model_dump(),
        "config": config.model_dump(mode="json"),
    }
    for name, report in zip(FOLDERS, reports, strict=True):
        content[name] = {
            "losses": [step.loss.hex() for step in report.steps],
            "grad_norms": [step.grad_norm.hex() for step in report.steps],
            "parameters": report.parameters,
            "ranks": report.peaks(),
        }
    path = folder / COMPARISON_NAME
    replace_text(path, json.dumps(content, indent=2) + "\n")
    return path


def read_comparison(folder: Path) -> Comparison:
    """Read what `write_comparison` wrote, if it doesn't contradict itself."""
    path = folder / COMPARISON_NAME
    found = read_model(_ComparisonFile, path, limit_bytes=_MAX_BYTES)
    if found.identical is not found.is_identical:
        raise ConfigError(f"{path} contradicts itself: 'identical' is not what its parts say")
    return found


def _same(a: float | None, b: float | None) -> bool:
    """Compare the bits that matter: equal values of one sign, both not a number, or both None."""
    if a is None or b is None:
        return a is b
    return float(a).hex() == float(b).hex()

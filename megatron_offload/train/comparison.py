"""Whether two runs are the same bits, and the file that says so.

Invariant: what was not measured in both runs is no proof, and counts as different.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, validate
from megatron_offload.files.text import read_json, replace_text
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import Bits, RunReport, StepRecord

COMPARISON_NAME = "compare.json"

FOLDERS = ("without_offload", "with_offload")
"""Where the two runs lie in the comparison's own folder."""

_MAX_BYTES = 256 * 1024**2

_Answers = Annotated[tuple[bool, ...], Field(min_length=1)]


class _Numbers(StrictModel):
    """What one of the two runs came to."""

    losses: tuple[Bits, ...]
    grad_norms: tuple[Bits, ...]
    parameters: tuple[str, ...]
    ranks: tuple[dict[str, Any], ...]


class Comparison(StrictModel):
    """Two runs, step by step. Each tuple of answers holds one for each step, or for each rank."""

    losses_equal: _Answers
    grad_norms_equal: _Answers
    gradients_equal_by_rank: _Answers
    """Digests of all gradients, in every step that has them."""
    parameters_equal_by_rank: _Answers
    """Digests of the final parameters."""
    evaluations_equal: bool
    config: dict[str, Any]
    without_offload: _Numbers
    with_offload: _Numbers

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


def compare_reports(config: TrainConfig, without: RunReport, offloaded: RunReport) -> Comparison:
    """Compare two runs of the same configuration bit by bit."""
    # A repr tells every bit of a number, and the sign of zero.
    steps = list(zip(without.steps, offloaded.steps, strict=True))
    by_rank = [list(zip(a.ranks, b.ranks, strict=True)) for a, b in steps]
    return Comparison(
        losses_equal=tuple(_losses(a) == _losses(b) for a, b in steps),
        grad_norms_equal=tuple(
            all(repr(x.grad_norm) == repr(y.grad_norm) for x, y in ranks) for ranks in by_rank
        ),
        gradients_equal_by_rank=tuple(
            all(x.gradients == y.gradients for x, y in of_rank)
            and of_rank[-1][0].gradients is not None
            for of_rank in zip(*by_rank, strict=True)
        ),
        parameters_equal_by_rank=tuple(
            a == b for a, b in zip(without.parameters, offloaded.parameters, strict=True)
        ),
        evaluations_equal=repr(without.evaluations) == repr(offloaded.evaluations),
        config=config.model_dump(mode="json"),
        without_offload=_numbers(without),
        with_offload=_numbers(offloaded),
    )


def _losses(step: StepRecord) -> str:
    return repr([step.loss, *(rank.loss for rank in step.ranks)])


def _numbers(report: RunReport) -> _Numbers:
    return _Numbers(
        losses=tuple(step.loss for step in report.steps),
        grad_norms=tuple(step.grad_norm for step in report.steps),
        parameters=report.parameters,
        ranks=tuple(report.peaks()),
    )


def write_comparison(result: Comparison, folder: Path) -> Path:
    """Write what two runs came to; return the file's path."""
    path = folder / COMPARISON_NAME
    content = {"identical": result.identical, **result.model_dump(mode="json")}
    replace_text(path, json.dumps(content, indent=2) + "\n")
    return path


def read_comparison(folder: Path) -> Comparison:
    """Read what `write_comparison` wrote, if it doesn't contradict itself."""
    path = folder / COMPARISON_NAME
    data = read_json(path, limit_bytes=_MAX_BYTES)
    said = data.pop("identical", None) if isinstance(data, dict) else None
    found = validate(Comparison, data, str(path))
    if said is not found.identical:
        raise ConfigError(f"{path} contradicts itself: 'identical' is not what its parts say")
    return found

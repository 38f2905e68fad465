"""Whether two runs are the same bits, and the file that says so.

Owns `Comparison` and the JSON form of one. Must not know how runs are done or shown.

Invariant: what was not measured in both runs is no proof, and counts as different. Read next:
`megatron_offload.cli.compare_runs`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_offload.config import StrictModel, validate
from megatron_offload.errors import ConfigError
from megatron_offload.files.text import read_json, replace_text
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import RunReport, StepRecord

__all__ = [
    "COMPARISON_NAME",
    "FOLDERS",
    "Comparison",
    "compare_reports",
    "read_comparison",
    "remove_comparison",
    "write_comparison",
]

COMPARISON_NAME = "compare.json"

FOLDERS = ("without_offload", "with_offload")
"""Where the two runs lie in the comparison's own folder."""

_MAX_BYTES = 256 * 1024**2


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

    @property
    def findings(self) -> dict[str, bool]:
        """Return what was compared, in words, and whether it was equal."""
        return {
            f"losses of {len(self.losses)} steps": all(self.losses),
            f"gradient norms of {len(self.grad_norms)} steps": all(self.grad_norms),
            f"gradients of {len(self.gradients)} ranks": all(self.gradients),
            f"final parameters of {len(self.parameters)} ranks": all(self.parameters),
            **({} if self.evaluations else {"evaluation losses": False}),
        }


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


class _RunFile(StrictModel):
    """What the file says of one of the two runs."""

    losses: tuple[str, ...]
    grad_norms: tuple[str, ...]
    parameters: tuple[str, ...]
    ranks: tuple[dict[str, Any], ...]


class _ComparisonFile(StrictModel):
    """The file's form."""

    identical: bool
    losses_equal: tuple[bool, ...]
    grad_norms_equal: tuple[bool, ...]
    gradients_equal_by_rank: tuple[bool, ...]
    parameters_equal_by_rank: tuple[bool, ...]
    evaluations_equal: bool
    config: dict[str, Any]
    without_offload: _RunFile
    with_offload: _RunFile


def write_comparison(
    config: TrainConfig, reports: Sequence[RunReport], result: Comparison, folder: Path
) -> Path:
    """Write what two runs came to; return the file's path."""
    content: dict[str, Any] = {
        "identical": result.identical,
        "losses_equal": result.losses,
        "grad_norms_equal": result.grad_norms,
        "gradients_equal_by_rank": result.gradients,
        "parameters_equal_by_rank": result.parameters,
        "evaluations_equal": result.evaluations,
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
    """Read what `write_comparison` wrote.

    Raises:
        ConfigError: there is no such file, or it holds something else or contradicts itself.
    """
    path = folder / COMPARISON_NAME
    data = read_json(path, limit_bytes=_MAX_BYTES)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping, got a {type(data).__name__}")
    file = validate(_ComparisonFile, data, str(path))
    result = Comparison(
        losses=file.losses_equal,
        grad_norms=file.grad_norms_equal,
        gradients=file.gradients_equal_by_rank,
        parameters=file.parameters_equal_by_rank,
        evaluations=file.evaluations_equal,
    )
    if result.identical is not file.identical:
        raise ConfigError(f"{path} contradicts itself: 'identical' is not what its parts say")
    return result


def remove_comparison(folder: Path) -> bool:
    """Remove the file of a comparison whose runs are about to be replaced; whether there was one.

    Raises:
        OSError: it can't be removed.
    """
    try:
        (folder / COMPARISON_NAME).unlink()
    except FileNotFoundError:
        return False
    return True


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

"""A plan as a JSON file: written, read and checked.

Owns the form of the file, and the digest by which ranks see that they have planned the same. Must
not know how a plan is made or followed.

Invariants: what is read again is what was written; a file that holds anything else is refused; a
failed write leaves the file that was there. Read next: `megatron_offload.planning.plan`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_offload.core.profile import GroupKey
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, validate
from megatron_offload.files.text import parse_json, read_text, replace_text
from megatron_offload.planning.plan import GroupChoice, MeasuredCost, OffloadPlan, RankPlan
from megatron_offload.planning.profile_file import (
    MAX_FILE_BYTES,
    MAX_GROUPS,
    Amount,
    Duration,
    Index,
    Name,
    Number,
    Text,
)

__all__ = ["load_plan", "parse_plan", "plan_digest", "plan_to_json", "save_plan"]


class _Choice(StrictModel):
    chunk: Index
    order: Index
    name: Name
    num_bytes: Amount
    elsewhere_bytes: Amount
    choice: Literal["offload", "keep"]
    reason: Name


class _Rank(StrictModel):
    max_inflight_bytes: Amount | None
    prefetch_bytes: Amount | None
    predicted_peak_bytes: Amount | None
    predicted_step_us: Duration | None
    measured_peak_bytes: Amount | None = None
    """Plans of earlier versions don't say."""
    groups: Annotated[tuple[_Choice, ...], Field(max_length=MAX_GROUPS)]


_Percent = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _Measured(StrictModel):
    without_us: Duration
    with_us: Duration
    slowdown_percent: _Percent
    noise_percent: Annotated[_Percent, Field(ge=0)]
    num_pairs: Number


class _Plan(StrictModel):
    format: Literal["megatron_offload plan"]
    version: Literal[1]
    policy: Name
    num_microbatches: Number
    vp_size: Number
    signature: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bandwidths: Text = ""
    """Plans of earlier versions don't say, nor what they were measured to cost."""
    measured: _Measured | None = None
    ranks: Annotated[tuple[_Rank, ...], Field(min_length=1, max_length=100_000)]


def save_plan(plan: OffloadPlan, path: str | Path) -> None:
    """Write a plan in the place of the file that is there, if any.

    Raises:
        ConfigError: it holds what `load_plan` would refuse.
        OSError: it can't be written; the file that was there is untouched.
    """
    text = plan_to_json(plan)
    parse_plan(text, str(path))
    replace_text(path, text)


def load_plan(path: str | Path) -> OffloadPlan:
    """Read a plan.

    Raises:
        ConfigError: it is missing, unreadable, too large, or not what `save_plan` writes, groups
            changed by hand included; all that is wrong, one line each.
    """
    return parse_plan(read_text(path, limit_bytes=MAX_FILE_BYTES), str(path))


def plan_to_json(plan: OffloadPlan) -> str:
    """Return the plan as JSON, the same text for the same plan."""
    return json.dumps(_to_data(plan), indent=1) + "\n"


def plan_digest(plan: OffloadPlan) -> str:
    """Return a SHA-256 over all of a plan; ranks that have the same follow the same plan."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()


def parse_plan(text: str, source: str) -> OffloadPlan:
    """Return the plan that a JSON text holds.

    Args:
        text: the JSON.
        source: what to call it in an error, such as the file's path.

    Raises:
        ConfigError: as for `load_plan`.
    """
    data = parse_json(text, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a plan, got a {type(data).__name__}")
    read = validate(_Plan, data, source)
    plan = OffloadPlan(
        read.policy,
        read.num_microbatches,
        read.vp_size,
        tuple(
            RankPlan(
                tuple(
                    GroupChoice(
                        GroupKey(each.chunk, each.order),
                        each.name,
                        each.num_bytes,
                        each.choice == "offload",
                        each.reason,
                        each.elsewhere_bytes,
                    )
                    for each in rank.groups
                ),
                rank.max_inflight_bytes,
                rank.prefetch_bytes,
                rank.predicted_peak_bytes,
                rank.predicted_step_us,
                rank.measured_peak_bytes,
            )
            for rank in read.ranks
        ),
        read.bandwidths,
        MeasuredCost(**dict(read.measured)) if read.measured is not None else None,
    )
    for pp_rank, rank in enumerate(plan.ranks):
        if len({choice.key for choice in rank.choices}) != len(rank.choices):
            raise ConfigError(f"{source}: two groups of rank {pp_rank} have one chunk and order")
    if plan.signature != read.signature:
        raise ConfigError(f"{source}: 'signature' is not that of its groups; make the plan anew")
    return plan


def _to_data(plan: OffloadPlan) -> dict[str, Any]:
    return {
        "format": "megatron_offload plan",
        "version": 1,
        "policy": plan.policy,
        "num_microbatches": plan.num_microbatches,
        "vp_size": plan.vp_size,
        "signature": plan.signature,
        "bandwidths": plan.bandwidths,
        "measured": plan.measured and plan.measured._asdict(),
        "ranks": [
            {
                "max_inflight_bytes": rank.max_inflight_bytes,
                "prefetch_bytes": rank.prefetch_bytes,
                "predicted_peak_bytes": rank.predicted_peak_bytes,
                "predicted_step_us": rank.predicted_step_us,
                "measured_peak_bytes": rank.measured_peak_bytes,
                "groups": [
                    {
                        "chunk": choice.key.chunk,
                        "order": choice.key.order,
                        "name": choice.name,
                        "num_bytes": choice.num_bytes,
                        "elsewhere_bytes": choice.elsewhere_bytes,
                        "choice": "offload" if choice.moves else "keep",
                        "reason": choice.reason,
                    }
                    for choice in rank.choices
                ],
            }
            for rank in plan.ranks
        ],
    }

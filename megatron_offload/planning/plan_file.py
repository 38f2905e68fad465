"""A plan as a JSON file.

What is read is what was written; a file that holds anything else is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import parse_json, read_text, replace_text
from megatron_offload.planning.plan import (
    GroupChoice,
    MeasuredCost,
    OffloadPlan,
    RankPlan,
    UnitChoice,
)
from megatron_offload.planning.records import (
    MAX_FILE_BYTES,
    Number,
    either,
    many,
    record_model,
    record_of,
    to_data,
)

_MOST_RANKS = 100_000

_MEASURED = record_model(MeasuredCost)

_CHOICE = record_model(GroupChoice, moves=either(Literal["offload", "keep"]))

_UNIT = record_model(UnitChoice, is_remade=either(Literal["recompute", "not recompute"]))

_RANK = record_model(
    RankPlan,
    choices=(many(_CHOICE)[0], Field(alias="groups")),
    units=(many(_UNIT)[0] | None, ...),
)

_PLAN = record_model(
    OffloadPlan,
    format=(Literal["megatron_offload plan"], ...),
    version=(Literal[2], ...),
    num_microbatches=(Number, ...),
    vp_size=(Number, ...),
    bandwidths=(Annotated[str, Field(strict=True, max_length=10_000)], ...),
    measured=(_MEASURED | None, ...),
    ranks=many(_RANK, _MOST_RANKS, least=1),
)


def save_plan(plan: OffloadPlan, path: str | Path) -> None:
    """Write a plan in the place of the file that is there; a failed write leaves that."""
    text = plan_to_json(plan)
    parse_plan(text, str(path))
    replace_text(path, text)


def load_plan(path: str | Path) -> OffloadPlan:
    """Read a plan; `ConfigError` says all that is wrong, one line each."""
    return parse_plan(read_text(path, limit_bytes=MAX_FILE_BYTES), str(path))


def plan_to_json(plan: OffloadPlan) -> str:
    """Return the plan as JSON, the same text for the same plan."""
    data = {"format": "megatron_offload plan", "version": 2} | to_data(plan)
    for rank in data["ranks"]:
        rank["groups"] = rank.pop("choices")
        for group in rank["groups"]:
            group["choice"] = "offload" if group.pop("moves") else "keep"
        for unit in rank["units"] or ():
            unit["choice"] = "recompute" if unit.pop("is_remade") else "not recompute"
    return json.dumps(data, indent=1) + "\n"


def parse_plan(text: str, source: str) -> OffloadPlan:
    """Return the plan that a JSON text holds; ``source`` names it in errors."""
    plan: OffloadPlan = record_of(validate(_PLAN, parse_json(text, source), source))
    for pp_rank, rank in enumerate(plan.ranks):
        if len({choice.key for choice in rank.choices}) != len(rank.choices):
            raise ConfigError(f"{source}: two groups of rank {pp_rank} have one chunk and order")
    return plan

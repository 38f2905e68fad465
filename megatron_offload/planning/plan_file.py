"""A plan as a JSON file.

What is read is what was written; a file that holds anything else is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.text import read_text, replace_text
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
    many,
    read_model,
    record_model,
    record_of,
    to_data,
)

_MOST_RANKS = 100_000

_MEASURED = record_model(MeasuredCost)

_CHOICE = record_model(
    GroupChoice,
    moves=None,
    choice=(Literal["offload", "keep"], ...),
)

_UNIT = record_model(
    UnitChoice, is_remade=None, choice=(Literal["recompute", "not recompute"], ...)
)

_RANK = record_model(
    RankPlan,
    choices=None,
    groups=many(_CHOICE),
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
    data = {
        "format": "megatron_offload plan",
        "version": 2,
        **to_data(plan),
        "measured": plan.measured and plan.measured._asdict(),
        "ranks": [_rank_data(rank) for rank in plan.ranks],
    }
    return json.dumps(data, indent=1) + "\n"


def _rank_data(rank: RankPlan) -> dict[str, Any]:
    data = to_data(rank)
    del data["choices"]
    if rank.units is not None:
        data["units"] = [
            to_data(unit) | {"choice": "recompute" if unit.is_remade else "not recompute"}
            for unit in rank.units
        ]
        for unit in data["units"]:
            del unit["is_remade"]
    return data | {"groups": [_choice_data(choice) for choice in rank.choices]}


def _choice_data(choice: GroupChoice) -> dict[str, Any]:
    data = to_data(choice)
    return data | {"choice": "offload" if data.pop("moves") else "keep"}


def parse_plan(text: str, source: str) -> OffloadPlan:
    """Return the plan that a JSON text holds; ``source`` names it in errors."""
    read = read_model(_PLAN, text, source, "a plan")
    plan = record_of(
        OffloadPlan,
        read,
        ranks=tuple(
            record_of(
                RankPlan, rank, choices=tuple(map(_choice, rank.groups)), units=_units(rank.units)
            )
            for rank in read.ranks
        ),
        measured=read.measured and record_of(MeasuredCost, read.measured),
    )
    for pp_rank, rank in enumerate(plan.ranks):
        if len({choice.key for choice in rank.choices}) != len(rank.choices):
            raise ConfigError(f"{source}: two groups of rank {pp_rank} have one chunk and order")
    return plan


def _choice(read: Any) -> GroupChoice:
    return record_of(GroupChoice, read, moves=read.choice == "offload")


def _units(read: Any) -> tuple[UnitChoice, ...] | None:
    if read is None:
        return None
    return tuple(record_of(UnitChoice, one, is_remade=one.choice == "recompute") for one in read)

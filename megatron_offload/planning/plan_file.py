"""A plan as a JSON file."""

from __future__ import annotations

from pathlib import Path

from megatron_offload.errors import ConfigError
from megatron_offload.files.text import read_text, replace_text
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.records import MAX_FILE_BYTES, from_json, to_json

_KIND = "plan", 3


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
    return to_json(plan, *_KIND, indent=1)


def parse_plan(text: str, source: str) -> OffloadPlan:
    """Return the plan that a JSON text holds; ``source`` names it in errors."""
    plan = from_json(OffloadPlan, text, source, *_KIND)
    if not plan.ranks or min(plan.num_microbatches, plan.vp_size) < 1:
        raise ConfigError(f"{source}: 'num_microbatches', 'vp_size' or 'ranks' is none")
    for pp_rank, rank in enumerate(plan.ranks):
        if len({choice.key for choice in rank.choices}) != len(rank.choices):
            raise ConfigError(f"{source}: two groups of rank {pp_rank} have one key")
    return plan

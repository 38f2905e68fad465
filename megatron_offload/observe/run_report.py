"""What a run of any program leaves in a folder for ``megatron-offload report``."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, Field

from megatron_offload.core.trace import StepTrace, read_traces, write_traces
from megatron_offload.engine.stats import GroupStats, StepStats
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, write_model
from megatron_offload.files.text import replace_text
from megatron_offload.planning.found import NAME

if TYPE_CHECKING:  # it imports torch
    from megatron_offload.engine.manager import PipelineOffloadManager

_logger = logging.getLogger(__name__)

CONFIG_NAME, FACTS_NAME, LOG_NAME = "config.yaml", "run.json", "steps.jsonl"
"""The last is the trainer's, which logs each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """What a step of one rank has offloaded, and what memory that took. Sizes in bytes."""

    rank: int
    pp_rank: int = 0
    dp_rank: int = 0
    """Of runs of before: the trainer has one for all."""
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    recomputed_bytes: int = 0
    num_late_reloads: int = 0
    num_cancelled_offloads: int = 0
    num_refused_blocks: int = 0
    num_unpinnable_blocks: int = 0
    num_memory_shortages: int = 0
    peak_host_bytes: int = 0
    pinned_host_bytes: int = 0
    """Host memory that was pinned when the step ended, in use or not."""
    peak_live_activation_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    groups: tuple[GroupStats, ...] = ()


def counters_of(manager: PipelineOffloadManager, step: StepStats | None = None) -> dict[str, Any]:
    """Return the counters of a manager's last step, or another, as `RankSummary` names them."""
    step = step or manager.last_step
    found = {x.name: getattr(step, x.name) for x in fields(RankSummary) if hasattr(step, x.name)}
    pinned_bytes = manager.host_pool.stats.slab_bytes_total
    return found | {"groups": tuple(step.by_name.values()), "pinned_host_bytes": pinned_bytes}


class RunFacts(StrictModel):
    """Where and with what a run was done, and what it comes to."""

    device: str = Field(max_length=200)
    is_simulated: bool
    """Whether there was no GPU: times then say nothing about one."""
    ranks: int = Field(ge=1)
    date: datetime
    versions: dict[str, str] = Field(max_length=100)
    """Of Python and of the packages that decide what a run computes."""
    plan: str = Field(default="", max_length=100_000)
    """What the first rank has said of it."""
    verdict: str = Field(default="", max_length=100_000)
    """Likewise of its last step."""
    num_steps: int = Field(default=0, ge=0)
    """0 where the first rank's last step alone is known."""
    by_rank: tuple[RankSummary, ...] = Field(min_length=1)
    """The last step of each rank, in their order; its peaks are those of all usual steps."""
    step_time_s: float | None = Field(default=None, ge=0)
    """Median of usual steps."""


def save_report(
    manager: PipelineOffloadManager,
    folder: str | Path,
    trace: StepTrace | None = None,
    step: StepStats | None = None,
) -> None:
    """Leave in a folder what ``megatron-offload report FOLDER`` shows; each rank calls it.

    Of the first rank that is the last step, or the ``step`` that is given, plan, configuration and
    versions; besides the plans that were found and each rank's ``trace``. A warning says why it
    can't be written.
    """
    from megatron_offload.machine.job_ranks import num_ranks, rank_in  # imports torch

    folder, rank, search = Path(folder), rank_in(), manager.tuner
    reserved_bytes = manager.backend.memory().reserved_bytes or None
    mine = RankSummary(rank=0, peak_reserved_bytes=reserved_bytes, **counters_of(manager, step))
    facts = {
        "plan": manager.plan,
        "verdict": (step or manager.last_step).verdict,
        "by_rank": (mine,),
    }
    try:
        if os.path.lexists(folder / LOG_NAME):
            raise ConfigError("it holds a run of the trainer; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        if trace is not None:
            write_traces(folder / f"trace_{rank}.json", [trace])
        if rank == 0:
            for number, path in trace_files(folder).items():
                if trace is None or number >= num_ranks():
                    path.unlink(missing_ok=True)
            is_simulated = manager.backend.name != "cuda"
            write_facts(folder, manager.config, is_simulated=is_simulated, **facts)
        if search is not None and search.is_converged:
            search.save(folder)
        elif rank == 0:
            (folder / NAME).unlink(missing_ok=True)
    except (OSError, ConfigError) as error:
        _logger.warning("megatron-offload: no report in %s: %s", folder, error)


def write_facts(folder: Path, config: BaseModel, *, is_simulated: bool, **more: Any) -> None:
    """Write down where and with what a run was done, what it comes to, and its configuration."""
    from megatron_offload.backends import visible_devices  # imports torch, as do these
    from megatron_offload.machine.examine import found_versions
    from megatron_offload.machine.job_ranks import num_ranks

    facts = RunFacts(
        device=f"simulated on {os.cpu_count()} CPU cores" if is_simulated else visible_devices()[0],
        is_simulated=is_simulated,
        ranks=num_ranks(),
        date=datetime.now(UTC).replace(microsecond=0),
        versions=found_versions(),
        **more,
    )
    write_model(folder / FACTS_NAME, facts)
    write_config(config, folder)


def write_config(config: BaseModel, folder: Path) -> None:
    """Write what was given, which may matter, as a file for ``--config`` that does the same."""
    given = config.model_dump(mode="json", exclude_unset=True)
    replace_text(folder / CONFIG_NAME, yaml.safe_dump(given, sort_keys=False))


def trace_files(folder: Path) -> dict[int, Path]:
    """Return the traces in a run's own folder, by rank."""
    name = re.compile(r"trace_(0|[1-9]\d{0,5})\.json")
    found = {path: name.fullmatch(path.name) for path in folder.glob("trace_*")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def read_timelines(folder: Path) -> list[StepTrace]:
    """Read the traces in a run's own folder, by rank; `ConfigError` for a damaged one."""
    traces: list[StepTrace] = []
    for rank, path in trace_files(folder).items():
        found = read_traces(path)
        if [one.rank for one in found] != [rank]:
            raise ConfigError(f"{path} must hold the timeline of rank {rank} alone")
        traces += found
    return traces

"""Starts the ranks of a run, or joins those that torchrun started, and hands back their reports.

Invariant: every `ConfigError` that needs no device is raised before the first process is started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_offload.config import environment_int
from megatron_offload.errors import ConfigError, OffloadError, require
from megatron_offload.report.console import console
from megatron_offload.train.checkpoint_folder import CheckpointFolder
from megatron_offload.train.comparison import COMPARISON_NAME
from megatron_offload.train.config import TrainConfig, check_ranks
from megatron_offload.train.records import RunReport
from megatron_offload.train.run_folder import check_comparison, check_output, locked
from megatron_offload.train.stopping import (
    StoppedError,
    children_without_sigint,
    end_with_parent,
    exit_status,
    open_stop_signals,
    second_signal_kills,
)

Runs = Sequence[tuple[str, TrainConfig]]
"""Runs to take one after the other in the same processes, each with its title."""


class RankFailedError(OffloadError, RuntimeError):
    """A training process ended with an error; its own traceback stands above."""


@contextlib.contextmanager
def launch(runs: Runs, comparison: Path | None = None) -> Iterator[list[RunReport] | None]:
    """Take every run in turn on all ranks; their folders are locked inside this context.

    Args:
        runs: titles and configurations that agree in ``parallel`` and in the device.
        comparison: the folder of the comparison that the runs are for, of which an earlier one is
            replaced; None for a run of its own.

    Yields:
        One report for each run; None on torchrun's ranks other than 0.

    Raises:
        ConfigError: a run that can't be started; nothing was.
        RankFailedError: a rank failed.
        StoppedError: a signal ended the run after a whole step. Torchrun's ranks exit instead.
    """
    require("megatron.core", "safetensors")
    from megatron_offload.train.parallel import check_device

    first = runs[0][1]
    place = _place()
    ranks = first.default_ranks if place is None else place.world_size
    owner = place is None or place.rank == 0
    for _, config in runs:
        check_ranks(config, ranks)
    folders = [config.run.output for _, config in runs] + ([comparison] if comparison else [])
    with locked(folders if owner else ()):
        if comparison is not None:
            check_comparison(comparison)
        else:
            is_restarted = _restarts() > 0
            for _, config in runs:
                resumes = _resumes(config)
                check_output(config, ranks, is_resumed=resumes, is_restarted=is_restarted)
        local = ranks if place is None else place.local_world_size
        kind = check_device(first, local, can_hide=place is None)
        if kind == "cpu" and first.run.device == "auto" and owner:
            console(stderr=True).print(
                "megatron-offload: there is no CUDA device: training on the CPU, where the device "
                "is simulated and a model made for GPUs takes very long; run.device: cpu says that "
                "this is meant"
            )
        if comparison is not None and owner and (comparison / COMPARISON_NAME).exists():
            (comparison / COMPARISON_NAME).unlink()
            console(stderr=True).print(f"compare: replaces the comparison in {comparison}")
        if place is None:
            reports = _start_ranks(list(runs), kind, ranks)
        else:
            reports = _rank_main(list(runs), kind)
        if isinstance(reports, ConfigError):
            raise reports
        yield reports if owner else None


class _Place(NamedTuple):
    """What a launcher says of this process."""

    rank: int
    world_size: int
    local_world_size: int


def _place() -> _Place | None:
    """Return this rank's place where a launcher such as torchrun has started it, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    place = _Place(
        rank=environment_int("RANK"),
        world_size=environment_int("WORLD_SIZE", least=1),
        local_world_size=environment_int("LOCAL_WORLD_SIZE", 1, least=1),
    )
    if place.rank >= place.world_size:
        raise ConfigError(
            f"RANK is {place.rank}, but WORLD_SIZE {place.world_size}; start the ranks with "
            f"torchrun, or unset both"
        )
    for name in ("LOCAL_RANK", "MASTER_PORT"):
        environment_int(name)
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError("MASTER_ADDR is not set; start the ranks with torchrun")
    return place


def _restarts() -> int:
    """Return how often the launcher has started this rank again."""
    return environment_int("TORCHELASTIC_RESTART_COUNT", 0)


def _resumes(config: TrainConfig) -> bool:
    """Whether to go on from a checkpoint: asked for, or started again by the launcher."""
    return config.run.resume or _restarts() > 0


def _start_ranks(
    runs: list[tuple[str, TrainConfig]], kind: str, ranks: int
) -> list[RunReport] | ConfigError:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    run = runs[0][1].run
    # One OpenMP thread unless the user says more: ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(run.threads))
    if kind == "cpu":
        # The ranks inherit it: megatron-core and the offload backend both look for a device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Versions of torch that lack the option wait for 30 seconds.
    known = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    shutdown: Any = {"shutdown_timeout": run.shutdown_timeout_s} if known else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=run.max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        **shutdown,
    )
    try:
        with second_signal_kills(), children_without_sigint():
            results = elastic_launch(config, _rank_main)(runs, kind)
    except ChildFailedError as error:
        number = _stopped_by(error)
        if number:
            raise _stopped(number, run.output) from error
        raise RankFailedError(f"a rank failed:\n{error}") from error
    except SignalException as error:
        raise _stopped(int(error.sigval), run.output) from error
    first: list[RunReport] | ConfigError = results[0]
    return first


def _stopped_by(error: Any) -> int:
    """Return the signal that ranks stopped for though the launcher got none, else 0."""
    codes = {failure.exitcode for failure in error.failures.values()}
    signals = (signal.SIGTERM, signal.SIGINT)
    return next((int(number) for number in signals if codes == {exit_status(number)}), 0)


def _stopped(number: int, output: Path) -> StoppedError:
    name = signal.Signals(number).name
    latest = CheckpointFolder(output).latest()
    there = "there is no checkpoint" if latest is None else f"--resume goes on from {latest}"
    return StoppedError(f"stopped by {name}; {there}", number)


def _rank_main(runs: list[tuple[str, TrainConfig]], kind: str) -> list[RunReport] | ConfigError:
    """Be one rank, from the environment that the launcher set.

    What only a rank can find wrong (such as the contents of an indexed dataset) every rank finds
    alike; it is returned, so that the launcher reports it as bad input and not as a crash. A rank
    that a signal stopped exits here: returning would mean that the run is done.
    """
    end_with_parent()
    # megatron-core says on every import which optional libraries it does without.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    from megatron_offload.train.loop import run_training
    from megatron_offload.train.parallel import open_process_group

    run = runs[0][1].run
    reports = []
    with open_process_group(kind, run.threads, run.timeout_s) as device:
        try:
            for title, config in runs:
                with open_stop_signals() as signals:
                    resume = _resumes(config)
                    report = run_training(config, device, title, resume=resume, signals=signals)
                if signals.received or report.stopped_by:
                    raise SystemExit(exit_status(report.stopped_by or signals.received))
                reports.append(report)
        except ConfigError as error:
            return error
    return reports

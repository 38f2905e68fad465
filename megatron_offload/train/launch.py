"""Starts the ranks of a run, or joins those that torchrun started.

Owns the step from one command to many processes and their reports back, and what becomes of signals
and of failed ranks on the way. Must not know what a run does beyond `run_training`.

Invariant: every `ConfigError` that needs no device is raised before the first process is started.
Read next: `megatron_offload.train.loop`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.train.checkpoint_folder import CheckpointFolder, read_checkpoint
from megatron_offload.train.config import TrainConfig, check_ranks
from megatron_offload.train.records import RunReport, read_steps
from megatron_offload.train.stopping import (
    StoppedError,
    exit_status,
    open_stop_signals,
    second_signal_kills,
)

__all__ = ["RankFailedError", "launch"]

Runs = Sequence[tuple[str, TrainConfig]]
"""Runs to take one after the other in the same processes, each with its title."""


class RankFailedError(OffloadError, RuntimeError):
    """A training process ended with an error; its own traceback stands above."""


def launch(runs: Runs) -> list[RunReport] | None:
    """Take every run in turn on all ranks.

    Args:
        runs: titles and configurations that agree in ``parallel`` and in the device.

    Returns:
        One report for each run; None on torchrun's ranks other than 0.

    Raises:
        ConfigError: a run that can't be started; nothing was.
        RankFailedError: a rank failed.
        StoppedError: SIGTERM or SIGINT ended the run; its ranks finished their step. Torchrun's
            ranks end with `exit_status` instead.
    """
    _check_megatron()
    from megatron_offload.train.parallel import check_device

    first = runs[0][1]
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for _, config in runs:
            check_ranks(config, int(os.environ["WORLD_SIZE"]))
            _check_checkpoints(config, int(os.environ["WORLD_SIZE"]))
        kind = check_device(first, local, can_hide=False)
        reports = _reports_of(_rank_main(list(runs), kind))
        return reports if int(os.environ["RANK"]) == 0 else None
    for _, config in runs:
        check_ranks(config, first.default_ranks)
        _check_checkpoints(config, first.default_ranks)
        _make_output(config)
    kind = check_device(first, first.default_ranks, can_hide=True)
    return _start_ranks(list(runs), kind, first.default_ranks)


def _check_megatron() -> None:
    """Check that megatron-core is there, whose model and schedules are trained."""
    try:
        is_there = find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ConfigError(
            "training needs megatron-core, which is not installed: "
            "pip install 'megatron-offload[megatron]'"
        )


def _resumes(config: TrainConfig) -> bool:
    """Whether to go on from a checkpoint: asked for, or started again by the launcher."""
    return config.run.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _check_checkpoints(config: TrainConfig, world_size: int) -> None:
    """Check what can be resumed from, or that nothing is there that a fresh run would replace."""
    folder = CheckpointFolder(config.run.output)
    latest = folder.latest()
    if latest is None:
        return
    if not _resumes(config):
        raise ConfigError(
            f"run.output {config.run.output} holds checkpoints up to {latest.name}; go on from "
            f"there with --resume, or remove {folder.path} to start over"
        )
    step = read_checkpoint(latest, config, world_size).step
    read_steps(config.run.output, step, world_size)


def _make_output(config: TrainConfig) -> None:
    """Make the output folder: permissions alone don't tell whether that works."""
    folder = config.run.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.output {folder} can't be written: {error.strerror}; choose another one"
        ) from error


def _start_ranks(runs: list[tuple[str, TrainConfig]], kind: str, ranks: int) -> list[RunReport]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    run = runs[0][1].run
    # One OpenMP thread unless the user says more: ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(run.threads))
    if kind == "cpu":
        # The ranks inherit it: megatron-core and the offload backend both look for a device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
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
        **_shutdown_timeout(LaunchConfig, run.shutdown_timeout_s),
    )
    try:
        with second_signal_kills():
            results = elastic_launch(config, _rank_main)(runs, kind)
    except ChildFailedError as error:
        number = _stopped_by(error)
        if number:
            raise _stopped(number, run.output) from error
        raise RankFailedError(f"a rank failed:\n{error}") from error
    except SignalException as error:
        raise _stopped(int(error.sigval), run.output) from error
    return _reports_of(results[0])


def _shutdown_timeout(launch_config: Any, seconds: int) -> dict[str, Any]:
    """Return the launcher's option; versions of torch that lack it wait for 30 seconds."""
    known = "shutdown_timeout" in launch_config.__dataclass_fields__
    return {"shutdown_timeout": seconds} if known else {}


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


def _reports_of(result: list[RunReport] | ConfigError) -> list[RunReport]:
    if isinstance(result, ConfigError):
        raise result
    return result


def _rank_main(runs: list[tuple[str, TrainConfig]], kind: str) -> list[RunReport] | ConfigError:
    """Be one rank, from the environment that the launcher set.

    What only a rank can find wrong (such as the contents of an indexed dataset) every rank finds
    alike; it is returned, so that the launcher reports it as bad input and not as a crash. A rank
    that a signal stopped exits here: returning would mean that the run is done.
    """
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

"""Starts the ranks of a run, or joins those that torchrun started.

Owns the step from one command to many processes and their reports back. Must not know what a run
does beyond `run_training`.

Invariant: every `ConfigError` is raised before the first process is started.
Read next: `megatron_offload.train.loop`.
"""

from __future__ import annotations

import os
import tempfile
import uuid
import warnings
from collections.abc import Sequence

from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.train.config import TrainConfig, check_ranks
from megatron_offload.train.records import RunReport

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
    """
    from megatron_offload.train.parallel import check_device

    first = runs[0][1]
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for _, config in runs:
            check_ranks(config, int(os.environ["WORLD_SIZE"]))
        kind = check_device(first, local, can_hide=False)
        reports = _reports_of(_rank_main(list(runs), kind))
        return reports if int(os.environ["RANK"]) == 0 else None
    for _, config in runs:
        check_ranks(config, first.default_ranks)
        _make_output(config)
    kind = check_device(first, first.default_ranks, can_hide=True)
    return _start_ranks(list(runs), kind, first.default_ranks)


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

    # One OpenMP thread unless the user says more: ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(runs[0][1].run.threads))
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
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        results = elastic_launch(config, _rank_main)(runs, kind)
    except ChildFailedError as error:
        raise RankFailedError(f"a rank failed:\n{error}") from error
    except SignalException as error:
        raise RankFailedError(f"stopped by signal {int(error.sigval)}; the ranks too") from error
    return _reports_of(results[0])


def _reports_of(result: list[RunReport] | ConfigError) -> list[RunReport]:
    if isinstance(result, ConfigError):
        raise result
    return result


def _rank_main(runs: list[tuple[str, TrainConfig]], kind: str) -> list[RunReport] | ConfigError:
    """Be one rank, from the environment that the launcher set.

    What only a rank can find wrong (such as the contents of an indexed dataset) every rank finds
    alike; it is returned, so that the launcher reports it as bad input and not as a crash.
    """
    # megatron-core says on every import which optional libraries it does without.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    from megatron_offload.train.loop import run_training
    from megatron_offload.train.parallel import open_process_group

    with open_process_group(kind, runs[0][1].run.threads) as device:
        try:
            return [run_training(config, device, title) for title, config in runs]
        except ConfigError as error:
            return error

"""Starts the ranks of a run on this machine, and hands back their reports.

A signal ends a rank at once, but for SIGINT while it starts, which waits until torch is imported.
Torch's launcher forwards what it gets to its ranks; where it is killed itself, the system sends its
ranks SIGINT.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_offload.errors import ConfigError, OffloadError, TargetError, require
from megatron_offload.report.console import console
from megatron_offload.train.config import TrainConfig, check_ranks
from megatron_offload.train.records import COMPARISON_NAME, RunReport
from megatron_offload.train.run_folder import check_output, locked

if TYPE_CHECKING:
    import torch

Runs = Sequence[tuple[str, TrainConfig]]
"""Runs to take one after the other in the same processes, each with its title."""

# What torch's launcher handles while ranks run, and ever after.
_HANDLED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
# What only ranks can find wrong, by the name in the launcher.
_OF_INPUT = {error.__name__: error for error in (ConfigError, TargetError)}


class RankFailedError(OffloadError, RuntimeError):
    """A training process ended with an error; the text holds its traceback."""


class StoppedError(OffloadError, RuntimeError):
    """A run was stopped by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number


@contextlib.contextmanager
def launch(runs: Runs, comparison: Path | None = None) -> Iterator[list[RunReport]]:
    """Take every run in turn on all ranks; their folders are locked inside this context.

    The runs agree in ``parallel`` and in the device; ``comparison`` is the folder of the comparison
    that they are for, if they are. Yields a report of each.

    Raises:
        ConfigError: a run that can't be started; nothing was.
        RankFailedError: a rank failed.
        StoppedError: a signal ended the run.
    """
    require("training", "megatron.core")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "this starts its own ranks: call it without torchrun; over several machines train a "
            "program of your own, under 'megatron-offload run'"
        )
    first = runs[0][1]
    ranks = first.parallel.ranks or first.parallel.pipeline
    for _, config in runs:
        check_ranks(config, ranks)
    kind = _check_device(first, ranks)
    folder = comparison or first.run.output
    with locked(folder):
        check_output(folder, is_for_comparison=comparison is not None)
        out = console(stderr=True)
        if kind == "cpu" and first.run.device == "auto":
            out.print(
                "megatron-offload: there is no CUDA device: training on the CPU, where the device "
                "is simulated and a model made for GPUs takes very long; run.device: cpu says that "
                "this is meant"
            )
        if comparison is not None and (comparison / COMPARISON_NAME).exists():
            (comparison / COMPARISON_NAME).unlink()
            out.print(f"compare: replaces the comparison in {comparison}")
        yield _start_ranks(runs, kind, ranks)


def _start_ranks(runs: Runs, kind: str, ranks: int) -> list[RunReport]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if kind == "cpu":
        # The ranks inherit it: megatron-core and the offload backend both look for a device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="train",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    logging.disable(logging.ERROR)  # of what torch logs here, the error that it raises says all
    try:
        with _interrupts_wait_in_ranks():
            reports: list[RunReport] = elastic_launch(config, _rank_main)(runs, kind)[0]
    except ChildFailedError as error:
        # The launcher may see that ranks have ended before it gets a signal that all were sent.
        codes = {-failure.exitcode for failure in error.failures.values()}
        if len(codes) == 1 and codes <= {signal.SIGTERM, signal.SIGINT}:
            raise StoppedError(codes.pop()) from error
        said: Any = error.get_first_failure()[1].message  # a text where a signal has ended it
        name, _, text = (said if isinstance(said, str) else said["message"]).partition(": ")
        if name in _OF_INPUT:
            raise _OF_INPUT[name](text) from error
        raise RankFailedError(f"a rank failed:\n{error}") from error
    except SignalException as error:
        raise StoppedError(error.sigval) from error
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return reports


@contextlib.contextmanager
def _interrupts_wait_in_ranks() -> Iterator[None]:
    """Let processes that start inside put SIGINT off until they ask for it; a thread takes ours.

    Else one that comes while a rank still imports torch ends it with a traceback.
    """
    resource_tracker.ensure_running()  # the start of this, with the first rank, lets SIGINT through
    is_over = threading.Event()
    threading.Thread(target=is_over.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        is_over.set()


def _rank_main(runs: Runs, kind: str) -> list[RunReport]:
    """Be one rank, from the environment that the launcher set; an error ends all of them."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A Ctrl-C or the end of the launcher ends a rank at once, and without its traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if not parent.is_alive():
            raise SystemExit(128 + signal.SIGINT)
    # megatron-core says on every import which optional libraries it does without.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    reports: list[RunReport] = []
    with open_process_group(kind, runs[0][1].run.timeout_s) as device:
        # Only now: TransformerEngine, which it imports, looks at the environment and the device.
        from megatron_offload.train.loop import run_training

        try:
            for title, config in runs:
                before = reports if len(reports) == len(runs) - 1 else None
                reports.append(run_training(config, device, title, before))
        except RuntimeError as error:
            if re.search("gloo|NCCL|onnection", str(error)):
                time.sleep(3.0)  # another rank has failed: the launcher must see it first
            raise
    return reports


def _check_device(config: TrainConfig, ranks: int) -> str:
    """Return ``"cuda"`` or ``"cpu"`` for a run of so many processes on this machine."""
    import torch

    wanted = config.run.device
    found = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if found else "cpu"
    if wanted == "cuda" and found < ranks:
        raise ConfigError(
            f"{ranks} ranks on this machine need as many CUDA devices, and it has {found}; "
            f"lower parallel.ranks or set run.device: cpu"
        )
    return wanted


@contextlib.contextmanager
def open_process_group(kind: str, timeout_s: float = 600.0) -> Iterator[torch.device]:
    """Join all ranks, from the environment that a launcher set; leaves the group at the end.

    Yields this rank's device.
    """
    import torch

    local_rank = int(os.environ["LOCAL_RANK"])
    # cuBLAS and TransformerEngine read these once; without them equal runs may differ in bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if kind == "cuda" else None,
    )
    torch.set_num_threads(1)  # ranks share the cores, and sums on a CPU hang on the number
    yield device
    # Not behind an error: others would fail of that, and might be reported, before it is written.
    torch.distributed.destroy_process_group()

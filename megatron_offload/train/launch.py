"""Starts the ranks of a run on this machine, and waits for them.

A signal to the command ends all ranks, unless it was started to ignore that, as by nohup or in the
background of a script. Where it is killed, the system kills them.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_offload.errors import ConfigError, OffloadError, require
from megatron_offload.files.strict_model import read_model, write_model
from megatron_offload.observe.run_report import FACTS_NAME, RunFacts
from megatron_offload.report.console import console
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import COMPARISON_NAME, StepRecord, compare_steps
from megatron_offload.train.run_folder import check_output, locked

if TYPE_CHECKING:
    import torch

Runs = Sequence[tuple[str, TrainConfig]]
"""Runs to take one after the other in the same processes, each with its title."""


class RankFailedError(OffloadError, RuntimeError):
    """A training process ended with an error; the text holds its traceback."""


@contextlib.contextmanager
def launch(runs: Runs, comparison: Path | None = None) -> Iterator[list[RunFacts]]:
    """Take every run in turn on all ranks; their folders are locked inside this context.

    The runs agree in ``parallel`` and in the device; ``comparison`` is the folder in which the last
    two are compared, if they are. Yields what each comes to.

    Raises:
        ConfigError: a run that can't be started, or that a rank has found wrong.
        RankFailedError: a rank failed.
    """
    require("training", "megatron.core")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "this starts its own ranks: call it without torchrun; over several machines train a "
            "program of your own, under 'megatron-offload run'"
        )
    first = runs[0][1]
    kind = _check_device(first)
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
        _start_ranks(runs, kind, comparison)
        yield [read_model(RunFacts, config.run.output / FACTS_NAME) for _, config in runs]


def _stop(number: int, frame: object) -> None:
    console(stderr=True).print(f"megatron-offload: stopped by {signal.Signals(number).name}")
    sys.exit(128 + number)


def _start_ranks(runs: Runs, kind: str, comparison: Path | None) -> None:
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

    if kind == "cpu":
        # The ranks inherit it: megatron-core and the offload backend both look for a device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    num_ranks = runs[0][1].parallel.pipeline
    refused, refusals = multiprocessing.Pipe(duplex=False)
    processes: Sequence[multiprocessing.Process] = ()
    logging.disable(logging.WARNING)  # of what torch logs here, the error that it raises says all
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = {"world_size": num_ranks, "init_method": f"file://{folder}/store"}
            both = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # as on Windows
            ends = [number for number in both if signal.getsignal(number) != signal.SIG_IGN]
            handlers = {number: signal.signal(number, _stop) for number in ends}
            # Ranks ignore it too, while they start: no traceback from amid their imports.
            handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
            is_ignored = handlers[signal.SIGINT] == signal.SIG_IGN
            given = is_ignored, refusals, place, (runs, kind, comparison)
            try:
                started = spawn(_rank_main, given, num_ranks, join=False)
                processes = started.processes
                signal.signal(signal.SIGINT, handlers[signal.SIGINT])
                while not started.join():
                    pass
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
    except (ProcessExitedException, ProcessRaisedException) as error:
        if refused.poll():
            raise refused.recv() from error
        raise RankFailedError(f"a rank failed: {error}") from error
    finally:
        for process in processes:
            process.kill()
            process.join()
        logging.disable(logging.NOTSET)


def _rank_main(rank: int, ignores: bool, refusals: Any, place: dict[str, Any], what: Any) -> None:
    """Be one rank; an error ends all of them, and one of input goes to ``refusals``."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    if not ignores:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, and without a traceback
    _prctl_pr_set_pdeathsig(getattr(signal, "SIGKILL", signal.SIGTERM))  # torch's is SIGINT
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    if what[1] == "cpu":  # libraries by which megatron-core would run kernels that need a GPU
        sys.modules.update(dict.fromkeys(("transformer_engine", "apex")))  # type: ignore[arg-type]
    try:
        train_runs(*what, rank=rank, **place)
    except ConfigError as error:
        refusals.send(error)
        raise


def train_runs(runs: Runs, kind: str, comparison: Path | None, **place: Any) -> None:
    """Take every run as one rank, as `launch` says; ``place`` is as for `open_process_group`."""
    # megatron-core says on every import which optional libraries it does without.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    done: list[Sequence[StepRecord]] = [()]
    with open_process_group(kind, **place) as device:
        # Only now: TransformerEngine, which it imports, looks at the environment and the device.
        from megatron_offload.machine.job_ranks import rank_in
        from megatron_offload.train.loop import run_training

        try:
            for title, config in runs:
                before = done[-1] if len(done) == len(runs) else None
                done.append(run_training(config, device, title, before))
        except RuntimeError as error:
            if re.search("gloo|NCCL|onnection", str(error)):
                time.sleep(3.0)  # another rank has failed: the launcher must see it first
            raise
        if comparison and rank_in() == 0:
            write_model(comparison / COMPARISON_NAME, compare_steps(*done[-2:]))


def _check_device(config: TrainConfig) -> str:
    """Return ``"cuda"`` or ``"cpu"`` for a run on this machine."""
    import torch

    wanted, ranks = config.run.device, config.parallel.pipeline
    found = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if found else "cpu"
    if wanted == "cuda" and found < ranks:
        raise ConfigError(
            f"{ranks} ranks on this machine need as many CUDA devices, and it has {found}; "
            f"lower parallel.pipeline or set run.device: cpu"
        )
    return wanted


@contextlib.contextmanager
def open_process_group(kind: str, **place: Any) -> Iterator[torch.device]:
    """Join all ranks, by what `torch.distributed.init_process_group` is to be given beside.

    Yields this rank's device; leaves the group at the end.
    """
    import torch

    # cuBLAS and TransformerEngine read these once; without them equal runs may differ in bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    device = torch.device("cpu")
    if kind == "cuda":
        device = place["device_id"] = torch.device("cuda", place["rank"])
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo", **place)
    torch.set_num_threads(1)  # ranks share the cores, and sums on a CPU hang on the number
    yield device
    # Not behind an error: others would fail of that, and might be reported, before it is written.
    torch.distributed.destroy_process_group()

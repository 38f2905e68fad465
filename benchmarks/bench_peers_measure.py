"""What the workers of `bench_peers.py` share: a mode's steps are taken, its numbers are written.

A failure is written to the rank's file as well, and ends the process at once, so that no rank waits
for another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from bench_peers_modes import torch_pinned_bytes

from megatron_offload.files.text import replace_text


def numbers_of(spec, program, started):
    """Take all steps; return what this rank took and held.

    ``started`` is when the mode began, in seconds of `time.perf_counter`.
    """
    mode, on_gpu = program.mode, program.device.type == "cuda"
    gc.collect()
    program.synchronize()
    setup_s = time.perf_counter() - started
    steps, peaks, first_peaks = measure(spec, program, on_gpu)
    steps_s = time.perf_counter() - started - setup_s
    times = [step[0] for step in steps[spec["warmup"] :]]
    measured = mode.report()  # before the examination, whose step is none of the measured
    if spec["examine"]:
        with mode.examined(spec["rank"]):
            program.step(len(steps))
    follows = spec["kind"] in ("ours-auto", "ours-rows")
    return {
        "rank": spec["rank"],
        "step_ms": program.average(times),
        "steps_ms": [step[0] for step in steps],
        "turns_ms": take_turns(spec, program) if follows else [],
        "losses": [step[1] for step in steps],
        "gradient_hashes": [step[2] for step in steps],
        "peak_allocated_bytes": peaks[0],
        "peak_reserved_bytes": peaks[1],
        "overall_peak_allocated_bytes": first_peaks[0],
        "overall_peak_reserved_bytes": first_peaks[1],
        "torch_pinned_bytes": torch_pinned_bytes(),
        "setup_s": setup_s,
        "steps_s": steps_s,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "versions": versions(),
        **measured,
        **mode.examination,
    }


def measure(spec, program, on_gpu):
    """Take all steps; return them, the peaks after warm-up, and the peaks of all steps."""
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = []
    before = (0, 0)
    for number in range(spec["warmup"] + spec["steps"]):
        if number == spec["warmup"]:
            if not spec.get("whole_step_graph"):  # whose replays count nothing
                program.mode.begin_measured()
            if on_gpu:
                before = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
                torch.cuda.reset_peak_memory_stats()
        if number == spec["warmup"] - 1:
            program.capture_next()
        take = functools.partial(program.step, number)
        steps.append(program.mode.take_step(take) if number < spec["warmup"] else take())
    if not on_gpu:
        return steps, (None, None), (None, None)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return steps, peaks, (max(before[0], peaks[0]), max(before[1], peaks[1]))


def take_turns(spec, program):
    """Return the times of more steps: of each four the second and third are without rows."""
    times_ms = []
    for number in range(4 * spec["turns"]):
        program.mode.follow(is_on=number % 4 in (0, 3))
        times_ms.append(program.timed_step(number)[0])
    return times_ms


def versions():
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("megatron-core", "transformer-engine", "transformers", "peft", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    core = sys.modules.get("megatron.core")
    if core is not None and hasattr(core, "__version__"):
        found["megatron-core"] = core.__version__.partition("+")[0]
    return found


def work(modules, run):
    """Take each mode of the file that the command names, when a line of input lets it go.

    Args:
        modules: the names of those that ``run`` needs, which take long to import.
        run: returns a mode's numbers on a rank.
    """
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    logging.basicConfig(format="%(relativeCreated)8d ms %(name)s: %(message)s")
    logging.getLogger("megatron_offload").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    for name in modules:
        importlib.import_module(name)
    result_path = Path(spec["results"]) / f"rank{rank}.json"
    for mode in spec["modes"]:
        if not sys.stdin.readline():  # the process that started this one is gone
            return
        # A hang leaves in the log where it was.
        faulthandler.dump_traceback_later(max(1.0, spec["timeout_s"] - 5))
        try:
            result = run({**spec, **mode, "rank": rank}, rank)
        except BaseException as error:  # noqa: BLE001 - every failure is a row of the table
            traceback.print_exc()
            write(result_path, {"rank": rank, "error": reason_of(error)})
            sys.stdout.flush()
            sys.stderr.flush()
            # Leaving the communicators to their destructors could wait for ranks that wait too.
            os._exit(1)
        write(result_path, result)
        sys.stdout.flush()
        sys.stderr.flush()
        result_path.with_name(f"done{rank}").touch()
    os._exit(0)  # the kernel takes memory back sooner than destructors give it


def reason_of(exception):
    text = (str(exception).strip() or "no message").splitlines()[0]
    return f"{type(exception).__name__}: {text}"


def write(path, data):
    replace_text(path, json.dumps(data))

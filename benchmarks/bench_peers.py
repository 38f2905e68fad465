"""This package beside what people use today: one command, one JSON, one table, one picture.

    python3 benchmarks/bench_peers.py --shape a --modes none recompute ours-auto --output DIR
    python3 benchmarks/bench_peers.py --shape lora --length 1900 --modes none checkpoint ours-auto

A mode is one of the names below, and for this package's own any fields of `OffloadConfig` behind a
colon, such as ``ours-all:max_inflight_bytes=1GiB,prefetch_bytes=2GiB,fraction=0.8``. Values behind
one another, as in ``prefetch_bytes=2GiB|1GiB``, are those of pipeline ranks 0, 1 and those behind:

    none         no offload; what all others are compared with
    ours-auto    this package, which finds rows by itself, as `megatron-offload run` does; or as
                 in ours-auto:policy.most_slowdown_percent=8,modules=core_attn+moe_act
    ours-target  the same for a size, as in ours-target:policy.memory_target=20GiB
    ours-recompute
                 all of attention and MLP moved, but the default units, which are recomputed; or as
                 in ours-recompute:recompute=norm+mlp_act
    ours-inputs  the inputs of layers moved, with --full-recompute, which is for all modes
    ours-all     all of attention and MLP moved
    ours-five    Megatron's five modules of a dense layer moved
    ours-whole   this package's OffloadActivations, as in ours-whole:max_fwd_stash_size=3
    ours-rows    rows by hand, as in "ours-rows:{layers: 0-3, site: mlp, recompute: true}"
    ours         any modules, as ours-recompute, as in ours:modules=mlp_fc1+mlp_act+mlp_fc2
    megatron     megatron-core's own offload, the same five, or as for ours; its trainer asks for
                 NVTE_CPU_OFFLOAD_V1=1, megatron:te_v1=0 goes without
    te           TransformerEngine's cpu_offloading, all layers but one; PP=1 only
    trl          TRL's OffloadActivations, where it is installed; PP=1 only
    save_on_cpu  torch.autograd.graph.save_on_cpu(pin_memory=True) around each forward
    recompute    full recompute, layer by layer
    checkpoint   the same by transformers: its gradient checkpointing, which is not reentrant
    recompute-layers:K
                 of the first K layers of each stage, by Megatron's block method or transformers
    selective:NAME,NAME
                 Megatron's recompute_modules, its norms and its dense MLP unless named; of a
                 model of transformers these parts of each layer by torch's checkpoint, or its MLP
    compile:BUDGET
                 layers compiled, with torch's budget for what they save, a share of all; with this
                 package's rows too by a setting, as in ours-auto:compile=1.0

Shape ``lora`` is a Llama of a billion random parameters with adapters (transformers, peft; those
of ``lora-own`` are of a class of its own), in plain PyTorch. With ``--length`` all steps have so
many tokens, and one process takes all modes, one after the other. Else each step has a length drawn
from a fourth of ``--seq`` to ``--seq``, ``ms`` is the mean of the measured steps, and lines behind
the table compare all steps one by one.

A mode that plans takes more steps at the begin of the warm-up, all of the same microbatches;
``--timeout`` has to leave time for them.

Modes run in processes of their own, which import what they need while the mode before them runs.
One that fails or takes too long is a row with its reason. ``--rounds`` takes them in turns, and
medians count. What hasn't begun by ``--limit`` is left out. Peaks and what the host holds are the
most of the measured steps; in warm-up nothing is learned yet. R is the drop of the peak against
``none`` over the most bytes off the device. Megatron's modes measure the link to the host first.

``--examine`` adds a step outside the measured ones to this package's own modes: it is traced, to
``traces/MODE/trace_RANK.json``, for https://ui.perfetto.dev, and the table has its stalls by cause
and the copies' bandwidths. With ``--deterministic`` speed and bits come from one run: kernels give
the same bits each time, and the command ends with exit code 1 if a mode of this package gives
others than ``none``.
``--turns`` adds steps with the rows of ``ours-auto`` and ``ours-rows`` and without by turns, in one
process: where steps differ, that tells what rows take. It is the line behind the table.
``--whole-step-graph`` captures a step into a CUDA graph, by megatron-core's own wrapper, and
measures its replays.
``--device cpu --shape tiny`` (or ``lora-tiny``) runs the same program without a GPU, on the
simulated device. The picture needs Altair, and is left out without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import bench_peers_options
from bench_peers_options import named_modules, num_ranks, options_of_rank
from bench_peers_table import rows, table

ROOT = Path(__file__).resolve().parent.parent
WORKERS = {
    None: Path(__file__).with_name("bench_peers_worker.py"),
    "llama": Path(__file__).with_name("bench_peers_lora.py"),
}
"""By kind of model what runs it."""
SINGLE_STAGE = ("te", "trl")
GRACE_S = 3.0


def parse_arguments(arguments=None):
    return bench_peers_options.parse_arguments(__doc__, arguments)


def in_turns(options):
    """Return lists of modes, each with its round: those of a list share their processes.

    Every second round runs the modes backwards, but none, without which the others tell nothing.
    """
    each = []
    for number in range(options.rounds):
        specs = options.specs if number % 2 == 0 else options.specs[::-1]
        each += [(spec, number) for spec in sorted(specs, key=lambda one: one["kind"] != "none")]
    return [each] if each and "length" in options.sizes else [[one] for one in each]


def left_out(options, spec):
    """Return why a mode can't run here; None where it can."""
    if spec["kind"] in SINGLE_STAGE and options.sizes["pp"] > 1:
        return "knows no pipeline parallelism"
    if spec["kind"] == "trl" and importlib.util.find_spec("trl") is None:
        return "not installed"
    return None


class ModeRun:
    """Modes in processes of their own, which import what they need and wait for each turn.

    Args:
        todo: modes, each with its round, that run one after the other in the same processes.
        ends_at: when all of them end at last, in seconds of the monotonic clock.
    """

    def __init__(self, options, todo, ends_at=math.inf):
        self._options, self._todo, self._ends_at = options, todo, ends_at
        self._folder = tempfile.TemporaryDirectory()
        logs = options.output / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        path = Path(self._folder.name) / "spec.json"
        whole = {**options.sizes, "results": self._folder.name, "timeout_s": options.timeout}
        for name in ("device", "steps", "warmup", "seed", "deterministic", "examine", "turns"):
            whole[name] = getattr(options, name)
        path.write_text(json.dumps(whole | {"modes": [spec for spec, _ in todo]}))
        label = self._label(*todo[0])
        self._logs = [logs / f"{label}.rank{rank}.log" for rank in range(num_ranks(options))]
        worker = WORKERS[options.sizes.get("model")]
        self._ranks = Ranks(
            [sys.executable, str(worker), str(path)],
            worker_environment(options, todo[0][0]),
            self._logs,
            share_gpu=options.share_gpu,
        )

    def _label(self, spec, number):
        words = re.sub(r"[^\w.=-]+", "_", spec["mode"])[:80]  # file names have an end
        return f"{self._options.modes.index(spec['mode'])}_{words}.{number}"

    def finish(self):
        """Run the modes; yield a record of each, whatever happened.

        Where one fails, those behind it run in new processes.
        """
        with self._folder as folder:
            for place, (spec, number) in enumerate(self._todo, 1):
                if time.monotonic() >= self._ends_at:
                    self._ranks.end()
                    return
                record = {"mode": spec["mode"], "repetition": number}
                record |= self._take(Path(folder), self._label(spec, number))
                yield record
                if record["status"] != "ok":
                    rest = [one for one in self._todo[place:] if one[0] is not spec]
                    if rest and time.monotonic() < self._ends_at:
                        yield from ModeRun(self._options, rest, self._ends_at).finish()
                    return

    def _take(self, folder, label):
        started = time.monotonic()
        limit_s = min(self._options.timeout, self._ends_at - started)
        status, rank = self._ranks.run(
            limit_s, is_done=lambda: len(list(folder.glob("done*"))) == len(self._logs)
        )
        result = {"status": status, "seconds": time.monotonic() - started}
        if status == "ok":
            return result | {"error": None, "ranks": self._collect(folder, label)}
        error = f"after {limit_s:.3g} s"
        if rank is not None:
            file = folder / f"rank{rank}.json"
            reason = json.loads(file.read_text()).get("error") if file.exists() else None
            error = f"rank {rank}: {reason or last_line(self._logs[rank])}"
        return result | {"error": error}

    def _collect(self, folder, label):
        """Keep what the ranks have left beside their numbers, which are returned."""
        for kind in ("trace", "plan"):
            if files := sorted(folder.glob(f"{kind}*.json")):
                keep(files, self._options.output / f"{kind}s" / label)
        files = [folder / f"rank{rank}.json" for rank in range(len(self._logs))]
        found = [json.loads(file.read_text()) for file in files]
        for file in folder.glob("done*"):
            file.unlink()
        for file in files:
            file.unlink()
        return found


def keep(paths, folder):
    """Put files into a folder of their own, in the place of older ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in paths:
        shutil.copyfile(path, folder / path.name)


def last_line(log):
    """Return the last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "ended without a word")


def worker_environment(options, spec):
    environment = dict(os.environ)
    places = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(num_ranks(options)),
        "LOCAL_WORLD_SIZE": str(num_ranks(options)),
        "NVTE_CPU_OFFLOAD_V1": spec["te_v1"],
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    # A program that uses NVLink multicast can put a shared host's GPUs out of service.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    # Whatever the caller has set: attention's deterministic backward takes more memory.
    exact = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for name, value in exact.items():
        environment.pop(name, None)
        environment |= {name: value} if options.deterministic else {}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _free_port():
    # Not one that the kernel gives out to others meanwhile: those begin at 32768.
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Ranks:
    """One process a rank, which may wait for a line of input before it takes the device.

    Args:
        logs: A file for each rank's output.
        shows_first: whether the first rank's output is this process's instead.
        share_gpu: whether all take the first GPU. NCCL refuses two ranks on one GPU of a host, so
            each is a host of its own to it, and they talk by sockets.
    """

    def __init__(self, command, environment, logs, *, shows_first=False, share_gpu=False):
        self._processes = []
        for rank, log in enumerate(logs):
            ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if share_gpu:
                ranked |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{rank}"}
                ranked |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            with log.open("w") as file:
                process = subprocess.Popen(
                    command,
                    env=ranked,
                    stdin=subprocess.PIPE,
                    stdout=None if shows_first and rank == 0 else file,
                    stderr=file,
                    start_new_session=True,
                )
            self._processes.append(process)

    def run(self, timeout_s=math.inf, *, is_done=lambda: False):
        """Let all go once; return ("ok" | "failed" | "timed out", the rank that failed first).

        Ranks that are done with their work may still be ending: the driver takes ten seconds for
        a process that had a GPU.
        """
        deadline, result = time.monotonic() + timeout_s, ("timed out", None)
        try:
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(b"go\n")
                    process.stdin.flush()
            while time.monotonic() < deadline:
                codes = [process.poll() for process in self._processes]
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed:  # others may have something to say as well
                    time.sleep(min(GRACE_S, max(0.0, deadline - time.monotonic())))
                    return "failed", failed[0]
                if all(code == 0 for code in codes) or is_done():
                    result = "ok", None
                    return result
                time.sleep(0.1)
            return result
        finally:
            if result[0] != "ok":
                self.end()

    def end(self):
        """End all at once."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main():
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    check_settings(options)
    ends_at = time.monotonic() + options.limit
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "shape": options.shape,
        "sizes": options.sizes,
        "steps": options.steps,
        "warmup": options.warmup,
        "deterministic": options.deterministic,
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("NVTE_", "NCCL_", "PYTORCH_", "CUDA_", "CUBLAS_"))
        },
        "runs": [],
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    reasons = {spec["mode"]: left_out(options, spec) for spec in options.specs}
    options.specs = [spec for spec in options.specs if reasons[spec["mode"]] is None]
    waiting = None
    for following in [*in_turns(options), None]:
        run, waiting = waiting, following and ModeRun(options, following, ends_at)
        for record in run.finish() if run else ():
            report["runs"].append(record)
            took = f"{record.get('seconds', 0):.0f} s"
            print(f"{record['mode']}: {record['error'] or record['status']}, {took}", flush=True)
            save(report, options.output)
    for mode in set(options.modes) - {run["mode"] for run in report["runs"]}:
        record = {"mode": mode, "repetition": 0, "status": "left out"}
        report["runs"].append(record | {"error": reasons[mode] or "no time left"})
    save(report, options.output)
    print((options.output / "bench_peers.txt").read_text())
    draw(options.output / "bench_peers.json")
    others = [run["mode"] for run in report["rows"] if run.get("bitwise") is False]
    if options.deterministic and any(mode.startswith("ours") for mode in others):
        sys.exit(f"other bits than without offload: {', '.join(dict.fromkeys(others))}")


def draw(path):
    """Draw what a file has beside it, where there is Altair."""
    try:
        from draw_memory_against_time import picture

        picture([path]).save(path.with_suffix(".svg"))
    except Exception as error:  # noqa: BLE001 - it can be drawn of the file later
        print(f"no picture: {error}")


def check_settings(options):
    """End at once, before any process, on a setting of this package that is wrong."""
    sys.path.insert(0, str(ROOT))
    from megatron_offload.config import MEGATRON_MODULES, OffloadConfig, apply_overrides
    from megatron_offload.errors import ConfigError
    from megatron_offload.files.strict_model import validate

    for spec in options.specs:
        unknown = set(spec["modules"]) - set(MEGATRON_MODULES)
        if spec["kind"] == "megatron" and unknown:
            sys.exit(f"{spec['mode']}: megatron-core has no modules {', '.join(sorted(unknown))}")
        if spec["kind"].startswith("ours"):
            for rank in range(num_ranks(options)):
                try:
                    data = apply_overrides({}, options_of_rank(spec["options"], rank))
                    validate(OffloadConfig, data | named_modules(spec), spec["mode"])
                except ConfigError as error:
                    sys.exit(str(error))


def save(report, folder):
    """Write both files at once or not at all, so that a killed run keeps what it has."""
    from megatron_offload.files.text import replace_text

    report["rows"] = rows(report["runs"])
    replace_text(folder / "bench_peers.json", json.dumps(report, indent=1))
    replace_text(folder / "bench_peers.txt", table(report))


if __name__ == "__main__":
    main()

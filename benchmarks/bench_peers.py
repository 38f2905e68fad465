"""This package beside what people use today: one command, one JSON, one table.

    python3 benchmarks/bench_peers.py --shape a --modes none recompute ours-auto --output DIR

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
    ours-five    Megatron's five modules of a dense layer (or --modules) moved
    ours-whole   this package's OffloadActivations, as in ours-whole:max_fwd_stash_size=3
    ours-rows    rows by hand, as in "ours-rows:{layers: 0-3, site: mlp, recompute: true}"
    ours         any modules, as ours-recompute: --modules, or ours:modules=mlp_fc1+mlp_act+mlp_fc2
    megatron     megatron-core's own offload, the same five (or --modules, or as for ours); its
                 trainer asks for NVTE_CPU_OFFLOAD_V1=1, megatron:te_v1=0 goes without
    te           TransformerEngine's cpu_offloading, all layers but one; PP=1 only
    trl          TRL's OffloadActivations, where it is installed; PP=1 only
    save_on_cpu  torch.autograd.graph.save_on_cpu(pin_memory=True) around each forward
    recompute    full recompute, layer by layer
    recompute-layers:K
                 of the first K layers of each stage, by Megatron's block method
    recompute-selective
                 Megatron's recompute_modules: its norms and its dense MLP, or as in
                 recompute-selective:modules=core_attn

A mode that plans takes up to ten steps more at the begin of the warm-up, all of the same
microbatches; ``--timeout`` has to leave time for them.

Each mode runs in processes of its own, which import what they need while the mode before them runs.
One that fails or takes too long is a row with its reason. Peaks and what the host holds are the
most of the measured steps; in warm-up nothing is learned yet. R is the drop of the peak against
``none`` over the most bytes off the device. Each mode begins by measuring what the link to the
host gives all ranks together.

``--examine`` adds a step outside the measured ones to this package's own modes: it is traced, to
``traces/MODE/trace_RANK.json``, for https://ui.perfetto.dev, and the table has its stalls by cause
and the copies' bandwidths. With ``--deterministic`` speed and bits come from one run: kernels give
the same bits each time, and the command ends with exit code 1 if a mode of this package gives
others than ``none``.
``--turns`` adds steps with the rows of ``ours-auto`` and ``ours-rows`` and without by turns, in one
process: where steps differ, that tells what rows take. It is the line behind the table.
``--whole-step-graph`` captures a step into a CUDA graph, by megatron-core's own wrapper, and
measures its replays.
``--device cpu --shape tiny`` runs the same program without a GPU, on the simulated device.
"""

from __future__ import annotations

import argparse
import contextlib
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

from bench_peers_table import rows, table

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("bench_peers_worker.py")
FIVE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
ALL = (
    *("mlp_fc1", "mlp_act", "mlp_fc2", "**.self_attention.linear_qkv"),
    *("**.self_attention.core_attention", "**.self_attention.linear_proj"),
)
"""All of attention and MLP: what a dense layer computes between its residuals."""
LAUNCHED = ("qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2")
"""What `megatron-offload run` names of a dense layer; the run finds rows in it."""
KINDS = {
    "none": (),
    "ours-auto": LAUNCHED,
    "ours-target": LAUNCHED,
    "ours-recompute": ALL,
    "ours-inputs": ("layer_input",),
    "ours-all": ALL,
    "ours-five": FIVE,
    "ours-rows": LAUNCHED,
    "ours-whole": (),
    "ours": FIVE,
    "megatron": FIVE,
    "te": (),
    "trl": (),
    "save_on_cpu": (),
    "recompute": (),
    "recompute-layers": (),
    "recompute-selective": ("layernorm", "mlp"),
}
"""By mode the modules that it offloads, or recomputes, where nothing else is said."""
SETTINGS = {
    "ours-auto": ("policy.kind=auto",),
    "ours-target": ("policy.kind=memory_target",),
    "ours-recompute": ("policy.kind=modules",),
    "ours-inputs": ("policy.kind=modules",),
    "ours-all": ("policy.kind=modules", "recompute=[]"),
    "ours-five": ("policy.kind=modules", "recompute=[]"),
    "ours": ("policy.kind=modules",),
}
"""By mode the settings that are its own."""
CHOOSES_MODULES = ("ours", "ours-auto", "ours-target", "megatron", "recompute-selective")
WHOLE_SETTING = {"ours-rows": "rows", "recompute-layers": "layers"}
"""By mode what all behind its colon is."""
SINGLE_STAGE = ("te", "trl")
WHOLE_MODEL_SETTINGS = ("max_fwd_stash_size", "min_offload_size")
GRACE_S = 3.0
SHARE_GPU = "all ranks on one GPU: bits and memory hold, times don't"

_BASE = {"vocabulary": 32000, "dtype": "bf16", "pp": 1, "vpp": 1, "min_elements": 1024 * 1024}
_BASE |= {"dp": 1, "ep": 1}
_BASE |= {"normalization": "RMSNorm", "positions": "rope"}
SHAPES = {
    "a": {**_BASE, "layers": 6, "hidden": 8192, "seq": 4096, "mbs": 2, "microbatches": 2},
    "b": {**_BASE, "layers": 16, "hidden": 4096, "seq": 8192, "mbs": 1, "microbatches": 2},
    "c": {**_BASE, "layers": 16, "hidden": 8192, "seq": 4096, "mbs": 1, "microbatches": 8}
    | {"pp": 4, "vpp": 2},
    # The link is the limit. A token's layer saves some 32 * hidden bytes and takes some
    # 72 * hidden^2 FLOP: at 50 GB/s each way 2.6 us of copies, at 600 TFLOP/s 0.5 us of compute.
    # A microbatch saves 16 GiB, which with all else makes about 28 GiB without offload.
    "d": {**_BASE, "layers": 16, "hidden": 2048, "seq": 4096, "mbs": 4, "microbatches": 2},
    # Where the host's work is the step: some half a millisecond of it a group, with 480 groups.
    "small": {**_BASE, "layers": 24, "hidden": 2048, "seq": 2048, "mbs": 2, "microbatches": 4},
    # Mixture of experts: routing gives their sizes, and the host waits for them.
    "moe": {**_BASE, "layers": 8, "hidden": 2048, "seq": 4096, "mbs": 2, "microbatches": 8}
    | {"pp": 2, "vpp": 2, "experts": 32},
    # Of eight GPUs: (c) twice, and experts that are spread over all.
    "dense8": {**_BASE, "layers": 16, "hidden": 8192, "seq": 4096, "mbs": 1, "microbatches": 8}
    | {"pp": 4, "vpp": 2, "dp": 2},
    "moe8": {**_BASE, "layers": 8, "hidden": 2048, "seq": 4096, "mbs": 2, "microbatches": 4}
    | {"dp": 8, "ep": 8, "experts": 64},
    "bitwise": {**_BASE, "layers": 16, "hidden": 1024, "seq": 2048, "mbs": 1, "microbatches": 8}
    | {"pp": 4, "vpp": 2},
    "tiny": {"layers": 4, "hidden": 64, "heads": 4, "seq": 32, "mbs": 2, "microbatches": 4}
    | {"vocabulary": 128, "dtype": "fp32", "pp": 2, "vpp": 2, "dp": 1, "ep": 1, "min_elements": 1}
    # On a CPU torch's RMSNorm is many operations, which use their input more than once: a group's
    # boundary in front of it changes the order in which those gradients are summed.
    | {"normalization": "LayerNorm", "positions": "rope"},
}
"""Sizes; a head is 128 wide where a shape doesn't say otherwise."""

SIZES = (
    *("layers", "hidden", "heads", "seq", "mbs", "microbatches"),
    *("pp", "vpp", "dp", "ep", "vocabulary", "min_elements"),
)


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    for size in SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, help="in place of the shape's")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="in place of the shape's")
    parser.add_argument("--normalization", choices=("RMSNorm", "LayerNorm"), help="likewise")
    parser.add_argument("--positions", choices=("rope", "none"), help="likewise")
    parser.add_argument(
        "--modes", nargs="+", default=["none", "recompute", "megatron", "ours-all", "ours-auto"]
    )
    parser.add_argument("--full-recompute", action="store_true", help="in every mode, none too")
    parser.add_argument(
        "--whole-step-graph", action="store_true", help="capture the last step of the warm-up"
    )
    parser.add_argument("--modules", nargs="+", help="for ours, ours-five and megatron")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument(
        "--turns", type=int, default=0, help="fours of more steps, two of each without rows"
    )
    parser.add_argument("--repetitions", type=int, default=1, help="odd ones in reverse order")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one mode")
    parser.add_argument("--deterministic", action="store_true", help="kernels; checks bits as well")
    parser.add_argument("--examine", action="store_true", help="trace one more step of ours")
    parser.add_argument("--share-gpu", action="store_true", help=SHARE_GPU)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/peers"), help="a folder; runs/peers unless set"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.warmup < 0 or options.repetitions < 1:
        parser.error("--steps and --repetitions are at least 1, --warmup at least 0")
    if options.whole_step_graph and (options.warmup < 2 or options.examine):
        parser.error("--whole-step-graph takes two steps of warm-up, and looks at no other step")
    options.deterministic |= options.shape == "bitwise"
    try:
        options.sizes = read_sizes(options)
        options.specs = [read_mode(text, options.modules) for text in options.modes]
    except ValueError as error:
        parser.error(str(error))
    in_stage = options.sizes["layers"] // (options.sizes["pp"] * options.sizes["vpp"])
    for spec in options.specs:
        if spec["arguments"].get("layers", 0) > in_stage:
            parser.error(f"{spec['mode']}: a stage has {in_stage} layers")
        if options.device == "cpu" and spec["kind"].startswith("ours"):
            spec["options"].insert(0, "simulated.host_time=true")  # who plans wants times
        if options.whole_step_graph and spec["kind"].startswith("ours"):
            spec["options"].insert(0, "whole_step_graph=true")
    if len(set(options.modes)) != len(options.modes):
        parser.error("a mode is listed twice")
    return options


def read_sizes(options):
    """Return the shape's sizes with what was given in their place."""
    sizes = dict(SHAPES[options.shape])
    for name in (*SIZES, "dtype", "normalization", "positions"):
        if (given := getattr(options, name)) is not None:
            sizes[name] = given
    sizes.setdefault("heads", max(1, sizes["hidden"] // 128))
    sizes["full_recompute"] = options.full_recompute
    sizes["whole_step_graph"] = options.whole_step_graph
    check_sizes(sizes)
    return sizes


def check_sizes(sizes):
    """Raise `ValueError` for what can't run."""
    if min(sizes[name] for name in SIZES) < 1:
        raise ValueError("sizes, PP, VPP, DP and EP are at least 1")
    if sizes["dp"] % sizes["ep"] or sizes.get("experts", sizes["ep"]) % sizes["ep"]:
        raise ValueError("DP and the number of experts are multiples of EP")
    if sizes["hidden"] % sizes["heads"]:
        raise ValueError(f"hidden {sizes['hidden']} is no multiple of {sizes['heads']} heads")
    stages = sizes["pp"] * sizes["vpp"]
    if sizes["layers"] % stages:
        raise ValueError(f"{sizes['layers']} layers don't divide into {stages} stages")
    if sizes["vpp"] > 1 and (sizes["pp"] == 1 or sizes["microbatches"] % sizes["pp"]):
        raise ValueError("VPP above 1 needs PP above 1, and microbatches divisible by PP")


def num_ranks(options):
    """Return how many processes a mode has, each with a GPU."""
    return options.sizes["pp"] * options.sizes["dp"]


def read_mode(text, modules=None):
    """Read ``kind`` or ``kind:key=value,key=value`` into a plain description."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"unknown mode {kind!r}; there are {', '.join(KINDS)}")
    items = [item for item in rest.split(",") if item]
    if kind in WHOLE_SETTING:
        items = [f"{WHOLE_SETTING[kind]}={rest}"]
    if any("=" not in item for item in items):
        raise ValueError(f"{text!r}: settings are key=value, separated by commas")
    chosen = list(modules if modules and KINDS[kind] == FIVE else KINDS[kind])
    options, arguments = list(SETTINGS.get(kind, ())), {}
    te_v1 = "1" if kind == "megatron" else "0"
    for item in items:
        key, _, value = item.partition("=")
        if key == "modules" and kind in CHOOSES_MODULES:
            chosen = value.split("+")
        elif key == "te_v1" and kind == "megatron" and value in ("0", "1"):
            te_v1 = value
        elif key == "layers" and kind == "recompute-layers" and re.fullmatch("[1-9][0-9]*", value):
            arguments[key] = int(value)
        elif kind == "ours-rows" and value.strip():
            options.append(f"rows=[{value}]")
        elif key in WHOLE_MODEL_SETTINGS and kind == "ours-whole" and value.isdigit():
            arguments[key] = int(value)
        elif key == "recompute" and kind.startswith("ours"):
            options.append(f"recompute=[{', '.join(filter(None, value.split('+')))}]")
        elif key != "modules" and kind.startswith("ours"):
            options.append(item)
        else:
            raise ValueError(f"mode {kind!r} takes no {key}={value}")
    return {
        "mode": text,
        "kind": kind,
        "options": options,
        "arguments": arguments,
        "modules": chosen,
        "te_v1": te_v1,
    }


def options_of_rank(options, rank):
    """Return the settings of a rank: of ``key=one|two|three`` its own, or the last."""
    chosen = []
    for option in options:
        key, _, values = option.partition("=")
        several = values.split("|")
        chosen.append(f"{key}={several[min(rank, len(several) - 1)]}")
    return chosen


def named_modules(spec):
    """Return the modules of a mode as a setting of its configuration; rows stand in their place."""
    return {} if spec.get("kind") == "ours-rows" else {"modules": spec["modules"]}


def order_of(specs, repetition):
    """Alternate: every second repetition runs the modes backwards."""
    return list(specs) if repetition % 2 == 0 else list(reversed(specs))


class ModeRun:
    """One mode in processes of its own, which import what they need and wait until `finish`."""

    def __init__(self, options, spec, repetition):
        self._options, self._spec = options, spec
        self._record = {"mode": spec["mode"], "repetition": repetition, "status": "ok"}
        words = re.sub(r"[^\w.=-]+", "_", spec["mode"])[:80]  # file names have an end
        self._label = f"{options.modes.index(spec['mode'])}_{words}.{repetition}"
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = None
        if spec["kind"] in SINGLE_STAGE and options.sizes["pp"] > 1:
            return
        logs = options.output / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        path = Path(self._folder.name) / "spec.json"
        whole = {**options.sizes, **spec, "results": self._folder.name}
        for name in ("device", "steps", "warmup", "seed", "deterministic", "examine", "turns"):
            whole[name] = getattr(options, name)
        path.write_text(json.dumps(whole | {"timeout_s": options.timeout}))
        self._logs = [logs / f"{self._label}.rank{rank}.log" for rank in range(num_ranks(options))]
        self._ranks = Ranks(
            [sys.executable, str(WORKER), str(path)],
            worker_environment(options, spec),
            self._logs,
            share_gpu=options.share_gpu,
        )

    def finish(self):
        """Run the mode; return its record, whatever happened."""
        if self._ranks is None:
            return self._record | {"status": "left out", "error": "knows no pipeline parallelism"}
        with self._folder as folder:
            started = time.monotonic()
            folder = Path(folder)
            status, rank = self._ranks.run(
                self._options.timeout,
                is_done=lambda: len(list(folder.glob("done*"))) == len(self._logs),
            )
            record = self._record | {"status": status, "seconds": time.monotonic() - started}
            if status == "ok":
                return record | {"error": None, "ranks": self._collect(folder)}
            error = f"after {self._options.timeout:g} s"
            if rank is not None:
                file = folder / f"rank{rank}.json"
                reason = json.loads(file.read_text()).get("error") if file.exists() else None
                error = f"rank {rank}: {reason or last_line(self._logs[rank])}"
            return record | {"error": error}

    def _collect(self, folder):
        """Keep what the ranks have left beside their numbers, which are returned."""
        output = self._options.output
        for kind in ("trace", "plan"):
            if files := sorted(folder.glob(f"{kind}*.json")):
                keep(files, output / f"{kind}s" / self._label)
        files = (folder / f"rank{rank}.json" for rank in range(num_ranks(self._options)))
        return [json.loads(file.read_text()) for file in files]


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
        """Let all go; return ("ok" | "failed" | "timed out", the rank that failed first).

        Ranks that are done with their work may still be ending: the driver takes ten seconds for
        a process that had a GPU.
        """
        deadline, result = time.monotonic() + timeout_s, ("timed out", None)
        try:
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(b"go\n")
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
            for process in self._processes if result[0] != "ok" else ():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def main():
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    check_settings(options)
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
    todo = [(spec, n) for n in range(options.repetitions) for spec in order_of(options.specs, n)]
    waiting = ModeRun(options, *todo[0])
    for following in [*todo[1:], None]:
        run, waiting = waiting, following and ModeRun(options, *following)
        report["runs"].append(record := run.finish())
        took = f"{record.get('seconds', 0):.0f} s"
        print(f"{record['mode']}: {record['error'] or record['status']}, {took}", flush=True)
        save(report, options.output)
    print((options.output / "bench_peers.txt").read_text())
    others = [run["mode"] for run in report["rows"] if run.get("bitwise") is False]
    if options.deterministic and any(mode.startswith("ours") for mode in others):
        sys.exit(f"other bits than without offload: {', '.join(dict.fromkeys(others))}")


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
    """Write both files aside and put them in place, so that a killed run keeps what it has."""
    report["rows"] = rows(report["runs"])
    for name, text in (
        ("bench_peers.json", json.dumps(report, indent=1)),
        ("bench_peers.txt", table(report)),
    ):
        aside = folder / f"{name}.part"
        aside.write_text(text)
        os.replace(aside, folder / name)


if __name__ == "__main__":
    main()

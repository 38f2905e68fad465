"""Whether offload leaves every bit as it was, for every module and pipeline shape: one command.

    python3 scripts/check_bitwise.py --output DIR                       # four GPUs, PP=4
    python3 scripts/check_bitwise.py --device cpu --tiny --output DIR   # two processes, no GPU

For each VPP and dtype a model takes a few steps without offload; then, for each set of modules, the
same model, built anew from the same seed, takes them with offload. Every rank compares its losses
and a hash of all its gradients, from the first step on. All combinations run in the same processes,
because starting those takes longer than any check.

    dense    the layer of megatron-core's own spec (TransformerEngine's on a GPU)
    moe      mixture of experts; its norms are modules of their own, which the dense layer's on a
             GPU are not
    fused    the same with the experts as one fused operation
    a2a      moe, two ranks' experts, exchanged by all-to-all; deepep the same by DeepEP
    overlap  a2a with exchanges of one microbatch beside the work of another
    gqa      dense with groups of queries, norms of queries and keys, and SwiGLU
    mla      multi-latent attention
    mtp      dense with a layer that predicts one token more
    full     the same with all layers recomputed
    hybrid   attention and MLP as layers of a HybridModel
    layout   dense, with layers laid out by hand and unevenly
    tp, cp   dense on two ranks of tensor parallelism with sequence parallelism, and of context
    dp       dense on two data-parallel ranks that share the optimizer's state, and its updates
    fp8-...  dense with that recipe of TransformerEngine

Steps differ in their number of microbatches, and before the second there is an evaluation.

To save time on a GPU, fp32 takes half the sequence (without a fused kernel attention keeps all its
scores) and mixtures of experts take half the microbatches, as far as those divide.

Whole layers make norms, activations, rotations and MoE's permutations again; all else moves what it
marks. What moved and was recomputed is counted over all steps, and shown are the bytes that came
back (none may, where all that left is kept on the device by something else) and those that were
recomputed. A combination that raises is a row with its
reason. One that takes too long ends its process and leaves in its log, DIR/logs, where it was;
what is left runs in new processes. Results are in DIR/check_bitwise.json after every
combination. Exit code 1 if anything differs, failed, offloaded nothing, reloaded nothing of
what was offloaded, did not recompute what it should, or did not run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from bench_peers import Ranks, last_line, worker_environment
from bench_peers_options import FIVE, SHAPES, SHARE_GPU, check_sizes

from megatron_offload.files.text import replace_text

WORKER = Path(__file__).with_name("check_bitwise_worker.py")

_MLP = ("mlp_fc1", "mlp_act", "mlp_fc2")
_EXPERTS = ("expert_fc1", "moe_act", "expert_fc2", "shared_experts", "router")


_FP8 = ("fp8-tensorwise", "fp8-delayed", "fp8-blockwise")


def _each(*names):
    # megatron-core takes attn_proj only together with core_attn, whose output it shares.
    sets = [("core_attn", "attn_proj") if name == "attn_proj" else (name,) for name in names]
    return {"+".join(modules): modules for modules in sets}


SETS = {
    "dense": {**_each(*FIVE, *_MLP, "layer"), "five": FIVE, "five+mlp": FIVE + _MLP},
    "moe": {**_each("attn_norm", "mlp_norm", *_EXPERTS, "layer"), "five+experts": FIVE + _EXPERTS},
    "fused": _each("fused_group_mlp"),
    "a2a": {**_each(*_EXPERTS), "again": FIVE + _EXPERTS},
    "deepep": {**_each(*_EXPERTS), "again": FIVE + _EXPERTS},
    # It calls parts of layers, and hooks on modules find no microbatch without Megatron's marks.
    "overlap": {"five+experts": FIVE + _EXPERTS, "again": FIVE + _EXPERTS},
    "full": _each("layer_input"),
    **{
        model: {**_each("layer"), "five+mlp": FIVE + _MLP}
        for model in ("gqa", "mla", "mtp", "hybrid", "layout", "tp", "cp", "dp", *_FP8)
    },
}
"""For each kind of layer the sets of modules that are offloaded, by what they are called here."""

PAIRS = {"a2a": "ep", "deepep": "ep", "overlap": "ep", "tp": "tp", "cp": "cp", "dp": "dp"}
"""What two ranks of each pipeline rank share, where it isn't 1."""

for _model in SETS.keys() - {"fused", "overlap", "full", *_FP8}:
    SETS[_model] |= {"whole-layer": ("core_attn",), "whole-mlp": ("core_attn", "attn_proj")}

AGAIN = {
    **dict.fromkeys(("layer", "again"), ("norm", "mlp_act")),
    "whole-layer": ("layer",),
    "whole-mlp": ("mlp",),
}
"""By set what is recomputed: kinds of outputs, or whole layers, in which nothing is offloaded."""

SIZES = {
    False: {**SHAPES["bitwise"], "min_elements": 1, "slab": "64MiB", "budgets": "64MiB/96MiB"},
    True: {**SHAPES["tiny"], "slab": "1MiB", "budgets": "16KiB/24KiB"},
}
"""The model's sizes, without and with ``--tiny``."""

GIVEN = ("layers", "hidden", "seq", "mbs", "microbatches", "vocabulary")


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="PP; by default 4, on the CPU 2")
    parser.add_argument("--share-gpu", action="store_true", help=SHARE_GPU)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--vpp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--models", nargs="+", choices=tuple(SETS), default=list(SETS))
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", default=["*"], help="such as 'dense:*' '*:layer'"
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        metavar="INFLIGHT/PREFETCH",
        help="small ones by default, none for one module; auto leaves both to the package",
    )
    for size in GIVEN:
        parser.add_argument(f"--{size}", type=int, help="in place of the model's")
    parser.add_argument("--normalization", choices=("RMSNorm", "LayerNorm"), default="RMSNorm")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--host-memory", default="16GiB", help="pinned, at most, on each rank")
    parser.add_argument("--deadline", type=float, default=40.0, help="seconds for one combination")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds to begin another")
    parser.add_argument("--restarts", type=int, default=2, help="after a failure in a pipeline")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or (4 if options.device == "cuda" else 2)
    options.sizes = read_sizes(options)
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    options.todo = combinations(options)
    if not options.todo:
        parser.error(f"--only {' '.join(options.only)} leaves nothing to check")
    return options


def read_sizes(options):
    sizes = dict(SIZES[options.tiny])
    if options.tiny:
        sizes["layers"] = options.ranks * max(options.vpp)
    for name in GIVEN:
        if getattr(options, name) is not None:
            sizes[name] = getattr(options, name)
    sizes.setdefault("heads", max(1, sizes["hidden"] // 128))
    sizes |= {"pp": options.ranks, "normalization": options.normalization}
    for name in ("vpp", "dtype"):  # every combination has its own
        sizes.pop(name)
    options.small_budgets = sizes.pop("budgets")
    return sizes


def check(options):
    """Raise `ValueError` for what can't run."""
    if options.steps < 1:
        raise ValueError("--steps is at least 1")
    for vpp in options.vpp:
        check_sizes(options.sizes | {"vpp": vpp})
    for budgets in options.budgets or ():
        if budgets != "auto" and budgets.count("/") != 1:
            raise ValueError(f"--budgets takes INFLIGHT/PREFETCH or auto, not {budgets!r}")


def combinations(options):
    """Return all that is to be checked; what shares a run without offload stays together."""
    return [
        {
            "id": f"vpp{vpp} {dtype} {model}:{name} {budgets}",
            "vpp": vpp,
            "pp": options.ranks // (1 + (model in PAIRS)),
            "dtype": dtype,
            "model": model,
            "name": name,
            "modules": list(modules),
            "recompute": list(AGAIN.get(name, ())),
            "budgets": budgets,
        }
        for model in options.models
        for dtype in options.dtypes
        for vpp in options.vpp
        if model not in PAIRS or (options.ranks % 2 == 0 and (vpp == 1 or options.ranks > 2))
        for name, modules in SETS[model].items()
        for budgets in options.budgets or [small_budgets(modules, options)]
        if any(fnmatch.fnmatchcase(f"{model}:{name}", pattern) for pattern in options.only)
    ]


def small_budgets(modules, options):
    """Return budgets with which groups leave; those of one module may fit into any window."""
    is_small = len(modules) == 1 and modules != ("layer",)
    return "0/0" if is_small else options.small_budgets


def share_a_reference(one, other):
    return all(one[key] == other[key] for key in ("vpp", "dtype", "model"))


def first_difference(expected, actual):
    """Return the first step, counted from 1, whose loss or gradients differ; None if none does."""
    steps = zip(expected, actual, strict=True)
    return next((number for number, (a, b) in enumerate(steps, 1) if a != b), None)


def judge(combination, ranks):
    """Return the row of a combination from what its ranks found."""
    row = {**combination, "status": "equal", "reason": None, "ranks": ranks}
    leaks = [rank["left"] for rank in ranks if rank["left"]]
    if any(rank["first_difference"] is not None for rank in ranks):
        row["status"] = "differs"
    elif leaks:
        row |= {"status": "failed", "reason": f"left behind: {leaks[0]}"}
    elif "layer" in combination["recompute"]:
        if not all(rank["recomputed_bytes"] for rank in ranks):
            row["status"] = "nothing recomputed"
    elif any(rank["offloaded_bytes"] == 0 for rank in ranks):
        row["status"] = "nothing was offloaded"
    elif not any(rank["reloaded_bytes"] or rank["externally_referenced_bytes"] for rank in ranks):
        row["status"] = "nothing was reloaded"
    elif (
        combination["recompute"]
        # A layer in 8 bits saves casts of its own, of which no unit is known: units are refused.
        and combination["model"] not in _FP8
        and not all(rank["recomputed_bytes"] for rank in ranks)
    ):
        row["status"] = "nothing recomputed"
    return row


_LINE = "{:>3}  {:<5}  {:<14}  {:<19}  {:<13}  {:>5}  {:<27}  {:<27}  {:<15}  {:>5}  {}"
HEAD = _LINE.format(
    *("vpp", "dtype", "model", "modules", "budgets"),
    *("s", "MiB that was reloaded", "MiB recomputed", "equal, by rank", "first", ""),
).rstrip()
"""``first`` is the first step that differs."""


def row_line(row):
    ranks = row["ranks"]
    differences = [rank["first_difference"] for rank in ranks]
    first = min((number for number in differences if number is not None), default="")
    reason = "" if row["status"] in ("equal", "done") else row["status"]
    return _LINE.format(
        *(row["vpp"], row["dtype"], row["model"], row["name"], row["budgets"] or ""),
        f"{row['seconds']:.1f}" if "seconds" in row else "",
        *(
            " ".join(f"{rank[key] / 2**20:.4g}" for rank in ranks)
            for key in ("reloaded_bytes", "recomputed_bytes")
        ),
        " ".join("yes" if difference is None else "no" for difference in differences),
        first,
        f"{reason}: {row['reason']}" if row["reason"] else reason,
    ).rstrip()


def summary(rows):
    """Return one line on all rows, and whether that is a yes."""
    counts = Counter(row["status"] for row in rows if row["modules"])
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    good = counts["equal"] > 0 and not set(counts) - {"equal", "left out"}
    return f"bitwise identical: {'yes' if good else 'no'} ({text})", good


def save(report, path):
    """Write at once or not at all, so that a killed run keeps what it has."""
    replace_text(path, json.dumps(report, indent=1))


def launch(options, todo, path, attempt, stop_at):
    """Run combinations in new processes; return why they ended early, if they did."""
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    names = [logs / f"{attempt}.rank{rank}.log" for rank in range(options.ranks)]
    environment = worker_environment(
        SimpleNamespace(sizes=options.sizes, device=options.device, deterministic=True),
        {"te_v1": "0"},
    )
    # Whatever is compiled would be compiled anew for every model.
    environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    with tempfile.TemporaryDirectory() as folder:
        spec = {"todo": todo, "report": str(path), "failures": folder, "stop_at": stop_at}
        for name in ("device", "sizes", "steps", "seed", "host_memory", "deadline"):
            spec[name] = getattr(options, name)
        spec_path = Path(folder) / "spec.json"
        spec_path.write_text(json.dumps(spec))
        command = [sys.executable, str(WORKER), str(spec_path)]
        status, rank = Ranks(
            command, environment, names, shows_first=True, share_gpu=options.share_gpu
        ).run()
        if status == "ok":
            return None
        for rank, log in enumerate(names):
            late = re.search(r"^Timeout \(.*\)", log.read_text(errors="replace"), re.MULTILINE)
            if late:  # the others fail as soon as this one is gone
                return f"rank {rank}: took too long: {late[0]}"
        failures = [json.loads(file.read_text()) for file in Path(folder).glob("rank*.json")]
        if failures:  # the first; others may have failed because that one did
            failure = min(failures, key=lambda failure: failure["at"])
            return f"rank {failure['rank']}: {failure['reason']}"
    return f"rank {rank}: {last_line(names[rank])}"


def finish(report, todo, reason):
    """Make rows of what was running when the ranks ended."""
    running = report["running"]
    if running is None:
        return
    gone = [running["combination"]]
    if running["reference"]:
        reason = f"without offload: {reason}"
        gone = [one for one in todo if share_a_reference(one, gone[0])]
    done = {row["id"] for row in report["rows"]}
    for one in gone:
        if one["id"] not in done:
            report["rows"].append({**one, "status": "failed", "reason": reason, "ranks": []})
            print(row_line(report["rows"][-1]), flush=True)
    report["running"] = None


def main(arguments=None):
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "check_bitwise.json"
    started = time.time()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "device": options.device,
        "sizes": options.sizes,
        "steps": options.steps,
        "seed": options.seed,
        "running": None,
        "rows": [],
    }
    save(report, path)
    print(HEAD, flush=True)
    why = "no time left"
    for attempt in range(1 + options.restarts):
        done = {row["id"] for row in report["rows"]}
        todo = [one for one in options.todo if one["id"] not in done]
        reason = launch(options, todo, path, attempt, started + options.limit)
        report = json.loads(path.read_text())
        if reason is None:
            break
        why = f"an earlier failure: {reason}"
        at_start = report["running"] is None
        finish(report, options.todo, reason)
        save(report, path)
        done = {row["id"] for row in report["rows"]}
        if at_start or all(one["id"] in done for one in options.todo):
            break
    done = {row["id"] for row in report["rows"]}
    for one in options.todo:
        if one["id"] not in done:
            report["rows"].append({**one, "status": "not run", "reason": why, "ranks": []})
    report["seconds"] = round(time.time() - started, 1)
    line, good = summary(report["rows"])
    report["summary"] = line
    save(report, path)
    lines = [HEAD, *map(row_line, report["rows"]), "", line]
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    for row in report["rows"]:
        if row["status"] not in ("equal", "done", "left out"):
            print(row_line(row))
    print(f"{line}, {report['seconds']:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

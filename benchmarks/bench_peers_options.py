"""Jobs and peers that `bench_peers.py` knows, and its arguments; plain data, no torch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

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
    "checkpoint": (),
    "recompute-layers": (),
    "selective": ("layernorm", "mlp"),
    "compile": (),
}
"""By mode the modules that it offloads, or recomputes, where nothing else is said."""
OF_BOTH = ("none", "trl", "save_on_cpu", "recompute-layers", "selective")
OF_BOTH += ("ours-auto", "ours-target", "ours-rows", "ours-whole")
OF_LLAMA = ("checkpoint", "compile")
"""Modes of models of transformers; those before are of Megatron's too, others of that alone."""
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
CHOOSES_MODULES = ("ours", "ours-auto", "ours-target", "megatron")
WHOLE_SETTING = {"ours-rows": "rows", "recompute-layers": "layers"}
WHOLE_SETTING |= {"selective": "modules", "compile": "compile"}
"""By mode what all behind its colon is."""
WHOLE_MODEL_SETTINGS = ("max_fwd_stash_size", "min_offload_size")
SHARE_GPU = "all ranks on one GPU: bits and memory hold, times don't"

_BASE = {"vocabulary": 32000, "dtype": "bf16", "pp": 1, "vpp": 1, "min_elements": 1024 * 1024}
_BASE |= {"dp": 1, "ep": 1}
_BASE |= {"normalization": "RMSNorm", "positions": "rope"}
_LLAMA = {**_BASE, "model": "llama", "microbatches": 1, "lora_rank": 16, "lora_dropout": 0.05}
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
    # A Llama of transformers whose base is frozen, with adapters of peft.
    "lora": {**_LLAMA, "layers": 16, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8}
    | {"vocabulary": 128256, "seq": 2048, "mbs": 4},
    # The same with adapters of a class of its own, in bf16, which come before the frozen product.
    "lora-own": {**_LLAMA, "layers": 16, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8}
    | {"vocabulary": 128256, "seq": 2048, "mbs": 4, "lora_dropout": 0.0, "own_adapters": True},
    "lora-tiny": {**_LLAMA, "layers": 4, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2}
    | {"vocabulary": 128, "seq": 32, "mbs": 2, "dtype": "fp32", "min_elements": 1},
}
"""Sizes; a head is 128 wide where a shape doesn't say otherwise."""

SIZES = (
    *("layers", "hidden", "heads", "seq", "mbs", "microbatches"),
    *("pp", "vpp", "dp", "ep", "vocabulary", "min_elements"),
)


def parse_arguments(about, arguments=None):
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    for size in SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, help="in place of the shape's")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="in place of the shape's")
    parser.add_argument("--normalization", choices=("RMSNorm", "LayerNorm"), help="likewise")
    parser.add_argument(
        "--length", type=int, help="tokens of each of lora's steps; drawn unless set"
    )
    parser.add_argument(
        "--modes", nargs="+", default=["none", "recompute", "megatron", "ours-all", "ours-auto"]
    )
    parser.add_argument("--full-recompute", action="store_true", help="in every mode, none too")
    parser.add_argument(
        "--whole-step-graph", action="store_true", help="capture the last step of the warm-up"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument(
        "--turns", type=int, default=0, help="fours of more steps, two of each without rows"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="of all modes; each second one backwards"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one mode")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--deterministic", action="store_true", help="kernels; checks bits as well")
    parser.add_argument("--examine", action="store_true", help="trace one more step of ours")
    parser.add_argument("--share-gpu", action="store_true", help=SHARE_GPU)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/peers"), help="a folder; runs/peers unless set"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.warmup < 0 or options.rounds < 1:
        parser.error("--steps and --rounds are at least 1, --warmup at least 0")
    if options.whole_step_graph and (options.warmup < 2 or options.examine):
        parser.error("--whole-step-graph takes two steps of warm-up, and looks at no other step")
    options.deterministic |= options.shape == "bitwise"
    try:
        options.sizes = read_sizes(options)
        model = options.sizes.get("model")
        options.specs = [read_mode(text, model) for text in options.modes]
    except ValueError as error:
        parser.error(str(error))
    for spec in options.specs:
        add_settings(options, spec)
        most = options.sizes["layers"] // (options.sizes["pp"] * options.sizes["vpp"])
        if spec["arguments"].get("layers", 0) > most:
            parser.error(f"{spec['mode']}: a stage has {most} layers")
    if len(set(options.modes)) != len(options.modes):
        parser.error("a mode is listed twice")
    return options


def add_settings(options, spec):
    """Give a mode of this package the settings that all have where it runs."""
    if spec["kind"].startswith("ours"):
        if options.device == "cpu":
            spec["options"].insert(0, "simulated.host_time=true")  # who plans wants times
        if options.whole_step_graph:
            spec["options"].insert(0, "whole_step_graph=true")
        if options.sizes.get("model") and options.sizes["min_elements"] <= 1:
            spec["options"].insert(0, "min_tensor_bytes=0")


def read_sizes(options):
    """Return the shape's sizes with what was given in their place."""
    sizes = dict(SHAPES[options.shape])
    for name in (*SIZES, "dtype", "normalization", "length"):
        if (given := getattr(options, name)) is not None:
            sizes[name] = given
    sizes.setdefault("heads", max(1, sizes["hidden"] // 128))
    sizes["full_recompute"] = options.full_recompute
    sizes["whole_step_graph"] = options.whole_step_graph
    check_sizes(sizes)
    return sizes


def check_sizes(sizes):
    """Raise `ValueError` for what can't run."""
    if min(sizes[name] for name in SIZES) < 1 or sizes.get("length", 1) < 1:
        raise ValueError("sizes, PP, VPP, DP and EP are at least 1")
    is_llama = sizes.get("model") == "llama"
    if is_llama and (
        sizes["pp"] * sizes["vpp"] * sizes["dp"] * sizes["ep"] * sizes["microbatches"] > 1
        or sizes["full_recompute"]
        or sizes["whole_step_graph"]
    ):
        raise ValueError("lora runs on one GPU, a microbatch a step, in no graph")
    if "length" in sizes and not is_llama:
        raise ValueError("--length is for lora; others have --seq")
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


def read_mode(text, model=None):
    """Read ``kind`` or ``kind:key=value,key=value`` into a plain description."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"unknown mode {kind!r}; there are {', '.join(KINDS)}")
    if kind in OF_LLAMA if model is None else kind not in OF_BOTH + OF_LLAMA:
        raise ValueError(
            f"{kind!r} is no mode of a model of {'transformers' if model else 'Megatron'}"
        )
    items = [item for item in rest.split(",") if item]
    if kind in WHOLE_SETTING and rest:
        items = [f"{WHOLE_SETTING[kind]}={rest}"]
    if any("=" not in item for item in items):
        raise ValueError(f"{text!r}: settings are key=value, separated by commas")
    chosen = list(KINDS[kind])
    if model:
        chosen = ["mlp"] if kind == "selective" else []
    options, arguments = list(SETTINGS.get(kind, ())), {}
    te_v1 = "1" if kind == "megatron" else "0"
    for item in items:
        key, _, value = item.partition("=")
        if key == "modules" and kind == "selective":
            chosen = value.split(",")
        elif key == "modules" and kind in CHOOSES_MODULES and not model:
            chosen = value.split("+")
        elif key == "te_v1" and kind == "megatron" and value in ("0", "1"):
            te_v1 = value
        elif key == "layers" and kind == "recompute-layers" and re.fullmatch("[1-9][0-9]*", value):
            arguments[key] = int(value)
        elif key == "compile" and model and re.fullmatch(r"1(\.0*)?|0(\.[0-9]*)?", value):
            arguments[key] = float(value)
        elif kind == "ours-rows" and value.strip():
            options.append(f"rows=[{value}]")
        elif key in WHOLE_MODEL_SETTINGS and kind == "ours-whole" and value.isdigit():
            arguments[key] = int(value)
        elif key == "recompute" and kind.startswith("ours"):
            options.append(f"recompute=[{', '.join(filter(None, value.split('+')))}]")
        elif key not in ("modules", "compile") and kind.startswith("ours"):
            options.append(item)
        else:
            raise ValueError(f"mode {kind!r} takes no {key}={value}")
    if kind == "recompute-layers" and not arguments:
        raise ValueError("recompute-layers takes how many, as in recompute-layers:4")
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
    return (
        {}
        if spec.get("kind") == "ours-rows" or not spec["modules"]
        else {"modules": spec["modules"]}
    )

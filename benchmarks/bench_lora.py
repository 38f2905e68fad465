"""Fine-tuning whose lengths change with every step, with the defaults and without offload.

    python benchmarks/bench_lora.py --output lora.json
    python benchmarks/bench_lora.py --modes off checkpoint layer mlp --steps 30
    python benchmarks/bench_lora.py --length 1900 --modes off loss rows-two mlp --steps 31

A Llama of a billion random parameters in bf16 with LoRA (transformers, peft), batch 4, lengths of
512 to 2048 drawn anew for each step. Runs take turns, each in a process of its own; times are of
the host, with one read of the loss a step. Printed: the time of all steps, of the last 40, and of
the slowest step beside the same step without, by medians of each step and for each run. Bits
aren't compared: attention's backward adds up in another order in each process, without offload too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

LATE = 40
LOSS = {"site": "loss", "by_rows": True}
MODES = {
    "off": None,
    "default": {},
    "layer": {"recompute": "layer"},
    "mlp": {"recompute": "mlp"},
    "loss": {"recompute": "loss"},
    "mlp-loss": {"recompute": ["mlp", "loss"]},
    "rows-loss": {"rows": [LOSS]},
    "rows-two": {"rows": [LOSS, {"site": "mlp", "offload": 2}]},
    "rows-two-of-12": {"rows": [LOSS, {"site": "mlp", "layers": "0-11", "offload": 2}]},
    "rows-dense": {
        "rows": [
            LOSS,
            {"site": "mlp", "layers": "0-7", "offload": 2},
            {"site": "attention", "layers": "0-8", "offload": 3},
        ]
    },
    "rows-mlp": {"rows": [LOSS, {"site": "mlp", "recompute": True}]},
    "rows-layer": {"rows": [{"site": "layer", "recompute": True}]},
    **{f"auto-{x}": {"policy": {"kind": "auto", "most_slowdown_percent": x}} for x in (1, 3, 12)},
    **{
        f"target-{x}": {"policy": {"kind": "memory_target", "memory_target": f"{x}GiB"}}
        for x in (30, 24, 18, 14)
    },
    "checkpoint": None,
    "trl": None,
    "compile": None,
    "compile-default": {},
    **{f"compile:{x}": None for x in (0.8, 0.5, 0.2)},
}
"""By mode the settings of the context around each forward: none without one. ``checkpoint`` is
that of transformers, layer by layer; ``trl`` TRL's context; ``compile`` compiles the layers, with
torch's budget for what they save, a share of all."""


def make_step():
    """Return a model, and what takes a step of it: its seconds, host and device, and its loss."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, target_modules=names))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(offload, length):
        tokens = torch.randint(128256, (4, length), device="cuda")
        began = time.perf_counter()
        with offload:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.item()
        return time.perf_counter() - began, found

    return model, step


def context_of(mode, model):
    """Return what is around each forward."""
    from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager

    settings = MODES[mode]
    if mode.startswith("compile"):
        budget = float(mode.partition(":")[2] or 1)
        torch._functorch.config.activation_memory_budget = budget
        for layer in model.get_base_model().model.layers:
            layer.compile(dynamic=True)
    if mode == "trl":
        from trl.models.activation_offloading import get_act_offloading_ctx_manager as of_trl

        return of_trl(model)
    if settings is not None:
        return get_act_offloading_ctx_manager(model, config=OffloadConfig(**settings))
    if mode == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return contextlib.nullcontext()


def train(mode: str, num_steps: int) -> dict[str, object]:
    """Return the time of each step in seconds, the losses, and the peaks in bytes."""
    model, step = make_step()
    draw, offload = random.Random(0), context_of(mode, model)
    steps, before = [], (0, 0)
    for number in range(num_steps):
        if number == num_steps - LATE:
            before = peaks_since()
            torch.cuda.reset_peak_memory_stats()
        steps.append(step(offload, draw.randrange(512, 2049)))
    (times, losses), late = zip(*steps, strict=True), peaks_since()
    return {
        "mode": mode,
        "s": times,
        "losses": losses,
        "peak_bytes": [max(both) for both in zip(before, late, strict=True)],
        "late_peak_bytes": late,
        "said": "" if MODES[mode] is None else getattr(offload.manager.tuner, "said", ""),
    }


def peaks_since() -> tuple[int, int]:
    """Return the most bytes that were allocated and reserved since the peaks were reset."""
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def compare_at(length: int, modes: list[str], num_steps: int) -> None:
    """Print medians of steps of one length, all modes in this process, one after the other.

    A run that looks for a plan is measured behind that.
    """
    model, step = make_step()
    plain_s = None
    for mode in modes:
        torch.cuda.empty_cache()
        offload = context_of(mode, model)
        tuner = getattr(getattr(offload, "manager", None), "tuner", None)
        first_s = [step(offload, length)[0] for _ in range(6)]
        while tuner is not None and not tuner.is_converged and len(first_s) < 200:
            first_s.append(step(offload, length)[0])
        step(offload, length)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        median_s = statistics.median(step(offload, length)[0] for _ in range(num_steps))
        plain_s = plain_s or median_s
        sizes = " / ".join(f"{peak / 2**30:.1f}" for peak in peaks_since())
        line = f"{mode}: {1e3 * median_s:.1f} ms, {median_s / plain_s:.3f}; {sizes} GiB"
        longer = sum(first_s) / len(first_s) / plain_s
        print(f"{line}; the first {len(first_s)} steps {longer:.2f} times as long", flush=True)
        if mode == "checkpoint":
            model.gradient_checkpointing_disable()
        elif MODES[mode] is not None:
            print(f"  {tuner.said}" if tuner is not None else "")
            offload.end_step()
            offload.close()


def main() -> None:
    """Take runs in turns and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "default"])
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help="all steps of it, in one process")
    given = parser.parse_args()
    if given.length:
        compare_at(given.length, given.modes, given.steps)
        return
    if given.mode:
        sys.stdout.write(json.dumps(train(given.mode, given.steps)))
        return
    runs: dict[str, list[dict]] = {mode: [] for mode in given.modes}
    for _ in range(given.rounds):
        for mode, found in runs.items():
            command = [sys.executable, __file__, "--mode", mode, "--steps", str(given.steps)]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(result.stdout.strip().splitlines()[-1]))
    if given.output:
        given.output.write_text(json.dumps(runs))
    off, *others = (
        [statistics.median(seconds) for seconds in zip(*(run["s"] for run in found), strict=True)]
        for found in runs.values()
    )
    for mode, on in zip(given.modes[1:], others, strict=True):
        all_steps, late = sum(on) / sum(off), sum(on[-LATE:]) / sum(off[-LATE:])
        print(f"{mode}: all steps {all_steps:.3f}, last {LATE} {late:.3f}")
        behind = range(min(20, given.steps - 1), given.steps)
        worst = max(behind, key=lambda i: on[i] / off[i])
        print(f"slowest behind the 20th {on[worst] / off[worst]:.2f} (step {worst})")
        for one in runs[mode]:
            slowest = max(one["s"][i] / off[i] for i in behind)
            print(f"a run: {sum(one['s']) / sum(off):.3f}, slowest {slowest:.2f}")
        print(
            "first 20:", " ".join(f"{a / b:.2f}" for a, b in zip(on[:20], off[:20], strict=False))
        )
    for mode, found in runs.items():
        for name in ("peak_bytes", "late_peak_bytes"):
            print(mode, name, [[round(b / 2**30, 1) for b in run[name]] for run in found])
        print(*(run["said"] for run in found if run["said"]), sep="\n")


if __name__ == "__main__":
    main()

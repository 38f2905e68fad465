"""Two ranks that train megatron-core's GPT without and with offload and compare every gradient.

    torchrun --standalone --nproc-per-node 2 gpt_worker.py [CASE ...]

The last line of the output is JSON: for each case, whether each rank saw the same losses and
gradients, and what moved.
"""

from __future__ import annotations

import json
import sys

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_offload.autotune import layers
from megatron_offload.files.strict_model import validate
from megatron_offload.machine.job_ranks import gather
from megatron_offload.train.config import ModelConfig, TrainConfig
from megatron_offload.train.launch import open_process_group
from megatron_offload.train.loop import forward_step, open_offload
from megatron_offload.train.model import build_chunks, open_model_parallel

ATTENTION = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
MLP = ["mlp_fc1", "mlp_act", "mlp_fc2"]
BOTH = ATTENTION + MLP
PATTERNS = ["decoder.layers.*.self_attention", "**.mlp"]

FOUR, SELECTIVE = {"layers": 4}, {"recompute_granularity": "selective"}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
DROPS = {**FOUR, "dropout": 0.1}

# One training step after another: number of microbatches and sequence length; None evaluates.
CHANGING = [None, (4, 16), (6, 16), None, (4, 32), (2, 16), (4, 16)]
ODD = [None, (3, 16), (5, 16), (1, 16), None, (3, 32), (3, 16)]

CASES = {
    "pp1-mlp": ({"layers": 2, **SWIGLU}, 1, 1, MLP, ODD, "random"),
    "pp2": (FOUR, 2, 1, BOTH, ODD, "late"),
    "pp2-vpp2-two-layers-a-chunk": ({"layers": 8}, 2, 2, ATTENTION, CHANGING, "random"),
    "pp2-vpp4-one-layer-a-chunk": ({"layers": 8}, 2, 4, BOTH, CHANGING, "random"),
    "pp2-vpp4-whole-layers": ({"layers": 8}, 2, 4, ["layer"], CHANGING, "late"),
    "pp2-patterns": (FOUR, 2, 1, PATTERNS, ODD, "late_d2h_eager_h2d"),
    "tied-dropout": (
        {**FOUR, "tied_embeddings": True, "dropout": 0.2},
        2,
        2,
        BOTH,
        CHANGING,
        "random",
    ),
    "full-recompute": ({**DROPS, **FULL}, 2, 2, ATTENTION, CHANGING, "late"),
    "inputs-of-full-recompute": (
        *({**DROPS, **FULL, "layers": 8}, 2, 2),
        *(["layer_input"], CHANGING, "random"),
    ),
    "recompute-core-attention": (
        *({**DROPS, **SELECTIVE, "recompute_modules": ["core_attn"]}, 2, 2),
        *([*ATTENTION[:-1], "mlp_fc1", "mlp_act"], CHANGING, "late"),
    ),
    "recompute-norms": (
        *({**FOUR, **SELECTIVE, "recompute_modules": ["layernorm"]}, 2, 1),
        *(BOTH, ODD, "late"),
    ),
    "half-of-each-chunk": (FOUR, 2, 2, BOTH, CHANGING, "late"),
    "rows": ({**DROPS, "layers": 8}, 2, 2, ["core_attn"], CHANGING, "random"),
    "rows-of-a-function": ({**DROPS, "layers": 4}, 2, 1, BOTH, ODD, "late"),
    "found-rows": ({**DROPS, "layers": 8}, 2, 2, BOTH, [None, *64 * [(2, 16)], *CHANGING], "late"),
}
"""By case the model, as the trainer and Megatron's configuration name it, PP, VPP, what is
offloaded, the steps, and when copies happen."""

SETTINGS = {
    "half-of-each-chunk": {"fraction": 0.5, "delta_bytes_across_pp_ranks": 4096},
    "rows": {
        "rows": [
            {"layers": "0-3", "site": "mlp", "offload": "all"},
            {"layers": "4", "site": "mlp", "recompute": True},
            {"layers": "5-6", "site": "layer", "recompute": True},
            {"layers": "0-3,7", "site": "norm", "recompute": True},
            {"site": "mlp_act", "recompute": True},
            {"layers": "7", "site": "self_attention", "offload": 2},
            {"layers": "2", "site": "core_attn", "offload": "all"},
            {"layers": "6-7", "site": "core_attn", "offload": 2},
        ]
    },
    "rows-of-a-function": {"rows": [{"site": "mlp_act", "recompute": True}]},
    "found-rows": {
        "policy": {"kind": "auto", "most_slowdown_percent": 1000},
        "simulated": {"host_time": True},
    },
    "inputs-of-full-recompute": {"max_inflight_bytes": 0, "prefetch_bytes": 4096},
}


def make_config(name, *, enabled):
    model, pipeline, virtual, modules, _, timing = CASES[name]
    model = {key: value for key, value in model.items() if key in ModelConfig.model_fields}
    data = {
        "model": {"hidden": 32, "heads": 2, "sequence_length": 32, "dropout": 0.0, **model},
        "parallel": {"pipeline": pipeline, "virtual": virtual},
        "data": {"micro_batch_size": 1, "microbatches": 4},
        "run": {"steps": 1},
        "offload": {
            "enabled": enabled,
            **({} if "rows" in name else {"policy": "modules", "modules": modules}),
            "min_tensor_bytes": 0,
            "max_inflight_bytes": 16384,
            "prefetch_bytes": 32768,
            "host_memory_bytes": 1 << 26,
            "host_slab_bytes": 1 << 20,
            "simulated": {"copy_timing": timing, "seed": 7},
            **SETTINGS.get(name, {}),
        },
    }
    return validate(TrainConfig, data, name)


def batches(length, generator):
    while True:
        tokens = torch.randint(0, 256, (1, length + 1), generator=generator)
        positions = torch.arange(length).expand(1, length)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}


def run(name, device, *, enabled):
    """Return every step's losses and gradients on this rank, and the bytes that moved."""
    config = make_config(name, enabled=enabled)
    model, _, virtual, _, steps, _ = CASES[name]
    settings = {key: x for key, x in model.items() if key not in ModelConfig.model_fields}
    results, moved = [], 0
    with open_model_parallel(config, device):
        dp_rank = parallel_state.get_data_parallel_rank()
        with open_offload(config) as manager:
            chunks = build_chunks(config, device, **settings)
            for number, step in enumerate(steps):
                count, length = step or (2, 16)
                iterators = [
                    batches(length, torch.Generator().manual_seed(number * 10 + dp_rank))
                    for _ in range(virtual)
                ]
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                    chunk.train(step is not None)
                with torch.set_grad_enabled(step is not None):
                    losses = get_forward_backward_func()(
                        forward_step_func=forward_step,
                        data_iterator=iterators if virtual > 1 else iterators[0],
                        model=chunks,
                        num_microbatches=count,
                        seq_length=length,
                        micro_batch_size=1,
                        forward_only=step is None,
                    )
                if step is not None and manager:
                    moved += manager.last_step.reloaded_bytes
                gradients = [p.main_grad.clone() for c in chunks for p in c.parameters()]
                results.append(([entry["loss"] for entry in losses], gradients))
            rows = list(map(str, (manager and manager.rows) or ()))
        held, recomputed = 0, {}
        if manager:
            recomputed = {
                name: found.recomputed_bytes for name, found in manager.last_step.by_name.items()
            }
            leaks, held = manager.state_of(), manager.last_step.externally_referenced_bytes
            assert not any(leaks.values()), leaks
            assert getattr(manager.tuner, "is_scheduled", True), (
                "no backward of a schedule's is seen"
            )
    return results, moved, held, recomputed, rows


def same(expected, actual):
    return len(expected) == len(actual) and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for one, other in zip(expected, actual, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def main():
    layers._LEAST_BYTES = 0  # small models are looked at too
    findings = {}
    with open_process_group("cpu") as device:
        for name in sys.argv[1:] or CASES:
            expected, *_ = run(name, device, enabled=False)
            actual, moved, held, recomputed, rows = run(name, device, enabled=True)
            mine = {
                "same": same(expected, actual),
                "num_losses": sum(len(losses) for losses, _ in expected),
                "gradients_are_real": all(
                    any(bool(g.any()) for g in gradients)
                    for (_, gradients), step in zip(expected, CASES[name][4], strict=True)
                    if step is not None
                ),
                "reloaded_bytes": moved,
                "externally_referenced_bytes": held,
                "recomputed_bytes": recomputed,
                "rows": rows,
            }
            findings[name] = gather(mine, torch.distributed.group.WORLD)
        if torch.distributed.get_rank() == 0:
            sys.stdout.write("\n" + json.dumps(findings) + "\n")


if __name__ == "__main__":
    main()

"""Small training runs for the tests: as one rank in this process, or as a command of its own."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import torch
from processes import run_python

from megatron_offload.train import launch

TINY = {
    "model": {
        "layers": 4,
        "hidden": 16,
        "heads": 2,
        "sequence_length": 8,
        "dropout": 0.1,
        "tied_embeddings": True,
    },
    "parallel": {"pipeline": 2, "virtual": 2},
    "data": {"micro_batch_size": 1, "microbatches": 2},
    "run": {"steps": 6, "device": "cpu"},
    "offload": {"enabled": False, "modules": ["core_attn", "mlp_act"], "min_tensor_bytes": 0},
}


def words(output, *settings):
    """Return the command line of a tiny run; settings are ``section.key=value``."""
    found = ["train", "--set"]
    for section, keys in TINY.items():
        found += [f"{section}.{key}={json.dumps(value)}" for key, value in keys.items()]
    return [*found, f"run.output={output}", *settings]


def be_the_rank(patch):
    """Let a run of one rank take place in this process, as its launcher would start it."""
    alone = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    patch.setattr(launch, "_start_ranks", partial(launch.train_runs, **alone))


def environment(**more):
    """Return this process's environment for a command; one thread for each rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def run(arguments, *, program=("-m", "megatron_offload"), **more):
    """Run a command; return its status and its standard error."""
    done = run_python(*program, *arguments, OMP_NUM_THREADS="1", **more)
    return done.returncode, done.stderr


def steps_of(output):
    """Return what a run has written of its steps."""
    return [json.loads(line) for line in (Path(output) / "steps.jsonl").read_text().splitlines()]


def numbers(output):
    """Return what must be the same in two runs, by step: losses, norms, last gradients, as bits."""
    return {
        step["step"]: (
            repr(step["loss"]),
            repr(step["grad_norm"]),
            [(repr(rank["loss"]), rank["gradients"]) for rank in step["ranks"]],
        )
        for step in steps_of(output)
    }

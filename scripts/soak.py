#!/usr/bin/env python3
"""Thousands of small steps with all that happens in a training job mixed in at random.

    python3 scripts/soak.py --output runs/soak                                # one GPU, 2000 steps
    python3 scripts/soak.py --device cpu --steps 300 --output runs/soak       # no GPU

Norms, and activations with their dropout, are recomputed in backward, and the rest moves. Every
step draws its number of microbatches, its pipeline depth and its sequence length. Between and
inside steps come evaluations with and without grad, graphs that are dropped, backwards that run
twice, and errors: in forward, inside a group, in backward, at a call of the engine's backend, a
keyboard interrupt, and on a GPU an allocation that can't be had. Half of the errors are caught by a
loop that tells the manager (`PipelineOffloadManager.step`), half by one that doesn't.

Every ``--check-interval`` steps, and in the step after each error, gradients are compared bit by
bit with the same step without offload. Memory is noted after every tenth whole step. Between steps
device memory in use, host memory in use and the number of live blocks never exceed those of the
first quarter; pinned, reserved and resident memory (within 64 MiB), which follow what the steps
draw, return in the last to those of the first half. Results are in DIR/soak.json. Ends with exit
code 1 if a bit differs, something grew, or nothing was offloaded or recomputed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import shlex
import signal
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import psutil  # noqa: E402 - after the path and the environment
import torch  # noqa: E402 - after the path and the environment
import torch.nn.functional as F  # noqa: E402
import torch.utils.deterministic  # noqa: E402
from programs import in_group, one_forward_one_backward  # noqa: E402
from traps import InjectedError, RaiseInBackward, broken_backend  # noqa: E402

from megatron_offload.config import OffloadConfig, SimulatedConfig  # noqa: E402
from megatron_offload.engine.group import Block  # noqa: E402
from megatron_offload.engine.manager import PipelineOffloadManager  # noqa: E402
from megatron_offload.files.text import replace_text  # noqa: E402
from megatron_offload.recompute.recipes import recomputable  # noqa: E402

MIB = 1 << 20
RESIDENT_SLACK_BYTES = 64 * MIB
ERRORS = ("forward", "group", "backward", "backend", "interrupt", "memory")


class Layer(torch.nn.Module):
    """Attention and MLP with norms and residuals, in three groups."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)
        self.fc1 = torch.nn.Linear(width, 4 * width)
        self.fc2 = torch.nn.Linear(4 * width, width)

    def forward(self, x, manager, fail=None):
        def qkv(x):
            return self.qkv(self.norm1(x))

        def attention(qkv):
            rows, width = qkv.shape[0], qkv.shape[-1] // 3
            q, k, v = (
                part.view(1, rows, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.proj(y.transpose(1, 2).reshape(rows, width))

        def mlp(x):
            hidden = self.fc1(made(manager, self.norm2, x))
            y = self.fc2(made(manager, dropout_of_gelu, hidden))
            if fail is not None:
                fail()
            return y

        projected = in_group(manager, qkv, x, "qkv_linear")
        x = x + in_group(manager, attention, projected, "core_attn")
        return x + in_group(manager, mlp, x, "mlp")


def dropout_of_gelu(x):
    return F.dropout(F.gelu(x), 0.1)


def made(manager, function, x):
    """Return what backward recomputes where something is offloaded."""
    return function(x) if manager is None else recomputable(function, x, manager=manager)


class Soak:
    """Model, manager and what was seen."""

    def __init__(self, options):
        self.options = options
        self.device = torch.device(options.device)
        self.rng = random.Random(options.seed)  # noqa: S311 - no cryptography
        on_gpu = self.device.type == "cuda"
        width, self.lengths = (512, (256, 512, 1024)) if on_gpu else (32, (8, 16, 32))
        torch.manual_seed(options.seed)
        self.model = torch.nn.ModuleList(Layer(width, 4) for _ in range(4)).to(self.device)
        self.width = width
        self.manager = PipelineOffloadManager(
            OffloadConfig(
                backend="cuda" if on_gpu else "simulated",
                min_tensor_bytes=64 * 1024 if on_gpu else 256,
                host_memory_bytes=8192 * MIB,
                host_slab_bytes=64 * MIB if on_gpu else MIB // 4,
                simulated=SimulatedConfig(copy_timing="random", seed=options.seed),
            )
        )
        self.counts = Counter()
        self.differences = []
        self.memory = []

    # One step

    def draw(self, number):
        rng = self.rng
        error = rng.choice(ERRORS) if rng.random() < self.options.error_share else None
        if error == "memory" and self.device.type != "cuda":
            error = "forward"
        return {
            "number": number,
            "length": rng.choice(self.lengths) if rng.random() < 0.5 else self.lengths[1],
            "num_microbatches": rng.randint(1, 6) if rng.random() < 0.3 else 3,
            "depth": rng.choice((1, 2, 2, 3)),
            "kinds": [rng.choice(["backward"] * 12 + ["twice", "dropped"]) for _ in range(6)],
            "evaluation": rng.choice([None, None, None, "no grad", "grad"]),
            "error": error,
            "error_at": rng.randrange(6),
            "error_call": rng.randrange(1, 120),
            "tells": rng.random() < 0.5,
        }

    def run(self, plan, manager, error=None):
        """Run one step's schedule; return its losses."""
        count, graphs, losses = plan["num_microbatches"], {}, []
        for action, m in one_forward_one_backward(count, plan["depth"]):
            if action == "F":
                fails_here = m == min(plan["error_at"], count - 1)
                graphs[m] = self.forward(plan, manager, m, error if fails_here else None)
                losses.append(graphs[m].detach())
            elif plan["kinds"][m] == "dropped":
                del graphs[m]
            elif plan["kinds"][m] == "twice":
                graphs[m].backward(retain_graph=True)
                graphs.pop(m).backward()
            else:
                graphs.pop(m).backward()
        return losses

    def forward(self, plan, manager, microbatch, error=None):
        x = self.inputs(plan, microbatch)
        torch.manual_seed(microbatch)  # of the dropouts
        if manager is not None:
            manager.begin_chunk()

        def fail():
            if error == "memory":
                torch.empty(1 << 46, dtype=torch.uint8, device=self.device)
            if error == "interrupt":
                signal.raise_signal(signal.SIGINT)
            raise InjectedError

        for index, layer in enumerate(self.model):
            inside = error in ("group", "memory", "interrupt") and index == 2
            x = layer(x, manager, fail if inside else None)
            if error == "forward" and index == 1:
                raise InjectedError
        loss = x.square().mean()
        return RaiseInBackward.apply(loss) if error == "backward" else loss

    def inputs(self, plan, microbatch):
        generator = torch.Generator(self.device).manual_seed(1000 * plan["number"] + microbatch)
        shape = plan["length"], self.width
        return torch.randn(shape, generator=generator, device=self.device).requires_grad_()

    def zero_grad(self):
        for parameter in self.model.parameters():
            parameter.grad = None

    def offloaded(self, plan, error=None):
        """Run the step with offload, as a loop does that tells the manager or one that doesn't."""
        manager, breaks = self.manager, contextlib.nullcontext()
        if error == "backend":
            breaks = broken_backend(manager.backend, plan["error_call"])
        with breaks:
            if plan["tells"]:
                with manager.step():
                    losses = self.run(plan, manager, error)
            else:
                losses = self.run(plan, manager, error)
                manager.reset()
        return losses

    def compare(self, plan):
        """Run a step both ways and compare every bit of losses and gradients."""
        self.zero_grad()
        expected = [*self.run(plan, None), *self.take_gradients()]
        self.zero_grad()
        actual = [*self.offloaded(plan), *self.take_gradients()]
        self.counts["compared"] += 1
        if not all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)):
            self.differences.append(plan["number"])

    def take_gradients(self):
        zero = torch.zeros((), device=self.device)
        return [zero if p.grad is None else p.grad.clone() for p in self.model.parameters()]

    # All of them

    def steps(self):
        options, must_compare = self.options, False
        for number in range(1, options.steps + 1):
            plan = self.draw(number)
            if plan["evaluation"] is not None:
                with torch.set_grad_enabled(plan["evaluation"] == "grad"):
                    self.forward(plan, self.manager, 7)
                self.counts["evaluations"] += 1
            if plan["error"] is not None:
                self.zero_grad()
                try:
                    self.offloaded(plan, plan["error"])
                except (InjectedError, KeyboardInterrupt, torch.OutOfMemoryError) as error:
                    self.counts[f"error in {plan['error']}"] += 1
                    self.counts[type(error).__name__] += 1
                must_compare = True
            elif must_compare or number % options.check_interval == 0:
                self.compare(plan)
                must_compare = False
            else:
                self.zero_grad()
                self.offloaded(plan)
                self.counts["late reloads"] += self.manager.last_step.num_late_reloads
            self.counts["offloaded bytes"] += self.manager.last_step.offloaded_bytes
            self.counts["bytes recomputed"] += self.manager.last_step.recomputed_bytes
            if plan["error"] is None:  # what failed untold is put right by the next step
                self.update()
                self.note_memory(number)

    def update(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-4)

    def note_memory(self, number):
        self.zero_grad()
        self.counts["whole steps"] += 1
        if self.counts["whole steps"] % 10 == 0:
            gc.collect()
            row = {
                "step": number,
                "pinned_bytes": self.manager.host_pool.stats.slab_bytes_total,
                "host_in_use_bytes": self.manager.host_pool.stats.in_use_bytes,
                "left": sum(self.manager.state_of().values()),
                "live_blocks": sum(type(x) is Block for x in gc.get_objects()),
                "resident_bytes": psutil.Process().memory_info().rss,
            }
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                row["allocated_bytes"] = torch.cuda.memory_allocated()
                row["reserved_bytes"] = torch.cuda.memory_reserved()
            self.memory.append(row)

    def growth(self):
        """Return by name what grew, and by how many bytes.

        What the tensors of a step need differs from draw to draw, so pinned, reserved and resident
        memory go up and down; what leaks never returns. All else has to be as it was.
        """
        quarter = max(1, len(self.memory) // 4)
        late = self.memory[-quarter:]
        grown = {}
        for name in self.memory[0]:
            varies = name in ("pinned_bytes", "reserved_bytes", "resident_bytes")
            now = (min if varies else max)(row[name] for row in late)
            early = self.memory[: (2 if varies else 1) * quarter]
            more = now - max(row[name] for row in early)
            if name != "step" and more > (RESIDENT_SLACK_BYTES if name == "resident_bytes" else 0):
                grown[name] = more
        return grown


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--check-interval", type=int, default=50)
    parser.add_argument("--error-share", type=float, default=0.05, help="of steps that fail")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    return parser.parse_args()


def main():
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    started = time.monotonic()
    soak = Soak(options)
    gc.collect()
    gc.freeze()  # the libraries needn't be looked through each time
    soak.steps()
    gc.unfreeze()
    grown = soak.growth()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu, simulated",
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started, 1),
        "steps": options.steps,
        "counts": dict(soak.counts),
        "steps_that_differ": soak.differences,
        "grown": grown,
        "memory": soak.memory,
    }
    replace_text(options.output / "soak.json", json.dumps(report) + "\n")
    for name, count in sorted(soak.counts.items()):
        print(f"{name}: {count}")
    for row in (soak.memory[len(soak.memory) // 4], soak.memory[-1]):
        print(row)
    print(f"steps that differ: {soak.differences or 'none'}; grown: {grown or 'nothing'}")
    print(f"{options.steps} steps in {report['seconds']} s")
    ok = (
        not soak.differences
        and not grown
        and soak.counts["offloaded bytes"] * soak.counts["bytes recomputed"] > 0
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

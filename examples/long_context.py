"""How long a sequence may be on one GPU, by what is done about activations.

    python examples/long_context.py                                # an 8-billion-parameter model
    python examples/long_context.py --sequence 32768 --steps 4     # not the longest, but this one
    python examples/long_context.py --lora 16 --layers 28 --hidden 1536 --ffn 8960 --heads 12 \
        --kv-heads 2 --sequence 2048 --batch 4 --modes none offload trl save_on_cpu --steps 16

Trains a Llama-like model in plain PyTorch on random tokens, with AdamW in mixed precision: 16 bytes
a parameter. A mode is what is done about what autograd saves:

    none          nothing
    offload       megatron_offload's OffloadActivations
    save_on_cpu   torch.autograd.graph.save_on_cpu
    trl           TRL's OffloadActivations, where that is installed

and with ``checkpoint+`` in front of it each layer is recomputed in backward, so that autograd saves
its input alone. Head and loss go by slices of the sequence in all modes. With
``--optimizer-in-backward`` each parameter is updated when its gradient is there, so that no two
gradients are held at once; else they take in backward the place that the layers' inputs leave.
With ``--whole-step-graph`` forward and backward are captured into a CUDA graph, behind eager steps
in which a plan is found, and the replays count: no host makes them slower.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager

MODES = ("none", "offload", "save_on_cpu", "trl")
SIZES = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}
SIZES |= {"vocabulary": 128256, "batch": 1, "lora": 0, "steps": 3}
COLUMNS = {"tokens": 8, "ms a 1000": 11, "allocated": 11, "reserved": 10, "pinned": 8}
GRAIN = 4096
SLICE = 2048
EAGER_STEPS = 18
"""In front of a capture: a search for a plan may take so many."""


class Layer(nn.Module):
    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.heads = sizes.heads, sizes.kv_heads
        kv_width = sizes.hidden // sizes.heads * sizes.kv_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.q = linear(sizes, sizes.hidden, sizes.hidden)
        self.kv = linear(sizes, sizes.hidden, 2 * kv_width)
        self.out = linear(sizes, sizes.hidden, sizes.hidden)
        self.gate = linear(sizes, sizes.hidden, sizes.ffn)
        self.up = linear(sizes, sizes.hidden, sizes.ffn)
        self.down = linear(sizes, sizes.ffn, sizes.hidden)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x), angles)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, y: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q = self.q(y).unflatten(-1, (self.heads[0], -1)).transpose(1, 2)
        kv = self.kv(y).unflatten(-1, (2 * self.heads[1], -1)).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        q, k = rotated(q, angles), rotated(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Lora(nn.Linear):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self, rank: int, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight.requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


def linear(sizes: argparse.Namespace, inputs: int, outputs: int) -> nn.Linear:
    return Lora(sizes.lora, inputs, outputs) if sizes.lora else nn.Linear(inputs, outputs, False)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


class Model(nn.Module):
    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.lora:
            for part in (self.embedding, self.lm_head):
                part.requires_grad_(False)
        self.head_width = sizes.hidden // sizes.heads

    def forward(self, tokens: torch.Tensor, *, checkpoints: bool) -> torch.Tensor:
        """Return the mean loss of predicting each token but the first."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        steps = torch.arange(0, self.head_width, 2, device=tokens.device) / self.head_width
        angles = places[:, None] * 500_000.0**-steps
        x = self.embedding(tokens)
        for layer in self.layers:
            if checkpoints:
                x = checkpoint(layer, x, angles, use_reentrant=False)
            else:
                x = layer(x, angles)
        x = self.norm(x)
        pairs = zip(x[:, :-1].split(SLICE, 1), tokens[:, 1:].split(SLICE, 1), strict=True)
        losses = (
            checkpoint(self.loss, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in pairs
        )
        return sum(losses) / tokens[:, 1:].numel()

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class MixedAdamW:
    """AdamW on copies in float32, one parameter after the other, so that gradients go at once."""

    def __init__(self, model: nn.Module, *, in_backward: bool) -> None:
        self.pairs, self.in_backward = [], in_backward
        for parameter in model.parameters():
            if parameter.requires_grad:
                own = parameter.detach().float()
                own.grad = torch.zeros_like(own)
                optimizer = torch.optim.AdamW([own], lr=1e-4, fused=own.is_cuda)
                optimizer.step()  # makes its state, which is there from the first step on
                own.grad = None
                pair = parameter, own, optimizer
                self.pairs.append(pair)
                if in_backward:
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, pair=pair: self._update(*pair)
                    )

    def restart(self) -> None:
        """Begin anew with the weights that the model has now."""
        for parameter, own, optimizer in self.pairs:
            own.copy_(parameter.detach())
            for value in optimizer.state[own].values():
                value.zero_()

    def step(self) -> None:
        for pair in () if self.in_backward else self.pairs:
            self._update(*pair)

    def _update(self, parameter: nn.Parameter, own: torch.Tensor, optimizer) -> None:
        own.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        own.grad = None
        parameter.data.copy_(own)


class Run:
    """One model that takes steps in one mode after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with self.device:
            before, _ = torch.get_default_dtype(), torch.set_default_dtype(torch.bfloat16)
            self.model = Model(options)
            torch.set_default_dtype(before)
        self.optimizer = MixedAdamW(self.model, in_backward=options.optimizer_in_backward)

    def train(self, mode: str, length: int, num_steps: int) -> dict | None:
        """Take steps of one length; return what they took, or None where memory ran out."""
        kind = mode.removeprefix("checkpoint").removeprefix("+") or "none"
        self._begin_anew()
        context = make_context(kind, self.model, self.options)
        found = None
        try:
            found = self._steps(context, length, num_steps, mode.startswith("checkpoint"))
            found["pinned_bytes"] = self._pinned_bytes(context)
        except torch.OutOfMemoryError:
            print(f"{mode}: {length} tokens don't fit", file=sys.stderr)
        self.model.zero_grad()
        if kind == "offload":
            context.close()
        del context
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _begin_anew(self) -> None:
        """Give the model the weights that every mode begins with."""
        torch.manual_seed(0)
        for module in self.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.optimizer.restart()

    def _steps(self, context, length: int, num_steps: int, checkpoints: bool) -> dict:
        generator = torch.Generator(self.device).manual_seed(1)
        tokens = torch.zeros(self.options.batch, length, dtype=torch.long, device=self.device)
        passes = partial(self._passes, context, tokens, checkpoints)
        if self.options.whole_step_graph:
            passes = self._captured(passes, context)
        times, losses = [], []
        for _ in range(num_steps):
            self._reset_peak()
            tokens.random_(self.options.vocabulary, generator=generator)
            began = time.perf_counter()
            loss = passes()
            passes_bytes = self._peak().get("allocated_bytes")
            self.optimizer.step()
            losses.append(loss.item())
            times.append(1e3 * (time.perf_counter() - began))
        half = times[len(times) // 2 :]
        return {
            "sequence": length,
            "step_ms": statistics.median(half),
            "steps_ms": times,
            "losses": losses,
            "passes_bytes": passes_bytes,
            **self._peak(),
        }

    def _passes(self, context, tokens: torch.Tensor, checkpoints: bool) -> torch.Tensor:
        with context:
            loss = self.model(tokens, checkpoints=checkpoints)
        loss.backward()
        return loss.detach()

    def _captured(self, passes: Callable, context) -> Callable:
        """Take eager steps, then capture what one has of passes; return what replays that."""
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(EAGER_STEPS):
                passes()
                self.optimizer.step()
        torch.cuda.synchronize()
        self._begin_anew()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = passes()
            if hasattr(context, "end_step"):
                context.end_step()  # what has been reloaded is joined inside of the graph
        gradients = [(one, one.grad) for one in self.model.parameters() if one.grad is not None]

        def replay() -> torch.Tensor:
            graph.replay()
            for parameter, grad in gradients:
                parameter.grad = grad
            return loss

        return replay

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> dict:
        if self.device.type != "cuda":
            return {}
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def _pinned_bytes(self, context) -> int:
        if hasattr(context, "manager"):
            return context.manager.host_pool.stats.slab_bytes_total
        has_gpu = self.device.type == "cuda"
        return torch.cuda.host_memory_stats()["allocated_bytes.current"] if has_gpu else 0

    def longest(self, mode: str) -> dict | None:
        """Return what steps of the longest sequence take, to a sixteenth of it."""
        short, long = 2 * GRAIN, 4 * GRAIN
        peaks = [self.train(mode, length, 1) for length in (short, long)]
        if None in peaks:
            return None
        least, most = (peak["passes_bytes"] for peak in peaks)
        room = torch.cuda.get_device_properties(self.device).total_memory - most
        length = long + int(room * (long - short) / (most - least)) // GRAIN * GRAIN
        while length > long:
            found = self.train(mode, length, self.options.steps)
            if found is not None:
                return found
            length -= max(GRAIN, length // 16 // GRAIN * GRAIN)
        return None


def make_context(kind: str, model: nn.Module, options: argparse.Namespace):
    """Return what the forward runs in."""
    if kind == "offload":
        limit = {"kind": "auto", "most_slowdown_percent": options.most_slowdown_percent}
        limit = limit if torch.cuda.is_available() else "modules"  # there nothing is to be won
        config = OffloadConfig(policy=limit, whole_step_graph=options.whole_step_graph)
        return get_act_offloading_ctx_manager(model, config=config)
    if kind == "save_on_cpu":
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    if kind == "trl":
        from trl.models import activation_offloading

        return activation_offloading.get_act_offloading_ctx_manager(model)
    return contextlib.nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, size in SIZES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=size, help=f"default {size}"
        )
    parser.add_argument(
        "--sequence", type=int, help="tokens; the longest that fits is found if not"
    )
    modes = [prefix + mode for prefix, mode in itertools.product(("", "checkpoint+"), MODES)]
    modes[modes.index("checkpoint+none")] = "checkpoint"
    parser.add_argument("--modes", nargs="+", choices=modes, metavar="MODE", help=" ".join(modes))
    parser.add_argument("--optimizer-in-backward", action="store_true", help="hold no gradients")
    parser.add_argument(
        "--whole-step-graph", action="store_true", help="measure replays; none and offload alone"
    )
    parser.add_argument(
        "--most-slowdown-percent", type=float, default=1.0, help="what offload may cost; default 1"
    )
    parser.add_argument("--output", type=Path, help="a JSON file of what was measured")
    options = parser.parse_args()
    if options.sequence is None and not torch.cuda.is_available():
        parser.error("without a GPU give --sequence, and --layers, --hidden, --ffn that are small")
    if options.whole_step_graph:
        if options.sequence is None or not torch.cuda.is_available():
            parser.error("--whole-step-graph takes a GPU, and --sequence")
        if options.optimizer_in_backward or {*(options.modes or modes)} - {"none", "offload"}:
            parser.error("--whole-step-graph takes --modes none and offload, the optimizer behind")
    run, results = Run(options), {}
    number = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"{number / 1e9:.2f} billion parameters")
    print(line_of("mode", COLUMNS) + "  GiB")
    for mode in options.modes or ("none", "checkpoint", "checkpoint+offload"):
        if options.sequence is None:
            found = run.longest(mode)
        else:
            found = run.train(mode, options.sequence, options.steps)
        results[mode] = found
        if found is not None:
            print(line_of(mode, cells_of(found, options.batch)), flush=True)
        if options.output is not None:
            sizes = {name: str(value) for name, value in vars(options).items()}
            options.output.write_text(json.dumps({"options": sizes, "modes": results}, indent=1))


def line_of(mode: str, cells: Iterable[str]) -> str:
    pairs = zip(cells, COLUMNS.values(), strict=True)
    return f"{mode:<24}" + "".join(f"{cell:>{width}}" for cell, width in pairs)


def cells_of(found: dict, batch: int) -> list[str]:
    sizes = [found.get(f"{kind}_bytes", 0) / 2**30 for kind in ("allocated", "reserved", "pinned")]
    speed = 1e3 * found["step_ms"] / found["sequence"] / batch
    return [str(found["sequence"]), f"{speed:.2f}", *(f"{size:.1f}" for size in sizes)]


if __name__ == "__main__":
    main()

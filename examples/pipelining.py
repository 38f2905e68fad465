"""A small GPT in a pipeline of torch.distributed.pipelining, interleaved 1F1B.

    torchrun --nproc-per-node 2 examples/pipelining.py
    torchrun --nproc-per-node 2 examples/pipelining.py --no-offload    # prints the same losses

Each process has two stages. On a CPU they speak by gloo, and the device is simulated.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from megatron_offload import OffloadConfig
from megatron_offload.integrations.torch_pipelining import offload_pipeline

STAGES_A_RANK, MICROBATCHES = 2, 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """The layers of a GPT from one to another, with its ends where they belong."""

    def __init__(self, model: GPT, index: int, number: int) -> None:
        super().__init__()
        size = len(model.layers) // number
        self.layers = model.layers[index * size : (index + 1) * size]
        self.tokens, self.places = (model.tokens, model.places) if index == 0 else (None, None)
        is_last = index == number - 1
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(batch: int, length: int, steps: int, seed: int = 0):
    """Yield inputs and targets out of this file's own text."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        rows = text[starts + torch.arange(length + 1)]
        yield rows[:, :-1], rows[:, 1:]


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 4, "width": 128, "heads": 4, "length": 128, "batch": 4, "steps": 6}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse(__doc__)
    if "RANK" not in os.environ:
        raise SystemExit(f"a launcher starts it: torchrun --nproc-per-node 2 {sys.argv[0]}")
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = GPT(args.layers, args.width, args.heads, args.length)
    number = STAGES_A_RANK * ranks
    modules = {i: Stage(model, i, number).to(device) for i in range(rank, number, ranks)}
    stages = [PipelineStage(modules[i], i, number, device) for i in modules]
    optimizer = torch.optim.AdamW(
        [parameter for module in modules.values() for parameter in module.parameters()], lr=1e-3
    )
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    # Without a GPU nothing would be won, so that by default nothing is offloaded there.
    config = OffloadConfig() if on_gpu else OffloadConfig(policy="modules")
    offload = offload_pipeline(schedule, config=config) if args.offload else None
    rows = batches(MICROBATCHES * args.batch, args.length, args.steps)
    for step, (inputs, targets) in enumerate(rows, 1):
        losses: list[torch.Tensor] = []
        given = [inputs.to(device)] if rank == 0 else []
        schedule.step(*given, target=targets.to(device), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:  # on the rank of the last stage
            print(f"step {step}: loss {torch.stack(losses).mean().item():.9g}", flush=True)
    dist.barrier()
    if offload is not None and rank == 0:
        print(offload.last_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

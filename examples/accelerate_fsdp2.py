"""A small GPT under Accelerate, its layers sharded by FSDP2, trained on the bytes of this file.

    accelerate launch --num_processes 2 examples/accelerate_fsdp2.py
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --no-offload    # the same losses

Needs accelerate. On a CPU the processes speak by gloo, and the device is simulated.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from torch import nn

from megatron_offload import get_act_offloading_ctx_manager


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
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    if accelerator.device.type == "cpu":  # where it wouldn't shard
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    set_seed(0)
    model = GPT(args.layers, args.width, args.heads, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    device, rank = accelerator.device, accelerator.process_index
    policy = (
        None if device.type == "cuda" else "modules"
    )  # where nothing is won, nothing is unasked
    offload = get_act_offloading_ctx_manager(model, args.offload, policy=policy)
    rows = batches(args.batch, args.length, args.steps, seed=rank)
    for step, (inputs, targets) in enumerate(rows, 1):
        with offload:
            loss = loss_of(model(inputs.to(device)), targets.to(device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {accelerator.reduce(loss, 'mean').item():.9g}")
    if args.offload:
        offload.end_step()
        accelerator.print(offload.last_step)
    accelerator.end_training()


if __name__ == "__main__":
    main()
    gc.collect()  # of what the model holds, gloo's threads else abort as Python ends

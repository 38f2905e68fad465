"""The GPT of nanogpt.py in a pipeline of torch.distributed.pipelining, interleaved 1F1B.

    torchrun --nproc-per-node 2 examples/pipelining.py
    torchrun --nproc-per-node 2 examples/pipelining.py --no-offload    # prints the same losses

Each process has two stages. On a CPU they speak by gloo, and the device is simulated.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from nanogpt import GPT, batches, loss_of, parse
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from megatron_offload import OffloadConfig
from megatron_offload.integrations.torch_pipelining import offload_pipeline

STAGES_A_RANK, MICROBATCHES = 2, 4


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


def main() -> None:
    args = parse(__doc__)
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

"""The GPT of nanogpt.py under Accelerate, its layers sharded by FSDP2.

    accelerate launch --num_processes 2 examples/accelerate_fsdp2.py
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --no-offload    # the same losses

On a CPU the processes speak by gloo, and the device is simulated.
"""

from __future__ import annotations

import gc

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from nanogpt import GPT, batches, loss_of, parse

from megatron_offload import get_act_offloading_ctx_manager


def main() -> None:
    args = parse(__doc__)
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
    offload = get_act_offloading_ctx_manager(model, args.offload)
    device, rank = accelerator.device, accelerator.process_index
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

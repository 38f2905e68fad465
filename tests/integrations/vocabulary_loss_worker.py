"""Megatron's unfused loss with and without rows, on each of two ranks of tensor parallelism.

Reports by case and rank what was called and whether bits are equal; torchrun starts it.
"""

from __future__ import annotations

import json
import warnings

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_offload import OffloadConfig, PipelineOffloadManager
from megatron_offload.integrations import megatron_core, megatron_loss
from megatron_offload.recompute import loss as rows

CLASSES, BATCH = 517, 2


def results(logits, target, **options):
    """Return the name of what was called, the loss, and the gradient of the logits."""
    own = logits.clone().requires_grad_()
    loss = tensor_parallel.vocab_parallel_cross_entropy(own * 1, target, **options)
    name = loss.grad_fn.name()
    torch.manual_seed(1)
    loss.backward(torch.rand(BATCH, loss.shape[0]).t())
    return name, loss.detach(), own.grad


def compared(dtype, length, units, **options):
    """Return what is called without and with rows, and whether results have equal bits."""
    torch.manual_seed(7 + dist.get_rank())
    logits = (4 * torch.randn(length, BATCH, CLASSES)).to(dtype)
    torch.manual_seed(7)
    target = torch.randint(2 * CLASSES, (length, BATCH))
    megatron_core.uninstall()
    expected = results(logits, target, **options)
    megatron_core.install()
    config = OffloadConfig(backend="simulated", recompute=units)
    PipelineOffloadManager.get_instance().configure(config)
    ours = results(logits, target, **options)
    pairs = list(zip(expected[1:], ours[1:], strict=True))
    is_same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    return expected[0], ours[0], is_same and all(a.dtype is b.dtype for a, b in pairs)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rows._BLOCK_BYTES["cpu"], megatron_loss._LEAST_ROWS = 1, 64
    warnings.filterwarnings("error", message=".*isn't proven")
    named = ["norm", "loss"]
    found = {
        f"{length} {str(dtype).removeprefix('torch.')}": compared(dtype, length, named)
        for dtype in (torch.bfloat16, torch.float16)
        for length in (1, 32, 33, 64, 150)
    }
    found["float32"] = compared(torch.float32, 150, named)
    found["smoothing"] = compared(torch.bfloat16, 150, named, label_smoothing=0.1)
    found["unnamed"] = compared(torch.bfloat16, 150, ["norm"])
    of_ranks = [None] * 2
    dist.all_gather_object(of_ranks, found)
    if dist.get_rank() == 0:
        print(json.dumps(of_ranks))  # noqa: T201 - a worker's report
    dist.destroy_process_group()


main()

"""What both files of the loss by rows ask: the bits of a loss and of its gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_offload import cross_entropy

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 3},
    "smoothing": {"label_smoothing": 0.1},
    "weight": {"weight": True},
    "weighted sum": {"weight": True, "reduction": "sum", "label_smoothing": 0.2},
}


def make_logits(rows, classes, dtype=torch.bfloat16, device="cpu"):
    torch.manual_seed(rows + classes)
    return (4 * torch.randn(rows, classes, device=device)).to(dtype)


def make_target(rows, classes, device="cpu", ignored=-100):
    """Return classes, of which every third row's counts for nothing."""
    target = torch.randint(classes, (rows,), device=device)
    target[1::3] = ignored
    return target


def with_weight(options, classes, device="cpu", dtype=torch.float32):
    """Return options of a call, with class weights where they say so."""
    if "weight" not in options:
        return options
    return {**options, "weight": torch.rand(classes, device=device).to(dtype)}


def theirs(logits, target, dtype=None, **options):
    return F.cross_entropy(logits if dtype is None else logits.to(dtype), target, **options)


def ours(logits, target, dtype=None, **options):
    return cross_entropy(logits, target, dtype=dtype, **options)


def results(function, logits, target, **options):
    """Return a loss and the gradient of its logits for a gradient of all bits."""
    own = logits.detach().clone().requires_grad_()
    loss = function(own, target, **options)
    torch.manual_seed(5)
    loss.backward(torch.rand(loss.shape).to(loss))
    return loss.detach(), own.grad


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def assert_same_bits(expected, found):
    for one, other in zip(expected, found, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(bits(one), bits(other))

"""An operation fuser with the names and habits of TransformerEngine's, for tests without a GPU.

What counts here: one autograd node for all operations, contexts made in their order, all tensors
saved at the end in one list, and quantised tensors that are saved as several. Beside it modules
that save the same and run one by one, and what tests of both do.
"""

from __future__ import annotations

import contextlib

import torch
from programs import assert_nothing_left
from torch import nn

from megatron_offload.integrations import transformer_engine as policy

ROWS, WIDTH = 24, 32
BYTES = 4 * ROWS * WIDTH
"""What each operation saves."""
NAMES = ("fc1", "act", "fc2")
CHOICES = [(), ("fc1",), ("act",), ("fc2",), ("fc1", "fc2"), NAMES]


class FusibleOperation(nn.Module):
    """Multiplies by a random mask, which it saves."""

    def __init__(self, width, *, in_parts=False):
        super().__init__()
        self.width, self.in_parts = width, in_parts

    def forward(self, x):
        return OperationFuser([self])(x)


class FusedOperation(FusibleOperation):
    """Made of others, which the fuser runs in its place."""

    def __init__(self, *basic_ops):
        super().__init__(basic_ops[0].width)
        self.basic_ops = nn.ModuleList(basic_ops)


class Parts:
    """Saved as two tensors."""

    def __init__(self, tensor):
        self.tensors = list(tensor.chunk(2, dim=-1))

    def prepare_for_saving(self):
        tensors, self.tensors = [t.contiguous() for t in self.tensors], None
        return tensors, self

    def restore_from_saved(self, tensors):
        self.tensors = tensors[:2]
        return tensors[2:]

    def whole(self):
        return torch.cat(self.tensors, dim=-1)


class OperationContext:
    to_save = None
    _saved_tensors_range = None

    def save_for_backward(self, *tensors):
        self.to_save = tensors


def prepare_for_saving(*tensors):
    parts, objects = [], []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            parts.append(tensor)
            objects.append(None)
        else:
            of_tensor, of_object = tensor.prepare_for_saving()
            parts += of_tensor
            objects.append(of_object)
    return parts, objects


class Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fuser):
        contexts = [OperationContext() for _ in fuser._basic_ops]
        for operation, context in zip(fuser._basic_ops, contexts, strict=True):
            mask = torch.rand(x.shape[0], operation.width)
            x = x * mask
            context.save_for_backward(None, Parts(mask) if operation.in_parts else mask)
        to_save = []
        for context in contexts:
            begin = len(to_save)
            to_save += context.to_save
            context._saved_tensors_range = (begin, len(to_save))
        parts, ctx.objects = prepare_for_saving(*to_save)
        ctx.save_for_backward(*parts)
        return x

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        for each in ctx.objects:
            if each is None:
                mask, saved = saved[0], saved[1:]
            else:
                saved = each.restore_from_saved(saved)
                mask = each.whole()
            if mask is not None:
                grad = grad * mask
        return grad, None


class OperationFuser:
    def __init__(self, operations):
        self._basic_ops = [
            basic for each in operations for basic in getattr(each, "basic_ops", [each])
        ]

    def __call__(self, x):
        return Run.apply(x, self)


class Sequential(nn.Module):
    def __init__(self, *operations):
        super().__init__()
        self.operations = nn.ModuleList(operations)

    def forward(self, x):
        return OperationFuser(list(self.operations))(x)


class Mask(nn.Module):
    """Does what a `FusibleOperation` does, and is none."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x):
        return x * torch.rand(x.shape[0], self.width)


class Modules(Sequential):
    """Runs each by itself."""

    def forward(self, x):
        for operation in self.operations:
            x = operation(x)
        return x


def fused():
    """Return a model of three operations; the second saves its tensor in two parts."""
    return Sequential(*(FusibleOperation(WIDTH, in_parts=name == "act") for name in NAMES))


def separate():
    """Return a model of three modules."""
    return Modules(*(Mask(WIDTH) for _ in NAMES))


def choose(model, **settings):
    for name, setting in settings.items():
        policy.set_activation_offloading(model.operations[NAMES.index(name)], setting)


def gradient(model, around=None):
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with around or contextlib.nullcontext():
        y = model(x * 1.0)
    x.grad = None
    y.sum().backward()
    return x.grad


def moved(model, expected, around=None):
    """Compare the gradient, end the step, and return how many operations' bytes have moved."""
    assert torch.equal(gradient(model, around), expected)
    groups = policy.operation_groups()
    is_over = groups.end_step_if_over()
    assert_nothing_left(groups.manager)
    return groups.manager.last_step.offloaded_bytes / BYTES if is_over else 0

"""What a call of a site saves, and saves again when it runs again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_offload.engine.hooks import graph_break
from megatron_offload.recompute.proof import sums_of

Form = tuple[torch.Size, torch.dtype] | None
"""Of a saved tensor; None of a parameter or a view of one: that is kept, as what a rerun saves in
its place would keep memory that is to be freed."""


class Enough(BaseException):
    """All that a call had saved was saved again."""


@dataclass(slots=True, eq=False)
class Rerun:
    """What a call saves when it runs again."""

    expected: Sequence[Form]
    """Of what the call has saved: behind the last it may end."""
    proves: bool
    runs_on: bool
    """Whether it goes to its end."""
    needs_all: bool = False
    """Whether something has read what was left out."""
    made: list[tuple[torch.Tensor, int, bool] | None] = field(default_factory=list)
    """Until it is read each with its version, and whether autograd could take it as a gradient of
    its own, if nothing else had it; None of a parameter."""
    forms: list[Form] = field(default_factory=list)
    at_last_save: list[torch.Tensor] = field(default_factory=list)

    @graph_break
    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor that is saved; the pack hook."""
        made, kept, number = self.made, tensor, len(self.made)
        num_left = len(self.expected) - number - 1
        if num_left >= 0 and self.expected[number] is None:
            self.forms.append(None)
            made.append(None)
        else:
            dtype = tensor.dtype
            self.forms.append((tensor.shape, dtype))
            has_gradients = dtype.is_floating_point or dtype.is_complex
            kept = tensor.detach()
            made.append((kept, tensor._version, has_gradients and not tensor.requires_grad))
        if num_left <= 0:
            if self.proves and num_left == 0:
                self.at_last_save = sums_of(made)
            elif not self.runs_on:
                raise Enough
        return kept


class LeftOut:
    """Stands for the output of a linear layer that a rerun leaves out: of it the form can be read.

    LoRA's layers multiply by frozen weights before they save what their adapters need, so that a
    rerun would compute a product that nothing saves. Who reads it ends the rerun.
    """

    class ReadError(BaseException):
        """The output is needed."""

    def __init__(self, layer: nn.Linear, x: torch.Tensor, rerun: Rerun) -> None:
        self.shape = torch.Size((*x.shape[:-1], layer.out_features))
        self.dtype, self.device, self._rerun = x.dtype, x.device, rerun

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        self._rerun.needs_all = True
        raise LeftOut.ReadError

    __getattr__ = _fail

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))._fail()


# No `__getattr__` sees these.
_OPERATORS = {*dir(torch.Tensor), "__bool__"} - {*dir(object), *vars(LeftOut)}
for _name in (
    *_OPERATORS,
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__"),
):
    if _name.startswith("__") and callable(getattr(torch.Tensor, _name, len)):
        setattr(LeftOut, _name, LeftOut._fail)


def last_frozen(parts: Sequence[nn.Module]) -> int | None:
    """Return the position of the last frozen linear layer among the parts of a module."""
    if any(x._compiled_call_impl is not None for x in parts):
        return None
    frozen = (i for i, x in enumerate(parts) if type(x) is nn.Linear and not _is_trained(x))
    return max(frozen, default=None)


def _is_trained(layer: nn.Linear) -> bool:
    return any(x.requires_grad for x in layer._parameters.values() if x is not None)


@contextmanager
def left_out(layer: Any, rerun: Rerun) -> Iterator[None]:
    """Let a rerun leave out the output of a layer whose weight is what the call has saved next."""

    def forward(x: torch.Tensor) -> Any:
        number, weight = len(rerun.made), layer.weight
        is_next = number < len(rerun.expected) and rerun.expected[number] is None
        is_usual = type(x) is torch.Tensor and x.dim() > 1 and x.requires_grad
        if not (is_next and is_usual and x.dtype is weight.dtype) or _is_trained(layer):
            return nn.Linear.forward(layer, x)
        rerun.keep(weight)
        return LeftOut(layer, x, rerun)

    vars(layer)["forward"] = forward
    try:
        yield
    finally:
        del vars(layer)["forward"]

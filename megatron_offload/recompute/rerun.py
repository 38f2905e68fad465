"""What a call of a site saves, and saves again when it runs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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

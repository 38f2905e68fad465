"""What a call of a site saves, and saves again when it runs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_offload.engine.graph_break import graph_break
from megatron_offload.recompute.proof import sums_of

Form = tuple[torch.Size, torch.dtype, bool]
"""Of a saved tensor, and whether it is a parameter or a view of one: that is kept, as what a rerun
saves in its place would keep memory that is to be freed."""


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
        is_own = num_left >= 0 and self.expected[number][2]
        self.forms.append((tensor.shape, tensor.dtype, is_own))
        if is_own:
            made.append(None)
        else:
            is_constant = not tensor.requires_grad and tensor.is_leaf
            is_constant = is_constant and (tensor.is_floating_point() or tensor.is_complex())
            kept = tensor.detach()
            made.append((kept, tensor._version, is_constant))
        if num_left <= 0:
            if self.proves and num_left == 0:
                self.at_last_save = sums_of(made)
            elif not self.runs_on:
                raise Enough
        return kept

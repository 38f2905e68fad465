"""What a call of a site saves when it runs again, and checksums that show if it is the same."""

from __future__ import annotations

from typing import Any

import torch

from megatron_offload.engine.checking import checksum
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.module_hooks import tensors_in


class Enough(BaseException):
    """All that a call had saved was saved again."""


class Rerun:
    """What a call saves when it runs again, and may end behind the last of it."""

    __slots__ = (
        "_num_saved",
        "_proves",
        "_runs_on",
        "at_last_save",
        "constants",
        "made",
        "versions",
    )

    def __init__(self, num_saved: int, *, proves: bool, runs_on: bool) -> None:
        self._num_saved, self._proves, self._runs_on = num_saved, proves, runs_on
        self.made: list[Any] = []
        self.versions: list[int] = []
        self.constants: set[int] = set()
        """What autograd could take as a gradient of its own, if nothing else had it."""
        self.at_last_save: list[torch.Tensor] = []

    @graph_break
    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor that is saved; the pack hook."""
        made = self.made
        is_constant = not tensor.requires_grad and tensor.is_leaf
        if is_constant and (tensor.is_floating_point() or tensor.is_complex()):
            self.constants.add(len(made))
        kept = tensor.detach()
        made.append(kept)
        self.versions.append(tensor._version)
        if len(made) >= self._num_saved:
            if self._proves and len(made) == self._num_saved:
                self.at_last_save = sums_of(made)
            elif not self._runs_on:
                raise Enough
        return kept


def sums_of(output: Any) -> list[torch.Tensor]:
    """Return checksums of the tensors in what a call has returned, each on its device."""
    sums = []
    for leaf in tensors_in(output):
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested:
            flat = leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            sums.append(checksum(flat.view(torch.uint8)))
    return sums

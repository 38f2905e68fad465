"""Whether what is recomputed has the bits that were saved, seen before anything is dropped.

In the first step a function runs once more behind its output; where the output's memory is to be
dropped, both are compared, and the output with what it was before it was saved. What differs is
kept or offloaded from then on. In backward what is recomputed is compared once more. All of it is
seen again every `PROVE_EVERY` steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_offload.errors import CorruptionError
from megatron_offload.memory.checksum import checksum
from megatron_offload.memory.nested import tensors_in

_logger = logging.getLogger(__name__)

PROVE_EVERY = 256
_MOST_IN_A_STEP = 256
"""Outputs that are compared for one proof, also where steps never end."""


@dataclass(eq=False, repr=False)
class Proof:
    """What is known of the outputs of one site or function."""

    name: str
    """Of the site or function, for messages."""
    refusal: str = ""
    """Why it isn't recomputed any more."""
    is_known: bool = False
    """Whether outputs were compared, and were equal."""
    step: int = -PROVE_EVERY
    """The last of which outputs are compared, of which ``num_left`` may yet be."""
    num_left: int = 0

    def begin(self, step: int) -> bool:
        """Return whether an output that is made now, in this step, is compared."""
        if step - self.step >= PROVE_EVERY:
            self.step, self.num_left = step, _MOST_IN_A_STEP
        is_seen = self.step == step and self.num_left > 0 and not self.refusal
        self.num_left -= is_seen
        return is_seen

    def refuse_unseen(self) -> str:
        """Return why an output that isn't compared can't be dropped, or nothing."""
        if self.is_known or self.refusal:
            return self.refusal
        self.step = -PROVE_EVERY
        return "it is compared in the next step (not in one that is captured)"

    def resolve(self, are_equal: Sequence[torch.Tensor]) -> str:
        """Read what comparisons of one output have shown; return why it can't be dropped.

        The host waits for the device.
        """
        if not self.refusal and torch.stack([*are_equal]).all():
            self.is_known = True
        elif not self.refusal:
            self.refusal = "it was compared when it was recomputed, and had other bits"
            _logger.warning(
                "recompute: what %s returns is kept from here on: recomputed it has other bits",
                self.name,
            )
        return self.refusal


def other_bits(what: str, unit: str) -> CorruptionError:
    """Return the error of what was recomputed, and is not what it was."""
    return CorruptionError(
        f"{what} was recomputed with other bits than its forward had, and gradients would be "
        "wrong: it reads what has changed since, draws random numbers of Python or numpy, or has "
        "kernels that sum in any order (torch.use_deterministic_algorithms; in Megatron's MoE "
        f"moe_permute_fusion); leave {unit!r} out of recompute"
    )


def sums_of(output: Any) -> list[torch.Tensor]:
    """Return checksums of the tensors in what a call has returned, each on its device."""
    sums = []
    for leaf in tensors_in(output):
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested:
            flat = leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            sums.append(checksum(flat.view(torch.uint8)))
    return sums

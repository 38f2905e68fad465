"""Whether what is recomputed has the bits that were saved, seen before anything is dropped.

In the first step a function runs once more behind its output; where the output's memory is to be
dropped, both are compared, and the output with what it was before it was saved. What differs is
kept or offloaded from then on. In backward what is recomputed is compared once more. All of it is
seen again every `PROVE_EVERY` steps.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, proxy

import torch

from megatron_offload.engine.transfers import Transfers

_logger = logging.getLogger(__name__)

PROVE_EVERY = 256
_MOST_IN_A_STEP = 256
"""Outputs that are compared for one proof, also where steps never end."""

_books: WeakKeyDictionary[Transfers, Proofs] = WeakKeyDictionary()


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


class Proofs:
    """The proofs of one manager, whose ``transfers`` these are."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers: Transfers = proxy(transfers)
        self.of_functions: dict[Hashable, Proof] = {}
        """By one call of a function in each forward."""
        self._step, self._stats = 0, transfers.stats

    @classmethod
    def of(cls, transfers: Transfers) -> Proofs:
        """Return those of a manager."""
        book = _books.get(transfers) or _books.setdefault(transfers, cls(transfers))
        if book._stats is not transfers.stats:
            book._stats = transfers.stats
            book._step += 1
        return book

    def begin(self, proof: Proof) -> bool:
        """Return whether an output that was made now is compared."""
        if self._step - proof.step >= PROVE_EVERY:
            proof.step, proof.num_left = self._step, _MOST_IN_A_STEP
        is_seen = proof.step == self._step and proof.num_left and not proof.refusal
        if not is_seen or self.transfers.backend.is_capturing():
            return False
        proof.num_left -= 1
        return True

    def refusal(self, proof: Proof) -> str:
        """Return why an output that isn't compared can't be dropped, or nothing."""
        if proof.is_known or proof.refusal:
            return proof.refusal
        proof.step = -PROVE_EVERY
        return "it is compared in the next step (not in one that is captured)"

    def resolve(self, proof: Proof, are_equal: Sequence[torch.Tensor], num_bytes: int) -> str:
        """Read what comparisons of one output have shown; return why it can't be dropped.

        The host waits for the device.
        """
        self.transfers.stats.proven_bytes += num_bytes
        if proof.refusal:
            return proof.refusal
        if torch.stack([*are_equal]).all():
            proof.is_known = True
            return ""
        proof.refusal = "it was compared when it was recomputed, and had other bits"
        _logger.warning(
            "recompute: what %s returns is kept from here on: recomputed it has other bits",
            proof.name,
        )
        return proof.refusal

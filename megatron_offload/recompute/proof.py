"""Whether what is recomputed has the bits that were saved, seen before it is relied on.

In the first step an output is copied where its memory is dropped. Backward recomputes it, compares
both on the device, and goes on with the copy. What is equal is dropped from the next step on; the
rest is kept or offloaded. One of those that were equal is seen again every `_SEE_AGAIN` steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary, proxy, ref

import torch

from megatron_offload.engine.group import Block
from megatron_offload.engine.transfers import Transfers
from megatron_offload.memory.tensor_pool import span_bytes

_logger = logging.getLogger(__name__)

_SEE_AGAIN = 64

_books: WeakKeyDictionary[Transfers, Proofs] = WeakKeyDictionary()


class Proof:
    """What is known of the outputs of one site or function.

    Attributes:
        name: of the site or function, for messages.
        is_due: whether the next output is compared.
        is_known: whether outputs were compared, and were equal.
        refusal: why it isn't recomputed any more.
    """

    def __init__(self, name: str) -> None:
        self.name, self.refusal = name, ""
        self.is_due, self.is_known = True, False


class Witness:
    """The bytes of an output, to compare with what is recomputed."""

    def __init__(self, book: Proofs, proof: Proof, block: Block, form: Any) -> None:
        backend, storage = book.transfers.backend, block.alias.untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=block.alias.device)
        with backend.computing_on(block.stream):
            source.set_(storage, 0, (storage.nbytes(),), (1,))
            self._bytes = source.clone()
        self._ready, self._stream = backend.record(block.stream), block.stream
        self._book, self._proof, self._form = book, proof, form

    def compare(self, made: torch.Tensor) -> torch.Tensor:
        """Note whether another tensor has the same bits; return a copy of those that were saved."""
        shape, stride, dtype = self._form
        transfers = self._book.transfers
        stream = transfers.backend.compute_stream()
        if stream is not self._stream:
            stream.wait_event(self._ready)
            transfers.backend.read_on(stream, self._bytes)
        kept = torch.empty(0, dtype=dtype, device=made.device)
        kept.set_(self._bytes.clone().untyped_storage(), 0, shape, stride)  # backward may write
        self._book.results.append((self._proof, (_words(kept) == _words(made)).all()))
        transfers.stats.proven_bytes += span_bytes(kept)
        return kept


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat if flat.numel() % 8 else flat.view(torch.int64)


class Proofs:
    """The proofs of one manager, whose ``transfers`` these are."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers: Transfers = proxy(transfers)
        self.results: list[tuple[Proof, torch.Tensor]] = []
        """Of this step; each on its device."""
        self._of_functions: dict[Hashable, Proof] = {}
        self._known: deque[ref[Proof]] = deque()
        self._num_steps, self._stats = 0, transfers.stats

    @classmethod
    def of(cls, transfers: Transfers) -> Proofs:
        """Return those of a manager, with the results of its last step read."""
        book = _books.get(transfers)
        if book is None:
            book = _books[transfers] = cls(transfers)
        if book._stats is not transfers.stats and not transfers.backend.is_capturing():
            book._stats = transfers.stats
            book._read()
        return book

    def of_function(self, key: Hashable, name: str) -> Proof:
        """Return the proof of one call of a function in each forward."""
        proof = self._of_functions.get(key)
        if proof is None:
            proof = self._of_functions[key] = Proof(name)
        return proof

    def refusal(self, proof: Proof) -> str:
        """Return why what it is of can't be recomputed now, or nothing."""
        if not proof.is_known and self.transfers.backend.is_capturing():
            return "nothing was recomputed before the capture, in which nothing can be compared"
        return proof.refusal

    def witness(self, proof: Proof, block: Block, form: Any) -> Witness | None:
        """Return a copy of a block's bytes where its proof is due."""
        if not proof.is_due or self.transfers.backend.is_capturing():
            return None
        return Witness(self, proof, block, form)

    def _read(self) -> None:
        results, self.results = self.results, []
        found: dict[Proof, bool] = {}
        for device in {one.device for _, one in results}:
            here = [(proof, one) for proof, one in results if one.device == device]
            all_equal = torch.stack([one for _, one in here]).tolist()  # the host waits once
            for (proof, _), one in zip(here, all_equal, strict=True):
                found[proof] = one and found.get(proof, True)
        for proof, is_equal in found.items():
            proof.is_due = False
            if is_equal:
                proof.is_known = True
                self._known.append(ref(proof))
            else:
                proof.refusal = "it was compared when it was recomputed, and had other bits"
                _logger.warning(
                    "recompute: what %s returns is kept from here on: recomputed it has other bits",
                    proof.name,
                )
        self._num_steps += 1
        if self._num_steps % _SEE_AGAIN == 0 and self._known:
            again = self._known.popleft()()
            if again is not None:
                again.is_due = True

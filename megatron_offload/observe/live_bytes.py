"""Counts the bytes of storages that autograd keeps alive for backward.

One rule for runs with and without offload: every storage that a saved tensor or a reload target
lives in counts once, from when it is first seen until it is really freed. None is held alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from megatron_offload.engine.observer import Observer


class LiveActivationMeter(Observer, torch.autograd.graph.saved_tensors_hooks):
    """Live bytes of saved activations, now and at their peak.

    As a context manager it sees every tensor that autograd saves, except where hooks that were
    pushed later (such as an offload group's) take over; a manager reports those to its observers.

    A storage that is emptied in place (``resize_(0)``, as selective recompute does) counts as what
    is left of it, and again once it is filled.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._ignored = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._emptied: set[int] = set()
        self._live_bytes = 0
        self.peak_bytes = 0
        """Most bytes that were alive at one time since the last `reset_peak`."""
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def live_bytes(self) -> int:
        self._measure(self._seen)
        return self._live_bytes

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self.peak_bytes = self.live_bytes

    def observe(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` until it is freed; parameters are not activations."""
        if isinstance(tensor, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._ignored and key not in self._seen:
            # The Python object of a storage lives as long as the storage itself, even while only
            # C++ holds it, so this fires when the memory is freed and not before.
            weakref.finalize(storage, self._forget, key).atexit = False
            self._seen[key] = (weakref.ref(storage), 0)
            self._measure([key])
        if self._emptied:
            self._measure(self._emptied)
        if self._live_bytes > self.peak_bytes:
            # Sizes can only have shrunk unseen, so the exact sum is taken just where it matters.
            self._measure(self._seen)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    tensor_saved = tensor_reloaded = observe

    def recomputed(self, made: object) -> None:
        if isinstance(made, torch.Tensor):
            self.observe(made)

    def _measure(self, keys: Iterable[int]) -> None:
        for key in list(keys):
            seen = self._seen.get(key)
            storage = seen and seen[0]()
            if seen and storage is not None:  # else it was freed meanwhile
                size = storage.nbytes()
                self._seen[key] = (seen[0], size)
                self._live_bytes += size - seen[1]
                (self._emptied.discard if size else self._emptied.add)(key)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hand on an alias: the tensor itself would keep its own node alive in a cycle."""
        self.observe(tensor)
        return tensor.detach()

    def _forget(self, key: int) -> None:
        _, size = self._seen.pop(key)
        self._live_bytes -= size
        self._emptied.discard(key)

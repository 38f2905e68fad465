"""What stays on the device because somebody said so: parameters, and marked tensors.

Owns the marks. Must not know groups or copies. A storage is what is marked, so that all views of it
stay too. Read next: `megatron_offload.engine.chunk`, which asks.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Marks"]


class Marks:
    """The marks of one manager; nothing is kept alive by one."""

    def __init__(self) -> None:
        # By identity: a set would compare tensors by value.
        self._parameters: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._parameter_storages: set[int] | None = set()
        self._storages: dict[int, StorageWeakRef] = {}

    def take_parameters(self, other: Marks) -> None:
        """Mark the parameters that ``other`` has marked."""
        self._parameters.update(other._parameters)
        self._parameter_storages = None

    def add(self, tensor: torch.Tensor) -> None:
        """Mark a tensor, and all that shares its storage."""
        if isinstance(tensor, torch.nn.Parameter):
            self._parameters[id(tensor)] = tensor
            self._parameter_storages = None
            return
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def begin_step(self) -> None:
        """Look again where parameters are: they move between steps, hardly within one."""
        self._parameter_storages = None

    def holds(self, storage_key: int) -> bool:
        """Whether the storage of this identity belongs to a parameter or was marked."""
        if self._parameter_storages is None:
            self._parameter_storages = {
                parameter.untyped_storage()._cdata for parameter in self._parameters.values()
            }
            self._storages = {k: ref for k, ref in self._storages.items() if not ref.expired()}
        return storage_key in self._parameter_storages or storage_key in self._storages

"""What stays on the device because somebody said so: parameters, and marked tensors.

A storage is what is marked, so that all views of it stay too; an attribute that another library has
set counts on the tensor that has it, and on all its views.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.backends.base import Backend

_OPT_OUT_MARKS = ("_do_not_offload", "_TE_do_not_offload", "_is_buffer")
_SETTING = "offloading_activation"

_everywhere: dict[int, StorageWeakRef] = {}
"""The storages that no manager moves."""


def mark_everywhere(tensor: torch.Tensor) -> None:
    """Keep a tensor on the device, whoever saves it; where it is a plain one, its storage too."""
    tensor._do_not_offload = True  # type: ignore[attr-defined]
    if type(tensor) is torch.Tensor:
        storage = tensor.untyped_storage()
        _everywhere[storage._cdata] = StorageWeakRef(storage)


def take_back(tensor: torch.Tensor) -> None:
    """Undo `mark_everywhere`, and what other libraries have set on the tensor or its base."""
    for marked in (tensor, tensor._base):
        if marked is not None:
            for mark in _OPT_OUT_MARKS:
                vars(marked).pop(mark, None)
            setattr(marked, _SETTING, True)
    if type(tensor) is torch.Tensor:
        _everywhere.pop(tensor.untyped_storage()._cdata, None)


def has_mark(tensor: torch.Tensor) -> bool:
    """Whether a mark on this very object says that it stays."""
    marks = tensor.__dict__
    return bool(marks) and (
        any(marks.get(mark, False) for mark in _OPT_OUT_MARKS) or marks.get(_SETTING, True) is False
    )


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter: of a plain one known without torch's own, slow check."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)


def may_be_activation(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, by itself and what it is a view of, that nobody has marked.

    No parameter, nor a subclass (fake, functional, quantised, distributed).
    """
    if type(tensor) is not torch.Tensor or (tensor.__dict__ and has_mark(tensor)):
        return False
    base = tensor._base
    return base is None or not (has_mark(base) or is_parameter(base))


def is_opted_out(tensor: torch.Tensor) -> bool:
    """Whether a mark on a tensor, or on what it is a view of, says that it stays."""
    base = tensor._base
    return has_mark(tensor) or (base is not None and has_mark(base))


class Marks:
    """The marks of one manager; nothing is kept alive by one."""

    def __init__(self) -> None:
        # By identity: a set would compare tensors by value.
        self._parameters: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._parameter_storages: set[int] = set()
        self._are_storages_old = False
        self._storages: dict[int, StorageWeakRef] = {}

    def take_parameters(self, other: Marks) -> None:
        """Mark the parameters that ``other`` has marked."""
        self._parameters.update(other._parameters)
        self._are_storages_old = True

    def add(self, tensor: torch.Tensor) -> None:
        """Mark a tensor, and all that shares its storage."""
        if is_parameter(tensor):
            self._parameters[id(tensor)] = tensor
            self._are_storages_old = True
            return
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def begin_step(self) -> None:
        """Look again where parameters are: they move between steps, hardly within one."""
        self._are_storages_old = True

    def activation_storage(self, tensor: torch.Tensor, backend: Backend) -> int | None:
        """Return the identity of the storage of what `may_be_activation`; None if it can't move.

        Never moved: parameters and what shares their storage, tensors that are not on the
        backend's device, layouts other than strided, lazily conjugated or negated tensors, zeros
        without memory (forward-mode AD), opted-out tensors, and empty ones.
        """
        if not backend.owns(tensor):
            return None
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.nbytes == 0:
            return None
        if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
            return None
        storage_key: int = tensor.untyped_storage()._cdata
        if self._are_storages_old:
            found = {parameter.untyped_storage()._cdata for parameter in self._parameters.values()}
            for storages in (self._storages, _everywhere):  # some of which may have gone
                for key in [key for key, ref in list(storages.items()) if ref.expired()]:
                    storages.pop(key, None)
            self._parameter_storages, self._are_storages_old = found, False
        if storage_key in self._parameter_storages or storage_key in self._storages:
            return None
        return None if storage_key in _everywhere else storage_key

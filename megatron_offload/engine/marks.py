"""What is kept on the device by request: parameters, and marked tensors.

A storage is what is marked, so that all views of it are kept too; an attribute that another library
has set counts on the tensor that has it, and on all its views.
"""

from __future__ import annotations

import weakref

import torch
from torch.nn.parameter import UninitializedTensorMixin, is_lazy  # type: ignore[attr-defined]

from megatron_offload.memory.nested import inner_tensors
from megatron_offload.memory.storage_ref import StorageRef

_OPT_OUT_MARKS = ("_do_not_offload", "_TE_do_not_offload", "_is_buffer")
_SETTING = "offloading_activation"
_Parameter = torch.nn.Parameter

_everywhere: dict[int, StorageRef] = {}
"""The storages that no manager offloads."""


def mark_everywhere(tensor: torch.Tensor) -> None:
    """Keep a tensor on the device wherever it is saved; of a plain one its storage too."""
    tensor._do_not_offload = True  # type: ignore[attr-defined]
    if type(tensor) is torch.Tensor:
        storage = tensor.untyped_storage()
        _everywhere[storage._cdata] = StorageRef(storage)


def unmark(tensor: torch.Tensor) -> None:
    """Undo `mark_everywhere`, and what other libraries have set on the tensor or its base."""
    for marked in (tensor, tensor._base):
        if marked is not None:
            for mark in _OPT_OUT_MARKS:
                vars(marked).pop(mark, None)
            setattr(marked, _SETTING, True)
    if type(tensor) is torch.Tensor:
        _everywhere.pop(tensor.untyped_storage()._cdata, None)


def _has_mark(tensor: torch.Tensor) -> bool:
    """Whether a mark on this very object says that it is kept."""
    marks = tensor.__dict__
    return bool(marks) and (
        any(marks.get(mark, False) for mark in _OPT_OUT_MARKS) or marks.get(_SETTING, True) is False
    )


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter: of plain ones known without torch's own, slow check."""
    kind = type(tensor)
    return kind is _Parameter or (kind is not torch.Tensor and isinstance(tensor, _Parameter))


def is_opted_out(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a mark that it is kept, or is a view of what has one or a parameter."""
    base = tensor._base
    return _has_mark(tensor) or (base is not None and (_has_mark(base) or is_parameter(base)))


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a strided tensor's storage are all of it, and there are some.

    Not of quantized, lazily conjugated or negated tensors, of zeros without memory (forward-mode
    AD), and of empty ones.
    """
    is_lazy = tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()
    return not is_lazy and not tensor.is_quantized and tensor.nbytes > 0


class Marks:
    """The marks of one manager; nothing is kept alive by one."""

    def __init__(self) -> None:
        # By identity: a set would compare tensors by value.
        self._parameters: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._storages: dict[int, StorageRef] = {}
        self._kept: dict[int, StorageRef] = {}
        """Those, and where parameters are: their identities, which no other storage gets."""
        self._is_old = False

    def add(self, tensor: torch.Tensor) -> None:
        """Mark a tensor, and all that shares its storage."""
        if is_parameter(tensor) or is_lazy(tensor):
            self._parameters[id(tensor)] = tensor
            self._is_old = True
            return
        if tensor.layout is not torch.strided:
            return  # it is never offloaded
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = self._storages[storage._cdata] = StorageRef(storage)

    def begin_step(self) -> None:
        """Look again where parameters are: they move between steps, hardly within one."""
        self._is_old = True

    def keeps(self, storage_key: int) -> bool:
        """Whether this manager keeps the storage of this identity, or all do."""
        if self._is_old:
            for storages in (self._storages, _everywhere):  # some of which may have gone
                for key in [key for key, ref in list(storages.items()) if ref.expired()]:
                    storages.pop(key, None)
            found = {
                (s := x.untyped_storage())._cdata: self._kept.get(s._cdata) or StorageRef(s)
                for x in inner_tensors(known() for known in self._parameters.valuerefs())
                if x.layout is torch.strided and not isinstance(x, UninitializedTensorMixin)
            }  # a lazy one has no memory
            self._kept, self._is_old = found | self._storages, False
        return storage_key in self._kept or storage_key in _everywhere

"""Who owns a storage, and counts its changes, and a weak reference that no interrupt can hurt.

PyTorch's own, ``StorageWeakRef``, gives its handle back in a finalizer in Python, which swallows an
interrupt that comes while it runs. Here a callback in C notes which handles are left, and the next
reference that is made frees them.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable

import torch
from torch._C._autograd import _unsafe_set_version_counter


class _Handle(weakref.ref["StorageRef"]):
    __hash__ = object.__hash__  # a weak reference's own needs what it refers to
    cdata = 0


_alive: set[_Handle] = set()
"""Kept here: one that died with its reference would report nothing."""

_left: deque[_Handle] = deque()


class StorageRef:
    """While it lives no other storage gets the identity, ``cdata``, of this one."""

    __slots__ = ("__weakref__", "cdata")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        while _left:
            handle = _left.popleft()
            _alive.discard(handle)
            if handle.cdata:  # else its making was interrupted
                torch.UntypedStorage._free_weak_ref(handle.cdata)
        self.cdata: int = storage._weak_ref()  # type: ignore[assignment]
        handle = _Handle(self, _left.append)
        handle.cdata = self.cdata
        _alive.add(handle)

    def expired(self) -> bool:
        """Whether the storage has gone."""
        return bool(torch.UntypedStorage._expired(self.cdata))


use_count_of = torch._C._storage_Use_Count
"""Counts the owners of the storage with this identity, its ``_cdata``."""


def num_owners(storage: torch.UntypedStorage) -> int:
    """Count the owners of a storage: tensors, and the Python handle itself."""
    return int(use_count_of(storage._cdata))


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether more than this tensor has its memory, as far as that can be known."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return not is_plain or num_owners(tensor.untyped_storage()) > 2  # with this line's handle


def has_no_other(
    storage: torch.UntypedStorage, owners: Iterable[weakref.ref[torch.Tensor]]
) -> bool:
    """Whether nothing has a storage but these tensors and what they are views of, in Python alone.

    Another tensor may be read, an input that a norm before the group has saved, say; and so may one
    of these that a node of no group has saved.
    """
    alive = [tensor for owner in owners if (tensor := owner()) is not None]
    alive += [tensor._base for tensor in alive if tensor._base is not None]
    known = {id(x): x for x in alive if x.untyped_storage()._cdata == storage._cdata}
    if num_owners(storage) > len(known) + 1:  # the Python handle
        return False
    views = Counter(id(x._base) for x in known.values() if x._base is not None)
    for key, x in known.items():
        has_accumulator = x.is_leaf and x.requires_grad  # the node that sums its gradient has it
        if x._use_count() > 1 + views[key] + has_accumulator:  # type: ignore[attr-defined]
            return False
    return True


def count_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one version counter, by which a change of one is one of the other.

    Parts of a storage may have counters of their own: of ``unsafe_chunk``, as cells of recurrent
    networks use it, or of ``.data``.
    """
    version = one._version
    try:
        _unsafe_set_version_counter((one,), (version + 1,))
        return other._version == version + 1
    finally:  # an interrupt, too
        _unsafe_set_version_counter((one,), (version,))

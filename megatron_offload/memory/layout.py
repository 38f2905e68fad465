"""What a strided tensor is within its storage."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import TypeAlias

import torch

ALIGNMENT_BYTES = 512
"""A block starts at a multiple of this within its storage, so that a reloaded tensor has the same
alignment as its source: kernels choose their code path, and so their rounding, by alignment. So
does what it has of host memory."""

ViewSpec: TypeAlias = tuple[int, tuple[torch.Size, torch.dtype] | None]
"""Bytes of a region, and the shape and dtype to show them in; None for flat bytes."""

LayoutKey: TypeAlias = tuple[torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype]
"""Size, stride, storage offset and dtype of a tensor."""

_MOST_LAYOUTS = 4096

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class TensorLayout:
    """What a strided tensor is within its storage: one object for all that are alike.

    Attributes:
        size, stride, offset, dtype: its own.
        num_bytes, num_elements: of what it shows; of what is expanded it has fewer bytes.
        is_special: whether its size or dtype may mean that it has no bytes of its own;
            `has_own_bytes` says.
        low, high: the byte range within its storage, from the first element to the end of the last.
        spec: of host memory, what takes it as it is; None where that can't be: it is not
            contiguous, or begins at no multiple of `ALIGNMENT_BYTES`.
        fresh_spec: the same, where fresh memory of its size has its strides too. Those of
            dimensions of size 1 may differ, by which kernels know the channels-last layout.
    """

    __slots__ = (
        *("dtype", "fresh_spec", "high", "is_contiguous", "is_special", "low", "num_bytes"),
        *("num_elements", "offset", "spec", "size", "stride"),
    )

    def __init__(self, key: LayoutKey) -> None:
        size, stride, offset, dtype = key
        self.size, self.stride, self.offset, self.dtype = size, stride, int(offset), dtype
        self.num_elements = num_elements = size.numel()
        self.is_special = num_elements == 0 or dtype.is_complex or dtype in _QUANTIZED
        self.low = self.offset * dtype.itemsize
        last = sum((many - 1) * step for many, step in zip(size, stride, strict=True))
        self.high = self.low + (last + 1) * dtype.itemsize if num_elements else self.low
        self.num_bytes = min(num_elements * dtype.itemsize, self.high - self.low)
        fresh = tuple(accumulate(size[:0:-1], mul, initial=1))[::-1][: len(size)]
        pairs = zip(size, stride, fresh, strict=True)
        self.is_contiguous = 0 in size or all(many == 1 or a == b for many, a, b in pairs)
        is_whole = self.is_contiguous and self.low % ALIGNMENT_BYTES == 0
        self.spec: ViewSpec | None = (self.num_bytes, (size, dtype)) if is_whole else None
        self.fresh_spec = self.spec if stride == fresh else None


class _Layouts(dict[LayoutKey, TensorLayout]):
    def __missing__(self, key: LayoutKey) -> TensorLayout:
        if len(self) >= _MOST_LAYOUTS:
            self.clear()
        layout = self[key] = TensorLayout(key)
        return layout


LAYOUTS = _Layouts()
"""All that were asked for lately."""


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Return the layout of a strided tensor."""
    return LAYOUTS[tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype]


def bytes_of(storage: torch.UntypedStorage, low: int = 0, high: int | None = None) -> torch.Tensor:
    """Return the flat bytes of a storage from one to another, by default all."""
    num_bytes = (storage.nbytes() if high is None else high) - low
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, low, (num_bytes,), (1,))

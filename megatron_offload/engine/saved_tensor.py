"""The record that autograd is handed in place of a saved tensor.

It finds its data through its own block, never by position, and knows nothing of chunks or order.
"""

from __future__ import annotations

import weakref

import torch

from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.group import ALIGNMENT_BYTES, Block, count_together
from megatron_offload.engine.modes import apart, has_modes
from megatron_offload.errors import InPlaceModificationError
from megatron_offload.memory.host_pool import ViewSpec

LayoutKey = tuple[torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype]
"""Size, stride, storage offset and dtype of a tensor."""

_MOST_LAYOUTS = 4096

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class TensorLayout:
    """What a strided tensor is within its storage: one object for all that are alike.

    Attributes:
        size, stride, offset, dtype: its own.
        num_bytes, num_elements: of what it shows.
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
        self.num_bytes = num_elements * dtype.itemsize
        self.is_special = num_elements == 0 or dtype.is_complex or dtype in _QUANTIZED
        self.low = self.offset * dtype.itemsize
        last = sum((many - 1) * step for many, step in zip(size, stride, strict=True))
        self.high = self.low + (last + 1) * dtype.itemsize if num_elements else self.low
        fresh = _fresh_strides(size)
        pairs = zip(size, stride, fresh, strict=True)
        self.is_contiguous = 0 in size or all(many == 1 or a == b for many, a, b in pairs)
        is_whole = self.is_contiguous and self.low % ALIGNMENT_BYTES == 0
        self.spec: ViewSpec | None = (self.num_bytes, (size, dtype)) if is_whole else None
        self.fresh_spec = self.spec if stride == fresh else None


def _fresh_strides(size: torch.Size) -> tuple[int, ...]:
    """Return the strides of fresh memory of a size."""
    strides, step = [], 1
    for many in reversed(size):
        strides.append(step)
        step *= many
    return tuple(reversed(strides))


class _Layouts(dict[LayoutKey, TensorLayout]):
    def __missing__(self, key: LayoutKey) -> TensorLayout:
        if len(self) >= _MOST_LAYOUTS:
            self.clear()
        layout = self[key] = TensorLayout(key)
        return layout


LAYOUTS = _Layouts()
"""All that were asked for lately."""


def changed_in_place(what: str, version: int, expected: int) -> InPlaceModificationError:
    """Return the error of a saved tensor that has changed, as torch words it."""
    return InPlaceModificationError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation: {what} is at version {version}; expected version {expected} instead"
    )


class SavedTensor:
    """The record that stands for one saved tensor in the autograd graph.

    It knows the tensor's `TensorLayout`, so that a transposed, expanded or overlapping view is
    reloaded exactly as it was.

    Args:
        tensor: what autograd saves.
        group_name: for messages.

    Attributes:
        alias: the tensor: a leaf itself, as autograd keeps it, else detached, because holding a
            node's own output from that node would be a cycle.
        base: the identity of what it is a view of: views of one tensor have one version counter.
        block: where its bytes are; None while it is kept as it is.
        layout: of the tensor when reloaded; noted before it has a block.
        leaf: where the alias of a tensor without a gradient was taken, that tensor: autograd itself
            keeps no alias of it.
    """

    base: int
    layout: TensorLayout
    leaf: weakref.ref[torch.Tensor] | None

    __slots__ = (
        *("__weakref__", "alias", "base", "block", "layout", "group_name", "is_detached", "leaf"),
        "version",
    )

    def __init__(self, tensor: torch.Tensor, group_name: str) -> None:
        self.version: int = tensor._version
        self.block: Block | None = None
        self.leaf = None
        self.group_name = group_name
        self.is_detached = is_detached = not tensor.is_leaf
        self.alias = tensor.detach() if is_detached else tensor

    def detach(self) -> torch.Tensor:
        """Take an alias of a leaf, which may be emptied, and return it."""
        leaf = self.alias
        if not leaf.requires_grad:
            self.leaf = weakref.ref(leaf)
        self.alias, self.is_detached = leaf.detach(), True
        return self.alias

    def _description(self) -> str:
        if self.block is None:
            shape, dtype = self.alias.shape, self.alias.dtype
        else:
            shape, dtype = self.layout.size, self.layout.dtype
        return f"of shape {list(shape)} and dtype {dtype}, saved in group {self.group_name!r},"

    @graph_break
    def unpack(self) -> torch.Tensor:
        """Return the saved tensor; the compute stream waits for its reload where there is one.

        Raises:
            InPlaceModificationError: the tensor was changed in place since it was saved. With
                hooks set autograd skips this check of its own, so it is made here.
        """
        if has_modes():
            return apart(self.unpack)
        alias = self.alias
        if alias._version != self.version:
            self.check_version()
        block = self.block
        if block is None:  # it may get one yet
            return alias.detach() if self.is_detached else alias
        if block.released:
            found = self._in_target(block, block.store.target_of(block))
        else:
            if block.flight is not None and not block.cancelled:
                block.store.keep_source(block)
            found = alias.detach()  # the alias itself may be emptied
        return found if self.leaf is None else self._as_leaf(block, found)

    def _in_target(self, block: Block, target: torch.Tensor) -> torch.Tensor:
        """Return the tensor in its block's target; only a backward can have written there.

        All views of it count their changes together.
        """
        layout, version = self.layout, 0 if target.is_inference() else target._version
        if block.target_version is None:
            block.target_version = version
        elif block.target_version != version and self._counts_with(block):
            what = f"a tensor {self._description()}"
            raise changed_in_place(f"{what} by a backward,", version, block.target_version)
        if block.spec is layout.fresh_spec and block.reload is not None:
            return target.detach()  # it is all of the block
        is_whole = target.dtype is layout.dtype and target.shape == layout.size
        if is_whole and target.stride() == layout.stride:
            return target.detach()
        return self.view_in(target, block.low)

    def _counts_with(self, block: Block) -> bool:
        """Whether a change of any part of a block is one of this; else it may be another's."""
        return all(count_together(self.alias, one) for one in (block.alias, *block.others))

    def _as_leaf(self, block: Block, found: torch.Tensor) -> torch.Tensor:
        """Return a tensor that something else has too, if autograd's own would be.

        What has no other owner may become the gradient of a leaf.
        """
        assert self.leaf is not None
        leaf = self.leaf()
        if leaf is not None:
            leaf._fix_weakref()  # type: ignore[attr-defined]  # its Python object may be going
            if not block.released or leaf.untyped_storage().data_ptr() == block.address:
                return leaf
        if block.handed is None:
            block.handed = {}
        return block.handed.setdefault(self.layout, found)

    def check_version(self) -> None:
        """Raise `InPlaceModificationError` where the tensor was changed since it was saved."""
        version = self.alias._version
        if version != self.version:
            raise changed_in_place(f"a tensor {self._description()}", version, self.version)

    def view_in(self, memory: torch.Tensor, low: int) -> torch.Tensor:
        """Return the tensor in memory that begins with byte ``low`` of what was its storage."""
        layout = self.layout
        shift = memory.storage_offset() * memory.itemsize - low
        offset = layout.offset + shift // layout.dtype.itemsize
        if memory.dtype is not layout.dtype:
            flat = memory.detach().view(-1).view(torch.uint8)
            memory = flat[: flat.numel() - flat.numel() % layout.dtype.itemsize].view(layout.dtype)
        return memory.as_strided(layout.size, layout.stride, offset).detach()

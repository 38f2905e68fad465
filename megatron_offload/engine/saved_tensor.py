"""The record that autograd is handed in place of a saved tensor.

It finds its data through its own block, never by position, and knows nothing of chunks or order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron_offload.engine.block_state import HAVE_SOURCE, IN_FLIGHT, RELOADED
from megatron_offload.engine.group import Block
from megatron_offload.engine.hooks import apart, graph_break, has_modes
from megatron_offload.errors import InPlaceModificationError
from megatron_offload.memory.layout import TensorLayout
from megatron_offload.memory.storage_ref import count_together


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

    # [Note: the check for in-place changes] Autograd skips its own where hooks are set, so the
    # record makes it, by an alias with the tensor's version counter. The release empties that,
    # which drops the memory and keeps the counter.
    @graph_break
    def unpack(self) -> torch.Tensor:
        """Return the saved tensor; the compute stream waits for its reload where there is one.

        Raises:
            InPlaceModificationError: the tensor was changed in place since it was saved.
        """
        if has_modes():
            return apart(self.unpack)
        alias = self.alias
        if alias._version != self.version:
            raise changed_in_place(f"a tensor {self._description()}", alias._version, self.version)
        block = self.block
        if block is None:  # it may get one yet
            return alias.detach() if self.is_detached else alias
        if block.state in HAVE_SOURCE:
            if block.state is IN_FLIGHT:
                block.store.keep_source(block)
            found = alias.detach()  # the alias itself may be emptied
        if block.state not in HAVE_SOURCE:  # or no longer: another thread may have released it
            found = self._in_target(block, block.store.target_of(block))
        return found if self.leaf is None else self._as_leaf(self.leaf(), block, found)

    def _in_target(self, block: Block, target: torch.Tensor) -> torch.Tensor:
        """Return the tensor in its block's target; only a backward can have written there.

        All views of it count their changes together.
        """
        layout, version = self.layout, 0 if target.is_inference() else target._version
        if block.target_version is None:
            block.target_version = version
        elif block.target_version != version and all(  # else it may be another part's change
            count_together(self.alias, one) for one in block.aliases
        ):
            what = f"a tensor {self._description()}"
            raise changed_in_place(f"{what} by a backward,", version, block.target_version)
        if block.spec is layout.fresh_spec and block.state is RELOADED:
            return target.detach()  # it is all of the block
        return self.view_in(target, block.low)

    # [Note: the gradient that autograd stole from what unpack returned] Autograd takes a tensor
    # that nothing else has for the gradient of a leaf as it is, without a copy. A leaf that was
    # saved has an owner; an alias of ours in its place has none. As a gradient it would share its
    # memory with what the block's other records read, and change with the next gradient that is
    # added up.
    def _as_leaf(
        self, leaf: torch.Tensor | None, block: Block, found: torch.Tensor
    ) -> torch.Tensor:
        """Return the leaf that was saved, or a tensor that the block has too."""
        if leaf is not None:
            leaf._fix_weakref()  # type: ignore[attr-defined]  # its Python object may be going
            if not block.released or leaf.untyped_storage().data_ptr() == block.address:
                return leaf
        if block.handed is None:
            block.handed = {}
        return block.handed.setdefault(self.layout, found)

    def view_in(self, memory: torch.Tensor, low: int) -> torch.Tensor:
        """Return the tensor in memory that begins with byte ``low`` of what was its storage."""
        layout = self.layout
        shift = memory.storage_offset() * memory.itemsize - low
        offset = layout.offset + shift // layout.dtype.itemsize
        if memory.dtype is not layout.dtype:
            flat = memory.detach().view(-1).view(torch.uint8)
            memory = flat[: flat.numel() - flat.numel() % layout.dtype.itemsize].view(layout.dtype)
        return memory.as_strided(layout.size, layout.stride, offset).detach()


class SavedWrapper:
    """The record that stands for a saved wrapper in the autograd graph.

    Its inner tensors move, and a wrapper of the same type, size and meaning is made of them.
    ``alias`` is the wrapper's `hollow` one; ``pack`` records an inner tensor.
    """

    __slots__ = "_alias", "_context", "_inner", "_kind", "_others", "_size", "_stride", "_version"

    def __init__(
        self, tensor: torch.Tensor, alias: torch.Tensor, pack: Callable[[torch.Tensor], Any]
    ) -> None:
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        self._version = tensor._version
        self._alias = alias
        self._kind: Any = type(tensor)
        self._size = tensor.size()
        self._stride = tensor.stride()
        found, is_nested = {name: getattr(tensor, name) for name in names}, tensor.is_nested
        self._inner = {
            # What says how long a nested tensor's rows are has to be that very tensor.
            name: pack(x) if x.is_floating_point() or not is_nested else SavedTensor(x, name)
            for name, x in found.items()
            if isinstance(x, torch.Tensor)
        }
        # Newer versions of torch list a device mesh among the inner tensors.
        self._others = {name: inner for name, inner in found.items() if name not in self._inner}

    def unpack(self) -> torch.Tensor:
        """Return a wrapper like the one that was saved, around the inner tensors.

        Raises:
            InPlaceModificationError: it or an inner tensor was changed in place since it was saved.
        """
        if self._alias._version != self._version:
            what = f"a {self._kind.__name__} of shape {list(self._size)}"
            raise changed_in_place(what, self._alias._version, self._version)
        found = self._others | {name: inner.unpack() for name, inner in self._inner.items()}
        tensor: torch.Tensor = self._kind.__tensor_unflatten__(
            found, self._context, self._size, self._stride
        )
        return tensor

"""What of a chunk's groups is offloaded, and how much of it may be in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Rules:
    """The rules of one chunk."""

    min_tensor_bytes: int = 0
    """Smaller tensors are kept on the device."""
    min_tensor_elements: int = 0
    """The same in elements; both must hold."""
    max_inflight_groups: int | None = None
    """Most groups of one name whose device memory is held for their copies."""
    max_inflight_blocks: int | None = None
    """The same for blocks, of all names."""
    should_offload: Callable[[int], bool] | None = None
    """Is asked for each new block, with its bytes, whether it is offloaded, be it needed soon or
    not. None for all, as far as that is of use."""
    configured: tuple[str, ...] = ()
    """The units and patterns that the configuration names."""
    recomputes: bool = True
    """Whether tensors that have a recipe are recomputed; else they are offloaded."""

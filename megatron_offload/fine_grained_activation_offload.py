"""Megatron-core's documented offload API under its documented names: a facade over the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_offload.engine.boundary import Tensors, commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager

__all__ = ["fine_grained_offloading_group_commit", "fine_grained_offloading_group_start"]


def fine_grained_offloading_group_start(tensor: Tensors, name: str | None = None) -> Tensors:
    """Mark the start of a layer group."""
    return start_group(PipelineOffloadManager.get_instance(), tensor, name or "")


def fine_grained_offloading_group_commit(
    tensor: Tensors,
    name: str,
    forced_released_tensors: Sequence[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> Tensors:
    """Mark the end of a layer group."""
    return commit_group(
        PipelineOffloadManager.get_instance(),
        tensor,
        name,
        forced_released_tensors,
        delay=delay_offload,
    )

"""One forward of one model chunk, with the documented entry points.

Owns the documented names of the chunk handler. Must not know copies: every call is handed to the
engine. Names that step Megatron's own cursors raise `UnsupportedCallError`.

Invariant: a handler called by hand leaves the engine in the same state as the boundaries in
`megatron_offload.engine.boundary` would. Read next: `megatron_offload.documented.manager`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from megatron_offload.backends.base import Stream
from megatron_offload.core.profile import GroupKey
from megatron_offload.documented.call_forms import read_commit_arguments, read_find_arguments
from megatron_offload.engine import chunk as engine_chunk
from megatron_offload.engine import manager as engine_manager
from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import StateError, UnsupportedCallError
from megatron_offload.memory.tensor_pool import GPUTensorPool

__all__ = ["ChunkOffloadHandler", "unsupported"]

_COMMIT_INSTEAD = (
    "the manager decides and issues a group's copies when it is committed: call "
    "on_group_commit_forward, or fine_grained_offloading_group_commit"
)
_PREFETCH_INSTEAD = (
    "reloads are issued along the learned order of backwards within OffloadConfig.prefetch_bytes, "
    "at every boundary; a tensor that is needed sooner is reloaded when it is unpacked"
)


def unsupported(name: str, instead: str) -> NoReturn:
    """Say what replaces a name that has no meaning here.

    Raises:
        UnsupportedCallError: always.
    """
    raise UnsupportedCallError(f"{name} steps bookkeeping that this design doesn't have: {instead}")


class ChunkOffloadHandler(engine_chunk.ChunkOffloadHandler):
    """One forward of one model chunk, with the documented entry points.

    Args:
        min_offloaded_tensor_size: smaller tensors stay on the device; in elements.
        cpu_tensor_pool: kept for callers that ask for it; copies go to the manager's own pool.
        max_inflight_offloads: most groups of one name whose device memory is held for their copies;
            None sets no such bound.
        manager: whose streams and pools are used; by default the process's manager.
        vp_stage: virtual pipeline stage.
        min_tensor_bytes: the smallest tensor in bytes; both bounds hold.
    """

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool | None = None,
        max_inflight_offloads: int | None = None,
        *,
        manager: engine_manager.PipelineOffloadManager | None = None,
        vp_stage: int = 0,
        min_tensor_bytes: int = 0,
    ) -> None:
        super().__init__(
            manager or engine_manager.PipelineOffloadManager.get_instance(),
            vp_stage=vp_stage,
            min_tensor_bytes=min_tensor_bytes,
            min_tensor_elements=min_offloaded_tensor_size,
        )
        self.max_inflight_groups = max_inflight_offloads
        self.cpu_tensor_pool = cpu_tensor_pool
        self._in_backward: list[OffloadGroup] = []

    # Questions about tensors are answered without ``__init__`` too, as by the original.
    min_tensor_bytes = 0
    min_tensor_elements = 0
    open_groups: list[OffloadGroup] = []  # noqa: RUF012 - replaced by ``__init__``, never changed

    def __getattr__(self, name: str) -> Any:
        if name == "manager":
            return engine_manager.PipelineOffloadManager.get_instance()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def min_offloaded_tensor_size(self) -> int:
        """Smallest tensor that moves, in elements."""
        return self.min_tensor_elements

    @min_offloaded_tensor_size.setter
    def min_offloaded_tensor_size(self, num_elements: int) -> None:
        self.min_tensor_elements = num_elements

    @property
    def do_offload(self) -> bool:
        """Whether groups are recorded at all."""
        return self.manager.do_offload

    @property
    def d2h_stream(self) -> Stream:
        """The stream that copies to the host."""
        return self.manager.backend.d2h_stream

    @property
    def h2d_stream(self) -> Stream:
        """The stream that copies to the device."""
        return self.manager.backend.h2d_stream

    @property
    def vpp_rank(self) -> int:
        """Virtual pipeline stage."""
        return self.vp_stage

    # Tensors

    def offload(
        self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True
    ) -> SavedTensor:
        """Issue one tensor's copy to the host.

        Args:
            src_tensor: any tensor; what can't move stays where it is.
            pin_memory: has no effect, host memory is always pinned where there is a device.
            use_cpu_pool: has no effect, host memory always comes from the manager's pool.

        Returns:
            The record to hand to `reload`. The device memory is free once the caller has dropped
            the tensor and the in-flight window has passed.
        """
        loose = engine_chunk.ChunkOffloadHandler(self.manager, vp_stage=self.vp_stage)
        group = OffloadGroup(loose, GroupKey(-1, 0), "offload", self.manager.transfers)
        state = group.pack(src_tensor)
        group.num_bytes = sum(block.num_bytes for block in group.blocks())
        self.manager.offload(group)
        return state

    def reload(self, state: SavedTensor, non_blocking: bool | None = None) -> torch.Tensor:
        """Bring back what `offload` moved; the host is not blocked in either case."""
        return state.unpack()

    def tensor_push(self, tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
        """Record a tensor for the group that was started last; the pack hook.

        Returns:
            The record; the tensor itself where it is not an activation on this device.

        Raises:
            StateError: no group is open.
        """
        if type(tensor) is not torch.Tensor or not self.manager.backend.owns(tensor):
            return tensor
        if not self.open_groups:
            raise StateError("tensor_push without an open group: call on_group_start_forward first")
        return self.open_groups[-1].pack(tensor)

    def tensor_pop(self, tensor_tag: SavedTensor | torch.Tensor) -> torch.Tensor:
        """Return the tensor that `tensor_push` recorded; the unpack hook. Tensors pass through."""
        return tensor_tag if isinstance(tensor_tag, torch.Tensor) else tensor_tag.unpack()

    def tensor_need_offloading_checker(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor can move and is large enough."""
        return self.may_move(tensor)

    # Groups

    def on_group_start_forward(self, name: str | None) -> OffloadGroup | None:
        """Open a group; None where nothing is recorded (no grad, recompute, switched off)."""
        return self.start_group(name or "") if self.manager.records() else None

    def on_group_commit_forward(self, *args: Any, **kwargs: Any) -> OffloadGroup | None:
        """Close a group and issue its copies.

        Call forms: ``(forced_released_tensors)``, which closes the group that was started last, and
        ``(name, forced_released_tensors)``.

        Returns:
            The group; None where nothing is recorded or no such group is open.
        """
        found = read_commit_arguments("on_group_commit_forward", args, kwargs)
        return self.close_and_commit(found.get("name"), found["forced_released_tensors"] or ())

    def close_and_commit(
        self, name: str | None, forced: Iterable[torch.Tensor], *, delay: bool = False
    ) -> OffloadGroup | None:
        """Close a group and issue its copies, now or at the next `flush_delayed_groups`."""
        group = self.close_group(name) if self.manager.records() else None
        if group is not None:
            self.manager.commit(group, forced, delay=delay)
        return group

    def on_group_commit_backward(self, name: str) -> None:
        """Backward needs a group's data: of the groups of this name that wait, the newest.

        Raises:
            StateError: no group of this name waits for its backward.
        """
        for group in reversed(self.groups):
            waits = group.state is not GroupState.DONE and group not in self._in_backward
            if waits and group.name == name and group not in self.open_groups:
                self._in_backward.append(group)
                self.manager.enter_backward(group)
                return
        raise StateError(f"no group {name!r} of this chunk waits for its backward")

    def on_group_start_backward(self) -> None:
        """Backward has left the group that it entered last.

        Raises:
            StateError: `on_group_commit_backward` was not called before.
        """
        if not self._in_backward:
            raise StateError("no group's backward is under way: call on_group_commit_backward")
        self.manager.leave_backward(self._in_backward.pop())

    def find_group_with_name(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first group of a name, or None.

        Call forms: ``(name, start_index=0)``, which looks through this chunk, and
        ``(groups, name, start_index=0)``.
        """
        found = read_find_arguments("find_group_with_name", args, kwargs)
        groups = found.get("groups", self.groups)[found["start_index"] :]
        return next((group for group in groups if group.name == found["name"]), None)

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether the chunk has no group, or none of this name."""
        return not any(name is None or group.name == name for group in self.groups)

    def get_max_deduplicated_groups(self) -> int:
        """Return how many different group names the chunk has."""
        return len({group.name for group in self.groups})

    def reset(self) -> None:
        """Forget groups that were started and not committed; their tensors stay on the device."""
        self.open_groups.clear()
        self._in_backward.clear()

    # Steps of Megatron's own bookkeeping

    def finish_all_groups(self, name: str | None = None) -> NoReturn:
        """Raise `UnsupportedCallError`: a chunk is made new for every forward."""
        unsupported(
            "ChunkOffloadHandler.finish_all_groups",
            "a chunk is made new for every forward and never runs out of groups; "
            "open groups are in chunk.open_groups",
        )

    def find_next_group(self, name: str | None = None) -> NoReturn:
        """Raise `UnsupportedCallError`: no group is found by position."""
        unsupported(
            "ChunkOffloadHandler.find_next_group",
            "groups are bound to the autograd graph; find_group_with_name looks one up by name",
        )

    def bulk_offload_group(self, group_to_offload: Any = None) -> NoReturn:
        """Raise `UnsupportedCallError`: copies are issued at the commit."""
        unsupported("ChunkOffloadHandler.bulk_offload_group", _COMMIT_INSTEAD)

    def should_bulk_offload(self, group: Any = None) -> NoReturn:
        """Raise `UnsupportedCallError`: the manager decides at the commit."""
        unsupported("ChunkOffloadHandler.should_bulk_offload", _COMMIT_INSTEAD)

    def bulk_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UnsupportedCallError`: copies are issued at the commit."""
        unsupported("ChunkOffloadHandler.bulk_offload", _COMMIT_INSTEAD)

    def bulk_reload_group(self) -> NoReturn:
        """Raise `UnsupportedCallError`: the prefetcher chooses what comes back next."""
        unsupported("ChunkOffloadHandler.bulk_reload_group", _PREFETCH_INSTEAD)

    def pre_reload_last_layer(self) -> NoReturn:
        """Raise `UnsupportedCallError`: the prefetcher chooses what comes back next."""
        unsupported("ChunkOffloadHandler.pre_reload_last_layer", _PREFETCH_INSTEAD)

    def bulk_reload(self) -> NoReturn:
        """Raise `UnsupportedCallError`: the prefetcher chooses what comes back next."""
        unsupported("ChunkOffloadHandler.bulk_reload", _PREFETCH_INSTEAD)

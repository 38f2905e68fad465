"""Megatron's chunk handler: its documented entry points, over a chunk of the engine's.

A call by hand leaves the engine in the state in which `fine_grained_offloading_group_start` and its
counterpart would. Names that only step Megatron's own bookkeeping raise an error that says what
replaces them (`REPLACED`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch

from megatron_offload.backends.base import Wait
from megatron_offload.core.group import GroupState
from megatron_offload.engine.chunk import ChunkOffloadHandler as Chunk
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager as Engine
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import StateError
from megatron_offload.megatron_api.tensor_pool import GPUTensorPool

HostState = tuple[torch.device, torch.Tensor, bool]

UNSAID: Any = object()


def said(*given: Any) -> list[Any]:
    """Return what of a name and forced tensors a call says: megatron-core 0.16 says no name."""
    found = [one for one in given if one is not UNSAID]
    if not found or isinstance(found[-1], str):
        raise TypeError("a group's commit has no 'forced_released_tensors'; None for no tensors")
    return found


def reached(path: str, doc: str) -> Any:
    """Make a property of what lies at a dotted path, to read and to set."""
    owner, name = path.rsplit(".", 1)
    find_owner = attrgetter(owner)
    return property(attrgetter(path), lambda self, x: setattr(find_owner(self), name, x), doc=doc)


class ChunkOffloadHandler:
    """One forward of one model chunk, with the documented entry points.

    Args:
        min_offloaded_tensor_size: smaller tensors are kept on the device; in elements.
        cpu_tensor_pool: where `offload` takes host memory.
        max_inflight_offloads: most groups of one name in flight; None sets no bound.
        engine: the manager that has begun the chunk; by default the process's.
        chunk: the engine's; by default a new one, for a caller who opens and commits its groups.
    """

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool,
        max_inflight_offloads: int | None = None,
        *,
        engine: Engine | None = None,
        chunk: Chunk | None = None,
    ) -> None:
        self.engine = engine or Engine.get_instance()
        self.chunk = chunk or self.engine.new_chunk()
        self.cpu_tensor_pool = cpu_tensor_pool
        self.min_offloaded_tensor_size = min_offloaded_tensor_size
        self.chunk.rules.max_inflight_groups = max_inflight_offloads
        self._in_backward: list[OffloadGroup] = []

    min_offloaded_tensor_size = reached(
        "chunk.rules.min_tensor_elements", "Smallest tensor that is offloaded, in elements."
    )
    do_offload = reached("engine.do_offload", "Whether groups are recorded at all.")
    d2h_stream = reached("engine.backend.d2h_stream", "The stream that copies to the host.")
    h2d_stream = reached("engine.backend.h2d_stream", "The stream that copies to the device.")
    vpp_rank = reached("chunk.vp_stage", "Virtual pipeline stage.")
    offload_groups = reached("chunk.groups", "The groups that were started, in order.")

    # Tensors

    def offload(
        self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True
    ) -> HostState:
        """Copy one tensor to the host; the compute stream waits for the copy, the host doesn't.

        Returns what to hand to `reload`: the device, the copy, and whether `cpu_tensor_pool` has
        allocated it. Without ``use_cpu_pool`` it is allocated, page-locked unless ``pin_memory`` is
        off. A `RuntimeError` says that the pool is full.
        """
        backend = self.engine.backend
        source = src_tensor.detach().contiguous()
        if use_cpu_pool:
            copy = self.cpu_tensor_pool.allocate(source.shape, source.dtype)
        elif pin_memory and source.nbytes:
            copy = backend.empty_host(source.nbytes).view(source.dtype).view(source.shape)
        else:
            copy = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        backend.wait_compute(backend.d2h_stream, Wait.W1)
        done = backend.copy([(copy, source)], backend.d2h_stream, "offload")
        backend.wait(backend.compute_stream(), done, Wait.W2)
        return source.device, copy, use_cpu_pool

    def reload(self, state: HostState, non_blocking: bool | None = None) -> torch.Tensor:
        """Reload what `offload` has copied, once where the pool allocated the copy.

        With ``non_blocking=False`` the host waits. A `ValueError`: the pool was reset since.
        """
        _, copy, is_pooled = state
        backend = self.engine.backend
        tensor = backend.empty_device_like(copy)
        backend.wait_compute(backend.h2d_stream, Wait.W6)
        backend.wait(backend.h2d_stream, backend.record(backend.d2h_stream), Wait.W3)
        done = backend.copy([(tensor, copy)], backend.h2d_stream, "reload")
        backend.wait(backend.compute_stream(), done, Wait.W4)
        if non_blocking is False:
            backend.sync_copies()
        if is_pooled:
            self.cpu_tensor_pool.free(copy)
        return tensor

    def tensor_push(self, tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
        """Record an activation for the newest open group; the pack hook. Others pass through."""
        if type(tensor) is not torch.Tensor or not self.engine.backend.owns(tensor):
            return tensor
        if not self.chunk.open_groups:
            raise StateError("no group of this chunk is open: call on_group_start_forward first")
        return self.chunk.pack(self.chunk.open_groups[-1], tensor)

    def tensor_pop(self, tensor_tag: SavedTensor | torch.Tensor) -> torch.Tensor:
        """Return the tensor that `tensor_push` recorded; the unpack hook. Tensors pass through."""
        return tensor_tag if isinstance(tensor_tag, torch.Tensor) else tensor_tag.unpack()

    def tensor_need_offloading_checker(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor can be offloaded and is large enough."""
        return self.chunk.may_move(tensor)

    # Forward

    def on_group_start_forward(self, name: str | None) -> OffloadGroup | None:
        """Open a group; None where nothing is recorded (no grad, recompute, switched off)."""
        engine = self.engine
        return engine.start_group(self.chunk, name or "") if engine.records() else None

    def on_group_commit_forward(
        self, name: Any = UNSAID, forced_released_tensors: Any = UNSAID
    ) -> OffloadGroup | None:
        """Close a group and issue its copies, if the policy offloads it; None where none is open.

        Call forms: ``(forced_released_tensors)``, ``(name, forced_released_tensors)``.
        """
        return self.commit(*(None, *said(name, forced_released_tensors))[-2:])

    def commit(
        self, name: str | None, forced: Sequence[torch.Tensor] | None, *, delay: bool = False
    ) -> OffloadGroup | None:
        """Close a group and issue its copies, now or at the next flush of delayed groups."""
        engine = self.engine
        group = self.chunk.close_group(name) if engine.records() else None
        if group is not None:
            group.force(forced or ())
            engine.commit(group, delay)
        return group

    # Backward

    def on_group_commit_backward(self, name: str) -> None:
        """Backward needs a group's data: of the groups of this name that wait, the newest."""
        busy = (*self._in_backward, *self.chunk.open_groups)
        for group in reversed(self.chunk.groups):
            if group.name == name and group.state is not GroupState.DONE and group not in busy:
                break
        else:
            raise StateError(f"no group {name!r} of this chunk waits for its backward")
        self._in_backward.append(group)
        self.engine.enter_backward(group)

    def on_group_start_backward(self) -> None:
        """Backward has left the group that `on_group_commit_backward` entered last."""
        if not self._in_backward:
            raise StateError("no group's backward is under way: call on_group_commit_backward")
        self.engine.leave_backward(self._in_backward.pop())

    # The chunk's groups

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether the chunk has no group, or none of this name."""
        return not any(name in (None, group.name) for group in self.chunk.groups)

    def reset(self) -> None:
        """Leave what is open, which is kept on the device, and what backward is in."""
        self.chunk.open_groups.clear()
        self._in_backward.clear()


_GROUPS = "offload_groups, which has them in order"
_FORWARD = "on_group_commit_forward, which asks the policy"
_BACKWARD = "on_group_commit_backward, which reloads its group and those that are needed next"

REPLACED = {
    "find_group_with_name": _GROUPS,
    "find_next_group": _GROUPS,
    "finish_all_groups": _GROUPS,
    "get_max_deduplicated_groups": _GROUPS,
    "should_bulk_offload": _FORWARD,
    "bulk_offload": _FORWARD,
    "bulk_offload_group": _FORWARD,
    "pre_reload_last_layer": _BACKWARD,
    "bulk_reload_group": _BACKWARD,
    "bulk_reload": _BACKWARD,
}
"""Documented names of a handler that step through groups by place, and what to use in their place:
here groups are found by their graphs, and nothing is stepped through."""


def _refusal(name: str, replacement: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            f"{name}() steps Megatron's own bookkeeping, which isn't kept here; use {replacement}"
        )

    return refuse


for _name, _replacement in REPLACED.items():
    setattr(ChunkOffloadHandler, _name, _refusal(_name, _replacement))

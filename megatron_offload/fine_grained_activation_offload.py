"""Megatron-core's documented offload API under its documented names.

Owns names and call forms: those documented with megatron-core 0.16 and those of 0.17 to 0.19,
served by the same callables. Must not know megatron-core itself, nor streams, copies or plans:
every call is handed to the engine. There nothing is found by position, so names that step
Megatron's own queues and cursors raise `UnsupportedCallError` and say what replaces them.

Invariant: there is one manager in a process, whichever class it is asked for through.
Read next: `megatron_offload.engine.manager`; `megatron_offload.integrations.megatron_core`, which
puts this module in Megatron's place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_offload._call_forms import (
    read_chunk_arguments,
    read_commit_arguments,
    read_find_arguments,
    read_push_arguments,
)
from megatron_offload.backends.base import Backend, Event, Stream
from megatron_offload.config import OffloadConfig
from megatron_offload.engine import chunk as engine_chunk
from megatron_offload.engine import manager as engine_manager
from megatron_offload.engine.boundary import (
    GroupCommit,
    GroupStart,
    Tensors,
    commit_group,
    start_group,
)
from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import StateError, UnsupportedCallError
from megatron_offload.memory.tensor_pool import GPUTensorPool, OffloadTensorPool
from megatron_offload.planning.profile import GroupKey

__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "ChunkOffloadHandler",
    "FineGrainedActivationOffloadingInterface",
    "FineGrainedOffloadingBackwardRecordFunction",
    "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction",
    "GPUTensorPool",
    "OffloadTensorGroup",
    "OffloadTensorPool",
    "PipelineOffloadManager",
    "debug_rank",
    "fine_grained_offloading_backward_record",
    "fine_grained_offloading_disable_offload",
    "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_forward_record",
    "fine_grained_offloading_group_commit",
    "fine_grained_offloading_group_flush_delayed_groups",
    "fine_grained_offloading_group_offload",
    "fine_grained_offloading_group_start",
    "print_offload_summary_table",
]

DEBUG = False
"""Whether `debug_rank` logs anything."""

DEBUG_RANK = 0
"""The rank that logs."""

_LOGGER = logging.getLogger(__name__)


def debug_rank(message: str) -> None:
    """Log ``message`` at level DEBUG if `DEBUG` is set and this is rank `DEBUG_RANK`."""
    if DEBUG and _rank() == DEBUG_RANK:
        _LOGGER.debug(message)


def print_offload_summary_table(
    total_offload_bytes: Mapping[str, int],
    local_duplicate_summary: Mapping[str, int] | None = None,
    process_group: Any = None,
) -> None:
    """Print one line for each rank and one column for each group name, in MiB, on the first rank.

    Collective over ``process_group`` where torch.distributed runs; without it this process stands
    alone.

    Args:
        total_offload_bytes: this rank's bytes for each group name.
        local_duplicate_summary: this rank's bytes for each group name that were not moved a second
            time because another group had saved the same memory; a second table.
        process_group: who takes part; None is everybody.
    """
    mine = (dict(total_offload_bytes), dict(local_duplicate_summary or {}))
    everyone: list[tuple[dict[str, int], dict[str, int]]] = [mine]
    if dist.is_available() and dist.is_initialized():
        gathered: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, mine, group=process_group)
        if dist.get_rank(process_group) != 0:
            return
        everyone = gathered
    console = Console()
    console.print(_bytes_table("Activations offloaded (MiB)", [entry[0] for entry in everyone]))
    if any(entry[1] for entry in everyone):
        title = "Shared with another group, moved once (MiB)"
        console.print(_bytes_table(title, [entry[1] for entry in everyone]))


def _bytes_table(title: str, ranks: Sequence[Mapping[str, int]]) -> Table:
    names = sorted({name for rank in ranks for name in rank})
    table = Table("rank", title=title, title_justify="left")
    for name in [*names, "total"]:
        table.add_column(name, justify="right")
    sums = {name: sum(rank.get(name, 0) for rank in ranks) for name in names}
    for label, row in [*((str(i), rank) for i, rank in enumerate(ranks)), ("all", sums)]:
        cells = [*(row.get(name, 0) for name in names), sum(row.values())]
        table.add_row(label, *(f"{num_bytes / 2**20:.2f}" for num_bytes in cells))
    return table


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class OffloadTensorGroup:
    """Tensors by tag, with an event for their way out and one for their way back.

    For callers that move tensors themselves; the engine's own groups are `OffloadGroup`.

    Attributes:
        offload: whether the group is to move; the caller's to set.
        total_offload_bytes: bytes noted by `update_offload_info`.
        total_tensor_count: tensors noted by it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.offload = True
        self.total_offload_bytes = 0
        self.total_tensor_count = 0
        self._tensors: dict[Any, Any] = {}
        self._offload_event: Event | None = None
        self._reload_event: Event | None = None

    def push_tensor(self, tag: Any, tensor: Any) -> None:
        """Keep ``tensor``, or what stands for it, under ``tag``; replaces what was there."""
        self._tensors[tag] = tensor

    def pop_tensor(self, tag: Any) -> Any:
        """Hand back what was kept under ``tag`` and forget it.

        Raises:
            KeyError: nothing is kept under this tag.
        """
        return self._tensors.pop(tag)

    def record_offload_event(self, stream: Stream) -> None:
        """Note that the copies queued on ``stream`` so far bring the group to the host."""
        self._offload_event = stream.record_event()

    def wait_offload_event(self, stream: Stream) -> None:
        """Make ``stream`` wait for the copies to the host; at once if none were noted."""
        if self._offload_event is not None:
            stream.wait_event(self._offload_event)

    def record_reload_event(self, stream: Stream) -> None:
        """Note that the copies queued on ``stream`` so far bring the group back."""
        self._reload_event = stream.record_event()

    def wait_reload_event(self, stream: Stream) -> None:
        """Make ``stream`` wait for the copies back; at once if none were noted."""
        if self._reload_event is not None:
            stream.wait_event(self._reload_event)

    def update_offload_info(self, tensor: torch.Tensor) -> None:
        """Count ``tensor`` into the totals."""
        self.total_offload_bytes += tensor.numel() * tensor.element_size()
        self.total_tensor_count += 1


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
            manager or PipelineOffloadManager.get_instance(),
            vp_stage=vp_stage,
            min_tensor_bytes=min_tensor_bytes,
            min_tensor_elements=min_offloaded_tensor_size,
        )
        self.max_inflight_groups = max_inflight_offloads
        self.cpu_tensor_pool = cpu_tensor_pool
        self._in_backward: list[OffloadGroup] = []

    @property
    def min_offloaded_tensor_size(self) -> int:
        """Smallest tensor that moves, in elements."""
        return self.min_tensor_elements

    @property
    def do_offload(self) -> bool:
        """Whether groups are recorded at all."""
        return self.manager.do_offload

    @property
    def d2h_stream(self) -> Stream:
        """The stream that copies to the host."""
        return self.manager.d2h_stream

    @property
    def h2d_stream(self) -> Stream:
        """The stream that copies to the device."""
        return self.manager.h2d_stream

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
        self.manager.transfers.offload(group)
        return state

    def reload(self, state: SavedTensor, non_blocking: bool | None = None) -> torch.Tensor:
        """Bring back what `offload` moved; the host is not blocked in either case."""
        return state.unpack()

    def tensor_push(self, tensor: torch.Tensor) -> SavedTensor:
        """Record a tensor for the group that was started last; the pack hook.

        Raises:
            StateError: no group is open.
        """
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
        _unsupported(
            "ChunkOffloadHandler.finish_all_groups",
            "a chunk is made new for every forward and never runs out of groups; "
            "open groups are in chunk.open_groups",
        )

    def find_next_group(self, name: str | None = None) -> NoReturn:
        """Raise `UnsupportedCallError`: no group is found by position."""
        _unsupported(
            "ChunkOffloadHandler.find_next_group",
            "groups are bound to the autograd graph; find_group_with_name looks one up by name",
        )

    def bulk_offload_group(self, group_to_offload: Any = None) -> NoReturn:
        """Raise `UnsupportedCallError`: copies are issued at the commit."""
        _unsupported("ChunkOffloadHandler.bulk_offload_group", _COMMIT_INSTEAD)

    def should_bulk_offload(self, group: Any = None) -> NoReturn:
        """Raise `UnsupportedCallError`: the manager decides at the commit."""
        _unsupported("ChunkOffloadHandler.should_bulk_offload", _COMMIT_INSTEAD)

    def bulk_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UnsupportedCallError`: copies are issued at the commit."""
        _unsupported("ChunkOffloadHandler.bulk_offload", _COMMIT_INSTEAD)

    def bulk_reload_group(self) -> NoReturn:
        """Raise `UnsupportedCallError`: the prefetcher chooses what comes back next."""
        _unsupported("ChunkOffloadHandler.bulk_reload_group", _PREFETCH_INSTEAD)

    def pre_reload_last_layer(self) -> NoReturn:
        """Raise `UnsupportedCallError`: the prefetcher chooses what comes back next."""
        _unsupported("ChunkOffloadHandler.pre_reload_last_layer", _PREFETCH_INSTEAD)

    def bulk_reload(self) -> NoReturn:
        """Raise `UnsupportedCallError`: the prefetcher chooses what comes back next."""
        _unsupported("ChunkOffloadHandler.bulk_reload", _PREFETCH_INSTEAD)


class PipelineOffloadManager(engine_manager.PipelineOffloadManager):
    """The process's manager, with the documented names."""

    # Bound while the base class is built, because that begins a step.
    _delayed_hooks: list[Callable[[], Any]]
    _backward_chunk: engine_chunk.ChunkOffloadHandler | None = None
    in_replay = False
    """Whether a CUDA graph is being replayed: delayed commits wait for the flush only then."""

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """Return the process's manager, made at the first call."""
        return cast(PipelineOffloadManager, super().get_instance())

    def _build(self, config: OffloadConfig, backend: Backend | None) -> None:
        self._delayed_hooks = []
        self._cpu_tensor_pool: GPUTensorPool | None = None
        self._cuda_graph_stream: Stream | None = None
        self._cuda_graph_event: Event | None = None
        super()._build(config, backend)

    def _begin_step(self) -> None:
        self._backward_chunk = None
        self._delayed_hooks.clear()
        super()._begin_step()

    def _make_chunk(
        self, vp_stage: int, min_tensor_bytes: int, min_tensor_elements: int
    ) -> ChunkOffloadHandler:
        return ChunkOffloadHandler(
            min_tensor_elements,
            manager=self,
            vp_stage=vp_stage,
            min_tensor_bytes=min_tensor_bytes,
        )

    @property
    def cpu_tensor_pool(self) -> GPUTensorPool:
        """A pool of host tensors by shape for user code; the engine's own is ``host_pool``."""
        if self._cpu_tensor_pool is None:
            self._cpu_tensor_pool = GPUTensorPool("cpu", pin_memory=self.backend.name == "cuda")
        return self._cpu_tensor_pool

    @property
    def cuda_graph_stream(self) -> Stream | None:
        """The stream for graph capture, made at the first call; None without CUDA."""
        if self._cuda_graph_stream is None:
            self._cuda_graph_stream = self.backend.graph_stream()
        return self._cuda_graph_stream

    @property
    def cuda_graph_event(self) -> Event | None:
        """The event between a graph and the copies, made at the first call; None without CUDA."""
        if self._cuda_graph_event is None:
            self._cuda_graph_event = self.backend.graph_event()
        return self._cuda_graph_event

    # Chunks

    def init_model_chunk_offload_handler(self, *args: Any, **kwargs: Any) -> None:
        """Begin the forward of one microbatch on one virtual pipeline stage.

        Call forms::

            (vp_size, vp_stage, min_offloaded_tensor_size=1048576)
            (pp_rank, vp_size, vp_stage, min_offloaded_tensor_size=1048576,
             delta_offload_bytes_across_pp_ranks=0, activation_offload_fraction=1.0,
             max_inflight_offloads=None)

        Three bare positions fit both; the form is taken whose stage lies within its size, the first
        where both do.

        Args:
            *args: see the forms.
            **kwargs: see the forms. ``min_offloaded_tensor_size`` is in elements;
                ``max_inflight_offloads`` bounds the groups of one name in flight (0: the compute
                stream waits at every commit). Fraction and delta of this package's own
                configuration win where they were set.

        Raises:
            TypeError: the arguments fit neither form.
        """
        chunk = read_chunk_arguments("init_model_chunk_offload_handler", args, kwargs)
        if DEBUG:
            debug_rank(f"new chunk: {chunk}")
        self.begin_chunk(
            vp_stage=chunk["vp_stage"],
            pp_rank=chunk.get("pp_rank", 0),
            min_tensor_elements=chunk["min_offloaded_tensor_size"],
            fraction=chunk.get("activation_offload_fraction"),
            delta_bytes_across_pp_ranks=chunk.get("delta_offload_bytes_across_pp_ranks"),
            max_inflight_groups=chunk.get("max_inflight_offloads"),
        )

    def pop_forward_chunk(self, name: str | None = None) -> engine_chunk.ChunkOffloadHandler | None:
        """Return the chunk whose forward runs; it is never used up, so nothing is taken away."""
        return self.cur_forward_chunk()

    def cur_backward_chunk(self) -> engine_chunk.ChunkOffloadHandler | None:
        """Return the chunk whose backward was entered last in this step, if any."""
        return self._backward_chunk

    def enter_backward(self, group: OffloadGroup) -> None:
        """Backward has reached a group's end: bring it back if no one did, and look ahead."""
        self._backward_chunk = group.chunk
        super().enter_backward(group)

    # Delayed commits

    def push_offload_groups(self, *args: Any, **kwargs: Any) -> None:
        """Put off a commit until `flush_delayed_groups`.

        Call forms: ``(group_hook, forced_released_tensors)`` and
        ``(group_hook, name, forced_released_tensors)``. A chunk's ``on_group_commit_forward``
        closes its group here and now, so that later groups can't be taken for it.
        """
        found = read_push_arguments("push_offload_groups", args, kwargs)
        hook, forced = found["group_hook"], found["forced_released_tensors"]
        chunk = getattr(hook, "__self__", None)
        if isinstance(chunk, ChunkOffloadHandler):
            chunk.close_and_commit(found.get("name"), forced or (), delay=True)
        else:
            names = (found["name"],) if "name" in found else ()
            self._delayed_hooks.append(partial(hook, *names, forced))

    def flush_delayed_groups(self) -> None:
        """Issue the copies of all groups that were put off, in the order of their commits."""
        super().flush_delayed_groups()
        hooks, self._delayed_hooks = self._delayed_hooks, []
        for hook in hooks:
            hook()

    # The step

    def reset(self, process_group: Any = None) -> None:
        """End the training step: release what is in flight, learn, and count from zero.

        Args:
            process_group: has no effect, this holds no collective; see
                `print_offload_summary_table` for the table.
        """
        super().reset()

    def mark_not_offloadable(self, tensor: torch.Tensor | None) -> None:
        """Keep a tensor, and all that shares its storage, on the device."""
        self.mark_not_offload(tensor)

    # CUDA graphs

    def record_forward(self, event: Event | None = None) -> None:
        """Record ``event`` on the compute stream, then join the copies to the host into it."""
        event = event or self.cuda_graph_event
        compute_stream = self.backend.compute_stream()
        if event is not None:
            event.record(compute_stream)
        self.transfers.drain_window()

    def record_backward(self, event: Event | None = None) -> None:
        """Record ``event`` on the compute stream, then join the copies to the device into it."""
        event = event or self.cuda_graph_event
        if event is not None:
            event.record(self.backend.compute_stream())
        self.transfers.wait_reloads(self._committed)

    # Steps of Megatron's own bookkeeping

    def push(self, handler: Any) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        _unsupported("PipelineOffloadManager.push", _GRAPH_INSTEAD)

    def flush(self) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        _unsupported("PipelineOffloadManager.flush", _GRAPH_INSTEAD)

    def pop_backward_chunk(self, name: str | None = None) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        _unsupported("PipelineOffloadManager.pop_backward_chunk", _GRAPH_INSTEAD)

    def front_backward_chunk(self, name: str | None = None) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        _unsupported("PipelineOffloadManager.front_backward_chunk", _GRAPH_INSTEAD)

    def post_warmup_callback(self) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no warm-up; every step is learned from."""
        _unsupported(
            "PipelineOffloadManager.post_warmup_callback",
            "there is no warm-up: reset() learns from every step, and "
            "print_offload_summary_table(manager.offload_summary_bytes) prints the table",
        )


engine_manager.PipelineOffloadManager.instance_class = PipelineOffloadManager


class FineGrainedOffloadingGroupStartFunction(GroupStart):
    """``apply(tensor, cur_forward_chunk, name)``: open a group of a chunk, and mark its start."""

    @classmethod
    def apply(cls, tensor: torch.Tensor, cpu_offload_handler: Any, name: str | None = None) -> Any:
        """Return ``tensor``, or an alias of it whose backward leaves the group."""
        group = cpu_offload_handler.on_group_start_forward(name)
        return tensor if group is None else super().apply(tensor, group)


class FineGrainedOffloadingGroupCommitFunction(GroupCommit):
    """``apply(tensor, chunk, name, forced_released_tensors, delay_offload)``: close a group."""

    @classmethod
    def apply(
        cls,
        tensor: torch.Tensor,
        cur_forward_chunk: Any,
        name: str | None,
        forced_released_tensors: Iterable[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> Any:
        """Return ``tensor``, or an alias of it whose backward enters the group."""
        forced = forced_released_tensors or ()
        group = cur_forward_chunk.close_and_commit(name, forced, delay=delay_offload)
        return tensor if group is None else super().apply(tensor, group)


class FineGrainedOffloadingBackwardRecordFunction(torch.autograd.Function):
    """``apply(tensor, event=None)``: identity whose backward joins the reloads into a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: Event | None = None) -> torch.Tensor:
        """Return an alias of ``tensor`` that is no view."""
        ctx.event = event
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Record the event, and make the compute stream wait for the copies to the device."""
        PipelineOffloadManager.get_instance().record_backward(ctx.event)
        return grads[0], None


def fine_grained_offloading_group_start(tensor: Tensors, name: str | None = None) -> Tensors:
    """Mark the start of a layer group; outside a chunk this is the identity.

    Args:
        tensor: one tensor, or a tuple or list; the first that needs a gradient is marked.
        name: the group's name.
    """
    if DEBUG:
        debug_rank(f"start of group {name}")
    return start_group(PipelineOffloadManager.get_instance(), tensor, name or "")


def fine_grained_offloading_group_commit(
    tensor: Tensors,
    name: str,
    forced_released_tensors: Sequence[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> Tensors:
    """Mark the end of a layer group and issue its copies; outside a chunk this is the identity.

    Args:
        tensor: one tensor, or a tuple or list; the first that needs a gradient is marked.
        name: the group's name.
        forced_released_tensors: tensors that something else keeps alive and that no one reads
            again: their storage is emptied once it has been copied.
        delay_offload: leave the copies to `fine_grained_offloading_group_flush_delayed_groups`.
    """
    if DEBUG:
        debug_rank(f"commit of group {name}")
    return commit_group(
        PipelineOffloadManager.get_instance(),
        tensor,
        name,
        forced_released_tensors,
        delay=delay_offload,
    )


def fine_grained_offloading_group_offload(
    tensor: Tensors,
    name: str,
    forced_released_tensors: Sequence[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> Tensors:
    """`fine_grained_offloading_group_commit` in its later form: delays only in a graph's replay."""
    delay = delay_offload and PipelineOffloadManager.get_instance().in_replay
    return fine_grained_offloading_group_commit(tensor, name, forced_released_tensors, delay)


def fine_grained_offloading_group_flush_delayed_groups() -> None:
    """Issue the copies of all groups that were put off."""
    PipelineOffloadManager.get_instance().flush_delayed_groups()


def fine_grained_offloading_disable_offload() -> None:
    """Record no groups from here on; what is under way finishes."""
    PipelineOffloadManager.get_instance().disable_offload()


def fine_grained_offloading_enable_offload() -> None:
    """Record groups again."""
    PipelineOffloadManager.get_instance().enable_offload()


def fine_grained_offloading_forward_record(event: Event | None = None) -> None:
    """Record ``event`` (by default the manager's own), then wait for the copies to the host."""
    PipelineOffloadManager.get_instance().record_forward(event)


def fine_grained_offloading_backward_record(
    tensor: torch.Tensor, event: Event | None = None
) -> torch.Tensor:
    """Return ``tensor`` with a backward that records ``event`` and waits for the reloads.

    Args:
        tensor: any tensor of the graph.
        event: by default the manager's own.
    """
    return FineGrainedOffloadingBackwardRecordFunction.apply(tensor, event)


class FineGrainedActivationOffloadingInterface:
    """What Megatron-core's layers call: a context for one group, and the manager's switches.

    Args:
        offload: whether the group is recorded; without it everything here is the identity.
        tensor: the group's input: a tensor, tuple or list.
        name: the group's name.
    """

    def __init__(self, offload: bool, tensor: Any, name: str) -> None:
        self.offload = offload
        self.tensor = tensor
        self.name = name
        self._manager: PipelineOffloadManager | None = None

    def __enter__(self) -> Any:
        if self.offload:
            self.tensor = fine_grained_offloading_group_start(self.tensor, self.name)
            self._manager = PipelineOffloadManager.get_instance()
            self._manager.__enter__()
        return self.tensor

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        # Layers keep this object until their next forward; their input must not live as long.
        self.tensor = None
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.__exit__(exc_type, exc, traceback)

    def group_offload(
        self,
        tensor: Any,
        forced_released_tensors: Sequence[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> Any:
        """Mark the group's end; see `fine_grained_offloading_group_offload`."""
        if not self.offload:
            return tensor
        return fine_grained_offloading_group_offload(
            tensor, self.name, forced_released_tensors, delay_offload
        )

    @staticmethod
    def group_commit(
        tensor: Any,
        name: str,
        forced_released_tensors: Sequence[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> Any:
        """Mark a group's end; see `fine_grained_offloading_group_commit`."""
        return fine_grained_offloading_group_commit(
            tensor, name, forced_released_tensors, delay_offload
        )

    @staticmethod
    def init_chunk_handler(*args: Any, **kwargs: Any) -> None:
        """Begin the forward of one microbatch.

        Call forms are those of `PipelineOffloadManager.init_model_chunk_offload_handler`.
        """
        PipelineOffloadManager.get_instance().init_model_chunk_offload_handler(*args, **kwargs)

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[Any]:
        """Return the manager, or a context that does nothing."""
        return PipelineOffloadManager.get_instance() if flag else nullcontext()

    @staticmethod
    def mark_not_offloadable(tensor: torch.Tensor | None) -> None:
        """Keep a tensor, and all that shares its storage, on the device."""
        PipelineOffloadManager.get_instance().mark_not_offload(tensor)

    @staticmethod
    def mark_not_offload(tensor: torch.Tensor | None) -> None:
        """Keep a tensor, and all that shares its storage, on the device."""
        PipelineOffloadManager.get_instance().mark_not_offload(tensor)

    @staticmethod
    def forward_record(event: Event | None = None) -> None:
        """See `fine_grained_offloading_forward_record`."""
        fine_grained_offloading_forward_record(event)

    @staticmethod
    def backward_record(tensor: torch.Tensor, event: Event | None = None) -> torch.Tensor:
        """See `fine_grained_offloading_backward_record`."""
        return fine_grained_offloading_backward_record(tensor, event)

    @staticmethod
    def cuda_graph_stream() -> Stream | None:
        """Return the manager's stream for graph capture; None without CUDA."""
        return PipelineOffloadManager.get_instance().cuda_graph_stream

    @staticmethod
    def cuda_graph_event() -> Event | None:
        """Return the manager's event for graph capture; None without CUDA."""
        return PipelineOffloadManager.get_instance().cuda_graph_event

    @staticmethod
    def reset(process_group: Any = None) -> None:
        """End the training step."""
        PipelineOffloadManager.get_instance().reset(process_group)

    @staticmethod
    def reset_instance() -> None:
        """Replace the process's manager by a new one of the same configuration."""
        PipelineOffloadManager.reset_instance()

    @staticmethod
    def flush_delayed_groups() -> None:
        """Issue the copies of all groups that were put off."""
        PipelineOffloadManager.get_instance().flush_delayed_groups()

    @staticmethod
    def disable_offload() -> None:
        """Record no groups from here on."""
        PipelineOffloadManager.get_instance().disable_offload()

    @staticmethod
    def enable_offload() -> None:
        """Record groups again."""
        PipelineOffloadManager.get_instance().enable_offload()

    @staticmethod
    def enter_replay() -> None:
        """A CUDA graph's replay begins: delayed commits wait for `flush_delayed_groups`."""
        PipelineOffloadManager.get_instance().in_replay = True

    @staticmethod
    def exit_replay() -> None:
        """A CUDA graph's replay is over."""
        PipelineOffloadManager.get_instance().in_replay = False


_COMMIT_INSTEAD = (
    "the manager decides and issues a group's copies when it is committed: call "
    "on_group_commit_forward, or fine_grained_offloading_group_commit"
)
_PREFETCH_INSTEAD = (
    "reloads are issued along the learned order of backwards within OffloadConfig.prefetch_bytes, "
    "at every boundary; a tensor that is needed sooner is reloaded when it is unpacked"
)
_GRAPH_INSTEAD = (
    "there is no queue of chunks: a chunk lives in the autograd graph of its forward and is found "
    "through it; begin one with init_model_chunk_offload_handler, and read cur_forward_chunk() and "
    "cur_backward_chunk()"
)


def _unsupported(name: str, instead: str) -> NoReturn:
    raise UnsupportedCallError(f"{name} steps bookkeeping that this design doesn't have: {instead}")

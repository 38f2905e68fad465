"""Megatron-core's documented offload API under its documented names.

Owns the functions, autograd functions and the interface that layers call; its classes are gathered
from `megatron_offload.documented`. Call forms are those documented with megatron-core 0.16 and
those of 0.17 to 0.19, served by the same callables. Must not know megatron-core itself, nor
streams, copies or plans: every call is handed to the engine.

Invariant: outside a chunk, without grad and in a recompute every function here is the identity.
Read next: `megatron_offload.documented.manager`; `megatron_offload.integrations.megatron_core`,
which puts this module in Megatron's place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from megatron_offload.backends.base import Event, Stream
from megatron_offload.documented.chunk import ChunkOffloadHandler
from megatron_offload.documented.manager import PipelineOffloadManager
from megatron_offload.engine.boundary import (
    Tensors,
    commit_group,
    commit_group_of,
    start_group,
    start_group_of,
)
from megatron_offload.machine.job_ranks import gather
from megatron_offload.memory.tensor_pool import GPUTensorPool, OffloadTensorPool
from megatron_offload.report.console import console, plain_table

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
    everyone = gather(mine, process_group)
    if len(everyone) > 1 and dist.get_rank(process_group) != 0:
        return
    out = console()
    out.print(_bytes_table("Activations offloaded (MiB)", [entry[0] for entry in everyone]))
    if any(entry[1] for entry in everyone):
        title = "Shared with another group, moved once (MiB)"
        out.print(_bytes_table(title, [entry[1] for entry in everyone]))


def _bytes_table(title: str, ranks: Sequence[Mapping[str, int]]) -> Table:
    names = sorted({name for rank in ranks for name in rank})
    table = plain_table(title, ["rank", *names, "total"], 1)
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


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """``apply(tensor, cur_forward_chunk, name)``: open a group of a chunk, and mark its start.

    It adds no node: one in front of a group would change the order in which the gradients of a
    tensor with several consumers are summed. See `megatron_offload.engine.boundary`.
    """

    @classmethod
    def apply(cls, tensor: Tensors, cpu_offload_handler: Any, name: str | None = None) -> Tensors:
        """Return ``tensor``, whose complete gradient says that backward has left the group."""
        start_group_of(cpu_offload_handler, tensor, name or "")
        return tensor


class FineGrainedOffloadingGroupCommitFunction(torch.autograd.Function):
    """``apply(tensor, chunk, name, forced_released_tensors, delay_offload)``: close a group.

    Like its counterpart it adds no node.
    """

    @classmethod
    def apply(
        cls,
        tensor: Tensors,
        cur_forward_chunk: Any,
        name: str | None,
        forced_released_tensors: Iterable[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> Tensors:
        """Return ``tensor``, whose complete gradient says that backward has entered the group."""
        commit_group_of(
            cur_forward_chunk, tensor, name, forced_released_tensors, delay=delay_offload
        )
        return tensor


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
        if DEBUG:
            debug_rank(f"new chunk: {args} {kwargs}")
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

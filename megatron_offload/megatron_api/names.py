"""Megatron-core's documented offload API, in the call forms of 0.16 and of 0.17 to 0.19.

Outside a chunk, without grad and in a recompute every function is the identity.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_offload.backends.base import Event, Stream
from megatron_offload.engine.boundary import Tensors, commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager as Engine
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.megatron_api.handler import ChunkOffloadHandler as ChunkOffloadHandler
from megatron_offload.megatron_api.manager import (
    PipelineOffloadManager as PipelineOffloadManager,
)
from megatron_offload.megatron_api.manager import (
    print_offload_summary_table as print_offload_summary_table,
)
from megatron_offload.megatron_api.tensor_pool import GPUTensorPool as GPUTensorPool
from megatron_offload.megatron_api.tensor_pool import OffloadTensorPool as OffloadTensorPool
from megatron_offload.model_map.offload_site import LargestTensors

DEBUG = False
"""Whether `debug_rank` prints anything."""

DEBUG_RANK = 0
"""The rank that prints."""


def debug_rank(message: str) -> None:
    """Print ``message`` if `DEBUG` is set and this is rank `DEBUG_RANK`."""
    if DEBUG and rank_in() == DEBUG_RANK:
        sys.stdout.write(f"{message}\n")


_Forced = Sequence[torch.Tensor] | None

_engine = Engine.get_instance
_manager = PipelineOffloadManager.get_instance


class OffloadTensorGroup:
    """Tensors by tag, with an event for their way out and one for their way back.

    For callers that offload tensors themselves. ``offload``, whether the group is to be offloaded,
    is the caller's; ``total_offload_bytes`` and ``total_tensor_count`` are what
    `update_offload_info` has noted.
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
        """Hand back what was kept under ``tag`` and forget it; `KeyError` if that is nothing."""
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


class _Boundary(torch.autograd.Function):
    """An autograd function that is the identity where no gradients are asked for."""

    @classmethod
    def apply(cls, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().apply(tensor, *args, **kwargs) if torch.is_grad_enabled() else tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Leave the group, or enter it; what isn't the tensor has no gradient."""
        if ctx.group is not None:
            ctx.passes(ctx.group)
        return grads[0], None, None, None, None


class FineGrainedOffloadingGroupStartFunction(_Boundary):
    """``apply(tensor, cur_forward_chunk, name=None)``: open a group of a chunk, and mark its start.

    This and its counterpart add a node to the graph, which may change the order in which gradients
    are summed, and with it the last bit. `fine_grained_offloading_group_start` adds none.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, cpu_offload_handler: Any, name: str | None = None
    ) -> torch.Tensor:
        """Return an alias of ``tensor`` that is no view."""
        with torch.enable_grad():
            ctx.group = cpu_offload_handler.on_group_start_forward(name)
        ctx.passes = cpu_offload_handler.engine.leave_backward
        return tensor.detach()


class FineGrainedOffloadingGroupCommitFunction(_Boundary):
    """``apply(tensor, chunk, name, forced_released_tensors, delay_offload)``: close a group."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        cur_forward_chunk: Any,
        name: str,
        forced_released_tensors: _Forced = None,
        delay_offload: bool = False,
    ) -> torch.Tensor:
        """Return an alias of ``tensor`` that is no view."""
        with torch.enable_grad():
            ctx.group = cur_forward_chunk.commit(name, forced_released_tensors, delay=delay_offload)
        ctx.passes = cur_forward_chunk.engine.enter_backward
        return tensor.detach()


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
        _manager().record_event(ctx.event)
        _engine().join_reloads()
        return grads[0], None


def fine_grained_offloading_group_start(tensor: Tensors, name: str | None = None) -> Tensors:
    """Mark the start of a layer group; outside a chunk this is the identity.

    Of what holds several, in any nesting, the first tensor that needs a gradient is marked.
    """
    if DEBUG:
        debug_rank(f"start of group {name}")
    return start_group(_engine(), tensor, name or "")


def fine_grained_offloading_group_commit(
    tensor: Tensors, name: str, forced_released_tensors: _Forced = None, delay_offload: bool = False
) -> Tensors:
    """Mark the end of a layer group and issue its copies; outside a chunk this is the identity.

    Args:
        tensor: one tensor, or what holds some; the first that needs a gradient is marked.
        name: the group's name.
        forced_released_tensors: tensors that something else keeps alive and that are not read
            again: their storage is emptied once it has been copied.
        delay_offload: leave the copies to `fine_grained_offloading_group_flush_delayed_groups`.
    """
    if DEBUG:
        debug_rank(f"commit of group {name}")
    return commit_group(_engine(), tensor, name, forced_released_tensors, delay=delay_offload)


group_start = fine_grained_offloading_group_start
group_commit = fine_grained_offloading_group_commit


def fine_grained_offloading_group_offload(
    tensor: Tensors, name: str, forced_released_tensors: _Forced = None, delay_offload: bool = False
) -> Tensors:
    """`fine_grained_offloading_group_commit` in its later form: delays only in a graph's replay."""
    delay = delay_offload and _manager().in_replay
    return fine_grained_offloading_group_commit(tensor, name, forced_released_tensors, delay)


def fine_grained_offloading_group_flush_delayed_groups() -> None:
    """Issue the copies of all groups that were put off."""
    _manager().flush_delayed_groups()


def fine_grained_offloading_disable_offload() -> None:
    """Record no groups from here on; what is under way finishes."""
    _manager().disable_offload()


def fine_grained_offloading_enable_offload() -> None:
    """Record groups again."""
    _manager().enable_offload()


def fine_grained_offloading_forward_record(event: Event | None = None) -> None:
    """Record ``event`` (by default the manager's own), then wait for the copies to the host."""
    _manager().record_event(event)
    _engine().join_offloads()


def fine_grained_offloading_backward_record(
    tensor: torch.Tensor, event: Event | None = None
) -> torch.Tensor:
    """Return ``tensor`` with a backward that records ``event`` and waits for the reloads.

    The event is the manager's own by default.
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
        self._engine: Engine | None = None

    def __enter__(self) -> Any:
        if self.offload:
            pick = self.offload.begin() if isinstance(self.offload, LargestTensors) else None
            self.tensor = start_group(_engine(), self.tensor, self.name, pick)
            self._engine = _engine()
            self._engine.__enter__()
        return self.tensor

    def __exit__(self, *exception: Any) -> None:
        # Layers keep this object until their next forward; their input must not live as long.
        self.tensor = None
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.__exit__(*exception)

    def group_offload(
        self, tensor: Any, forced_released_tensors: _Forced = None, delay_offload: bool = False
    ) -> Any:
        """Mark the group's end; see `fine_grained_offloading_group_offload`."""
        if not self.offload:
            return tensor
        return fine_grained_offloading_group_offload(
            tensor, self.name, forced_released_tensors, delay_offload
        )

    group_commit = staticmethod(fine_grained_offloading_group_commit)
    forward_record = staticmethod(fine_grained_offloading_forward_record)
    backward_record = staticmethod(fine_grained_offloading_backward_record)
    flush_delayed_groups = staticmethod(fine_grained_offloading_group_flush_delayed_groups)
    disable_offload = staticmethod(fine_grained_offloading_disable_offload)
    enable_offload = staticmethod(fine_grained_offloading_enable_offload)
    reset_instance = staticmethod(PipelineOffloadManager.reset_instance)

    @staticmethod
    def init_chunk_handler(*args: Any, **kwargs: Any) -> None:
        """Begin the forward of one microbatch; for the call forms see the manager's method."""
        if DEBUG:
            debug_rank(f"new chunk: {args} {kwargs}")
        _manager().init_model_chunk_offload_handler(*args, **kwargs)

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[Any]:
        """Return the manager, or a context that does nothing."""
        return _manager() if flag else nullcontext()

    @staticmethod
    def mark_not_offload(tensor: torch.Tensor | None) -> None:
        """Keep a tensor, and all that shares its storage, on the device."""
        _engine().mark_not_offload(tensor)

    mark_not_offloadable = mark_not_offload

    @staticmethod
    def cuda_graph_stream() -> Stream | None:
        """Return the manager's stream for graph capture; None without CUDA."""
        return _manager().cuda_graph_stream

    @staticmethod
    def cuda_graph_event() -> Event | None:
        """Return the manager's event for graph capture; None without CUDA."""
        return _manager().cuda_graph_event

    @staticmethod
    def reset(process_group: Any = None) -> None:
        """End the training step."""
        _manager().reset(process_group)

    @staticmethod
    def enter_replay() -> None:
        """A CUDA graph's replay begins: delayed commits wait for `flush_delayed_groups`."""
        _manager().in_replay = True

    @staticmethod
    def exit_replay() -> None:
        """A CUDA graph's replay is over."""
        _manager().in_replay = False

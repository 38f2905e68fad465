"""The process's manager, with the documented names.

Owns those names, delayed hooks, the user's host tensor pool, and the stream and event of CUDA
graphs. Must not know copies or waits: they are the engine's. Names that step Megatron's own queues
raise `UnsupportedCallError`.

Invariant: there is one manager in a process, whichever class it is asked for through: importing
this module makes it of this class. Read next: `megatron_offload.documented.chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

import torch

from megatron_offload.backends.base import Backend, Event, Stream
from megatron_offload.config import OffloadConfig
from megatron_offload.documented.call_forms import read_chunk_arguments, read_push_arguments
from megatron_offload.documented.chunk import ChunkOffloadHandler, unsupported
from megatron_offload.engine import chunk as engine_chunk
from megatron_offload.engine import manager as engine_manager
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.memory.tensor_pool import GPUTensorPool
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.policy import RatioPolicy

__all__ = ["PipelineOffloadManager"]

_GRAPH_INSTEAD = (
    "there is no queue of chunks: a chunk lives in the autograd graph of its forward and is found "
    "through it; begin one with init_model_chunk_offload_handler, and read cur_forward_chunk() and "
    "cur_backward_chunk()"
)


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

    def _build(
        self,
        config: OffloadConfig,
        policy: OffloadPlan | RatioPolicy | None,
        backend: Backend | None,
    ) -> None:
        self._delayed_hooks = []
        self._cpu_tensor_pool: GPUTensorPool | None = None
        self._cuda_graph_stream: Stream | None = None
        self._cuda_graph_event: Event | None = None
        super()._build(config, policy, backend)

    def _begin_step(self) -> None:
        self._backward_chunk = None
        self._delayed_hooks.clear()
        super()._begin_step()

    def new_chunk(
        self, vp_stage: int = 0, min_tensor_bytes: int = 0, min_tensor_elements: int = 0
    ) -> ChunkOffloadHandler:
        """Return a chunk with the documented names."""
        return ChunkOffloadHandler(
            min_tensor_elements,
            manager=self,
            vp_stage=vp_stage,
            min_tensor_bytes=min_tensor_bytes,
        )

    @property
    def d2h_stream(self) -> Stream:
        """The stream that copies to the host."""
        return self.backend.d2h_stream

    @property
    def h2d_stream(self) -> Stream:
        """The stream that copies to the device."""
        return self.backend.h2d_stream

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

        The first form doesn't say the pipeline rank: there it is what `pipeline_rank` says.

        Args:
            *args: see the forms.
            **kwargs: see the forms. ``min_offloaded_tensor_size`` is in elements;
                ``max_inflight_offloads`` bounds the groups of one name in flight (0: the compute
                stream waits at every commit). What was set in this package's own configuration
                wins: see `begin_chunk`.

        Raises:
            TypeError: the arguments fit neither form.
        """
        chunk = read_chunk_arguments("init_model_chunk_offload_handler", args, kwargs)
        self.begin_chunk(
            vp_stage=chunk["vp_stage"],
            pp_rank=chunk.get("pp_rank"),
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

    # Hooks

    def on_save_for_backward(self, tensor: torch.Tensor) -> SavedTensor:
        """Record a tensor for the group that was started last; the pack hook.

        Raises:
            RuntimeError: no group is open.
        """
        chunk = self.cur_forward_chunk()
        if chunk is None or not chunk.open_groups:
            raise RuntimeError("on_save_for_backward outside a group: call group_start first")
        return chunk.open_groups[-1].pack(tensor)

    @staticmethod
    def on_get_saved_tensor(saved_state: SavedTensor) -> torch.Tensor:
        """Return a recorded tensor; the unpack hook."""
        return saved_state.unpack()

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
        self.join_offloads()

    def record_backward(self, event: Event | None = None) -> None:
        """Record ``event`` on the compute stream, then join the copies to the device into it."""
        event = event or self.cuda_graph_event
        if event is not None:
            event.record(self.backend.compute_stream())
        self.join_reloads()

    # Steps of Megatron's own bookkeeping

    def push(self, handler: Any) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        unsupported("PipelineOffloadManager.push", _GRAPH_INSTEAD)

    def flush(self) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        unsupported("PipelineOffloadManager.flush", _GRAPH_INSTEAD)

    def pop_backward_chunk(self, name: str | None = None) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        unsupported("PipelineOffloadManager.pop_backward_chunk", _GRAPH_INSTEAD)

    def front_backward_chunk(self, name: str | None = None) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no queue of chunks."""
        unsupported("PipelineOffloadManager.front_backward_chunk", _GRAPH_INSTEAD)

    def post_warmup_callback(self) -> NoReturn:
        """Raise `UnsupportedCallError`: there is no warm-up; every step is learned from."""
        unsupported(
            "PipelineOffloadManager.post_warmup_callback",
            "there is no warm-up: reset() learns from every step, and "
            "print_offload_summary_table(manager.offload_summary_bytes) prints the table",
        )


engine_manager.PipelineOffloadManager.instance_class = PipelineOffloadManager

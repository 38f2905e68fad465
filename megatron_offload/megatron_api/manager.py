"""Megatron's manager: a documented object that holds the engine's; and the table of its ranks.

Beside that it owns the order in which callers by hand take chunks back, and reads the argument list
of both eras by which a chunk begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from inspect import signature
from typing import Any, ClassVar

import torch
from rich.table import Table

from megatron_offload.backends.base import Event, Stream
from megatron_offload.config import OffloadConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.chunk import ChunkOffloadHandler as Chunk
from megatron_offload.engine.manager import PipelineOffloadManager as Engine
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import StateError
from megatron_offload.machine.job_ranks import gather, rank_in
from megatron_offload.megatron_api.handler import UNSAID, ChunkOffloadHandler, reached, said
from megatron_offload.megatron_api.tensor_pool import GPUTensorPool, HostTensorPool
from megatron_offload.report.console import console, plain_table


def _chunk_of_0_16(vp_size: Any, vp_stage: Any, min_offloaded_tensor_size: Any = 1 << 20) -> Any:
    return locals()


def _chunk_since_0_17(
    pp_rank: Any,
    vp_size: Any,
    vp_stage: Any,
    min_offloaded_tensor_size: Any = 1 << 20,
    delta_offload_bytes_across_pp_ranks: Any = 0,
    activation_offload_fraction: Any = 1.0,
    max_inflight_offloads: Any = None,
) -> Any:
    return locals()


_FORMS = _chunk_of_0_16, _chunk_since_0_17


def chunk_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return by their names the arguments with which a chunk begins, in either form.

    Where they fit both, that one counts in which a stage lies within its size, and the first where
    both do. `TypeError` where they fit neither.
    """
    readings = list[dict[str, Any]]()
    for form in _FORMS:
        with suppress(TypeError):
            readings.append(form(*args, **kwargs))
    if not readings:
        given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        forms = " or ".join(str(signature(form)).partition(" ->")[0] for form in _FORMS)
        known = forms.replace(": 'Any'", "")
        raise TypeError(f"a chunk can't begin with ({given}); write {known}")
    for found in readings:
        size, stage = found["vp_size"], found["vp_stage"]
        if (size is None or size > 0) and (stage is None or 0 <= stage < (size or 1)):
            return found
    return readings[0]


def _forget_spent(handlers: deque[ChunkOffloadHandler]) -> None:
    """Drop the first ones as long as they have no groups: they are of a step that is over."""
    while handlers and handlers[0].is_empty_chunk():
        handlers.popleft()


class PipelineOffloadManager:
    """Megatron's manager: its documented names, and the engine's to run a step.

    Args:
        config: what is offloaded and within which bounds.
        engine: a manager of the engine to hold, in place of a new one of ``config``.
    """

    _last: ClassVar[PipelineOffloadManager | None] = None
    """The view of the process's manager."""

    def __init__(
        self, config: OffloadConfig | None = None, *, engine: Engine | None = None
    ) -> None:
        self.engine = engine or Engine(config)
        """What does the work; for calls that take an engine's manager."""
        self.in_replay = False
        """Whether a CUDA graph is being replayed: delayed commits wait for the flush only then."""
        self._pool: HostTensorPool | None = None
        self._begun = deque[ChunkOffloadHandler]()
        """What callers by hand have, in the order of forwards; then queued for backward."""
        self._queue = deque[ChunkOffloadHandler]()
        self._staged: list[deque[ChunkOffloadHandler]] = []
        self._taken: tuple[ChunkOffloadHandler, int] | None = None
        """The one that was taken from the queue last, and what backward had reached by then."""
        self._delayed: list[tuple[int, Callable[[], Any]]] = []
        """Commits that are put off, with the number of their step."""

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """Return the process's manager, made at the first call; a view of the engine's."""
        engine, manager = Engine.get_instance(), PipelineOffloadManager._last
        if manager is None or manager.engine is not engine:
            manager = PipelineOffloadManager._last = PipelineOffloadManager(engine=engine)
        return manager

    reset_instance = staticmethod(Engine.reset_instance)
    """Replaces the process's manager by a new one of the same configuration."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineOffloadManager:
        return self  # a copied module is run beside its original, on the same memory

    def __reduce__(self) -> tuple[Any, ...]:
        if self.engine is Engine.instance:
            return PipelineOffloadManager.get_instance, ()
        return type(self), (self.config,)

    def __repr__(self) -> str:
        return repr(self.engine)

    def __getattr__(self, name: str) -> Any:
        """Return what the engine's manager has under a name that Megatron doesn't document."""
        if name.startswith("_") or name == "engine":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.engine, name)

    offload_summary_bytes = reached(
        "engine.last_step.peak_released_bytes_by_name",
        "Most bytes that were released at a time, by group name.",
    )
    offload_summary_total_bytes = reached(
        "engine.last_step.peak_released_bytes", "Most bytes that were released at a time."
    )
    d2h_stream = reached("engine.backend.d2h_stream", "The stream that copies to the host.")
    h2d_stream = reached("engine.backend.h2d_stream", "The stream that copies to the device.")

    @property
    def cpu_tensor_pool(self) -> GPUTensorPool:
        """Host tensors by shape, out of the memory that the engine's copies lie in."""
        if self._pool is None or self._pool.host_pool is not self.engine.host_pool:
            self._pool = HostTensorPool(self.engine.host_pool, self.engine.backend)
        return self._pool

    @cached_property
    def cuda_graph_stream(self) -> Stream | None:
        """The stream for graph capture, made at the first call; None without CUDA."""
        return self.engine.backend.graph_stream()

    @cached_property
    def cuda_graph_event(self) -> Event | None:
        """The event between a graph and the copies, made at the first call; None without CUDA."""
        return self.engine.backend.graph_event()

    # Chunks in forward

    def init_model_chunk_offload_handler(self, *args: Any, **kwargs: Any) -> None:
        """Begin the forward of one microbatch on one virtual pipeline stage.

        Call forms: ``(vp_size, vp_stage, min_offloaded_tensor_size)``, and
        from 0.17 on ``(pp_rank, vp_size, vp_stage, ...)``. The smallest size is in elements;
        ``max_inflight_offloads`` bounds the groups of one name in flight (0: the compute stream
        waits at every commit). What this package's own configuration sets wins: see the engine's
        `begin_chunk`. Arguments that fit neither form are a `TypeError`.
        """
        found = chunk_arguments(*args, **kwargs)
        chunk = self.engine.begin_chunk(
            vp_stage=found["vp_stage"],
            pp_rank=found.get("pp_rank"),
            min_tensor_elements=found["min_offloaded_tensor_size"],
            fraction=found.get("activation_offload_fraction"),
            delta_bytes_across_pp_ranks=found.get("delta_offload_bytes_across_pp_ranks"),
            max_inflight_groups=found.get("max_inflight_offloads"),
        )
        if self.engine.records():
            self._stage(self._handle(chunk), found["vp_size"] or 1)

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs, if any."""
        chunk = self.engine.cur_forward_chunk()
        return None if chunk is None else self._handler_of(chunk)

    def pop_forward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs; it is never used up."""
        return self.cur_forward_chunk()

    def _handler_of(self, chunk: Chunk) -> ChunkOffloadHandler:
        known = (handler for handler in reversed(self._begun) if handler.chunk is chunk)
        return next(known, None) or self._handle(chunk)

    def _handle(self, chunk: Chunk) -> ChunkOffloadHandler:
        _forget_spent(self._begun)
        rules = chunk.rules
        given = rules.min_tensor_elements, self.cpu_tensor_pool, rules.max_inflight_groups
        handler = ChunkOffloadHandler(*given, engine=self.engine, chunk=chunk)
        self._begun.append(handler)
        return handler

    # Chunks in backward, for callers who step through them by hand

    def _stage(self, handler: ChunkOffloadHandler, num_stages: int) -> None:
        """Queue a chunk of the last stage at once, those before it when their backwards follow."""
        for handlers in self._staged:
            _forget_spent(handlers)
        if len(self._staged) != num_stages:
            self._staged = [deque() for _ in range(num_stages)]
        stage = min(handler.vpp_rank, num_stages - 1)
        self._staged[stage].append(handler)
        if stage == num_stages - 1:
            self.push(handler)
            self.flush()

    def flush(self) -> None:
        """Queue the staged chunks for backward, last stage first, once all had as many forwards."""
        if len({len(handlers) for handlers in self._staged}) == 1:
            for handlers in reversed(self._staged[:-1]):
                self._queue += handlers
            self._staged.clear()

    def push(self, handler: ChunkOffloadHandler) -> None:
        """Queue a chunk for backward."""
        _forget_spent(self._queue)
        self._queue.append(handler)

    def front_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Return the queued chunk whose backward is next: the first with a group, of this name."""
        reached = {key.chunk for key in self.engine.decisions.backward_order}
        left = (h for h in self._queue if h.chunk.position not in reached)
        return next((h for h in left if not h.is_empty_chunk(name)), None)

    def pop_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler:
        """Make the next queued chunk with a group (of this name) the current one of backward."""
        handler = self.front_backward_chunk(name)
        if handler is None:
            of_name = "" if name is None else f" of the name {name!r}"
            raise StateError(
                f"no chunk with a group{of_name} is queued for backward: push() it first"
            )
        while self._queue.popleft() is not handler:
            pass
        self._taken = handler, len(self.engine.decisions.backward_order)
        return handler

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose backward was entered last in this step, if any."""
        step, (taken, num_reached) = self.engine.decisions, self._taken or (None, 0)
        reached = step.backward_order
        if taken is not None and len(reached) == num_reached and not taken.is_empty_chunk():
            return taken
        return self._handler_of(step.entered[reached[-1].chunk]) if reached else None

    # Hooks

    def __enter__(self) -> PipelineOffloadManager:
        self.engine.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.engine.__exit__(*exception)

    def on_save_for_backward(self, tensor: torch.Tensor) -> SavedTensor:
        """Record a tensor for the open group that was started last; the pack hook."""
        chunk = self.engine.cur_forward_chunk()
        if chunk is None or not chunk.open_groups:
            raise StateError("on_save_for_backward outside a group: call group_start first")
        return chunk.pack(chunk.open_groups[-1], tensor)

    @staticmethod
    def on_get_saved_tensor(saved_state: SavedTensor) -> torch.Tensor:
        """Return a recorded tensor; the unpack hook."""
        return saved_state.unpack()

    # Delayed commits

    def push_offload_groups(
        self, group_hook: Any, name: Any = UNSAID, forced_released_tensors: Any = UNSAID
    ) -> None:
        """Put off a commit until `flush_delayed_groups`; a chunk's own closes its group at once.

        Call forms: ``(group_hook, forced_released_tensors)``, and with ``name`` between.
        """
        handler, given = getattr(group_hook, "__self__", None), said(name, forced_released_tensors)
        if isinstance(handler, ChunkOffloadHandler):
            handler.commit(*(None, *given)[-2:], delay=True)
        else:
            self._delayed.append((self.engine.step_number, partial(group_hook, *given)))

    def flush_delayed_groups(self) -> None:
        """Issue the copies of all groups that were put off, in the order of their commits."""
        self.engine.flush_delayed_groups()
        delayed, self._delayed = self._delayed, []
        for step_number, hook in delayed:
            if step_number == self.engine.step_number:
                hook()

    # The step

    def reset(self, process_group: Any = None) -> None:
        """End the training step, and free what `cpu_tensor_pool` has allocated; no collective."""
        self.engine.reset()
        if self._pool is not None:
            self._pool.reset()

    def post_warmup_callback(self) -> None:
        """End the first step if it is open, and print what is offloaded; a collective."""
        self.engine.end_step_if_over()
        print_offload_summary_table(self.offload_summary_bytes)

    def disable_offload(self) -> None:
        """Record no groups from here on; what is under way finishes."""
        self.engine.disable_offload()

    def enable_offload(self) -> None:
        """Record groups again, unless the configuration says ``enabled=False``."""
        self.engine.enable_offload()

    def mark_not_offload(self, tensor: torch.Tensor | None) -> None:
        """Keep a tensor, and all that shares its storage, on the device."""
        self.engine.mark_not_offload(tensor)

    mark_not_offloadable = mark_not_offload

    def record_event(self, event: Event | None = None) -> None:
        """Record ``event``, by default `cuda_graph_event`, on the compute stream."""
        event = event or self.cuda_graph_event
        if event is not None:
            event.record(self.engine.backend.compute_stream())


def print_offload_summary_table(
    total_offload_bytes: Mapping[str, int],
    local_duplicate_summary: Mapping[str, int] | None = None,
    process_group: Any = None,
) -> None:
    """Print one line for each rank and one column for each group name, on the first rank.

    Collective over ``process_group`` where torch.distributed runs; without it this process stands
    alone.

    Args:
        total_offload_bytes: this rank's bytes for each group name.
        local_duplicate_summary: this rank's bytes for each group name that were not offloaded a
            second time because another group had saved the same memory; a second table.
        process_group: who takes part; None is everybody.
    """
    moved = gather(dict(total_offload_bytes), process_group)
    shared = gather(dict(local_duplicate_summary or {}), process_group)
    if rank_in(process_group) == 0:
        console().print(_bytes_table("Activations offloaded", moved))
        if any(shared):
            console().print(_bytes_table("Shared with another group, offloaded once", shared))


def _bytes_table(title: str, ranks: Sequence[Mapping[str, int]]) -> Table:
    names = sorted({name for rank in ranks for name in rank})
    sums = {name: sum(rank.get(name, 0) for rank in ranks) for name in names}
    rows = []
    for label, row in [*((str(i), rank) for i, rank in enumerate(ranks)), ("all", sums)]:
        sizes = [*(row.get(name, 0) for name in names), sum(row.values())]
        rows.append([label, *(format_bytes(size, 2) for size in sizes)])
    return plain_table(title, ["rank", *names, "total"], 1, rows)

"""Megatron's manager and chunk handler: documented objects that hold the engine's.

Beside that they own the order in which callers by hand take chunks back, and read the argument
lists of both eras. Names of a handler that only step Megatron's own bookkeeping raise an error that
says what replaces them (`REPLACED`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import Parameter, Signature
from operator import attrgetter
from typing import Any, NoReturn

import torch

from megatron_offload.backends.base import Event, Stream, Wait
from megatron_offload.config import OffloadConfig
from megatron_offload.core.group import GroupState
from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.chunk import ChunkOffloadHandler as Chunk
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager as Engine
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import StateError
from megatron_offload.memory.tensor_pool import GPUTensorPool, HostTensorPool
from megatron_offload.report.tables import print_offload_summary_table

HostState = tuple[torch.device, torch.Tensor, bool]


def _form(*required: str, **optional: Any) -> Signature:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    defaults = dict.fromkeys(required, Parameter.empty) | optional
    return Signature([Parameter(name, kind, default=value) for name, value in defaults.items()])


FORMS = {
    "init_model_chunk_offload_handler": (
        _form("vp_size", "vp_stage", min_offloaded_tensor_size=1024 * 1024),
        _form(
            "pp_rank",
            "vp_size",
            "vp_stage",
            min_offloaded_tensor_size=1024 * 1024,
            delta_offload_bytes_across_pp_ranks=0,
            activation_offload_fraction=1.0,
            max_inflight_offloads=None,
        ),
    ),
    "on_group_commit_forward": (
        _form("forced_released_tensors"),
        _form("name", "forced_released_tensors"),
    ),
    "push_offload_groups": (
        _form("group_hook", "forced_released_tensors"),
        _form("group_hook", "name", "forced_released_tensors"),
    ),
}
"""By callable the form of megatron-core 0.16, then that of 0.17 to 0.19."""


def read_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names; `TypeError` where they fit neither form.

    Where they fit both, that one counts in which a stage lies within its size, and the first where
    both do.
    """
    readings = []
    for form in FORMS[function]:
        with suppress(TypeError):
            bound = form.bind(*args, **kwargs)
            bound.apply_defaults()
            readings.append(bound.arguments)
    if not readings:
        given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        known = " or ".join(f"{function}{form}" for form in FORMS[function])
        raise TypeError(f"{function}({given}) fits none of its call forms; write {known}")
    for found in readings:
        size, stage = found.get("vp_size"), found.get("vp_stage")
        if (size is None or size > 0) and (stage is None or 0 <= stage < (size or 1)):
            return found
    return readings[0]


def _reached(path: str, doc: str) -> Any:
    """Make a property of what lies at a dotted path, to read and to set."""
    owner, name = path.rsplit(".", 1)
    find_owner = attrgetter(owner)
    return property(attrgetter(path), lambda self, x: setattr(find_owner(self), name, x), doc=doc)


class ChunkOffloadHandler:
    """One forward of one model chunk, with the documented entry points.

    Its groups and decisions are the engine's: a call by hand leaves the engine in the state in
    which `fine_grained_offloading_group_start` and its counterpart would.

    Args:
        min_offloaded_tensor_size: smaller tensors are kept on the device; in elements.
        cpu_tensor_pool: where `offload` takes host memory; by default the manager's pool.
        max_inflight_offloads: most groups of one name in flight; None sets no bound.
    """

    manager: PipelineOffloadManager
    chunk: Chunk
    _pool: GPUTensorPool | None
    _in_backward: list[OffloadGroup]

    def __new__(cls, *_: Any, **__: Any) -> ChunkOffloadHandler:
        """Make what answers questions about tensors without ``__init__`` too, as the original."""
        manager = PipelineOffloadManager.get_instance()
        return cls._of(manager, manager.engine.new_chunk())

    @classmethod
    def _of(cls, manager: PipelineOffloadManager, chunk: Chunk) -> ChunkOffloadHandler:
        handler = object.__new__(cls)
        handler.manager, handler.chunk = manager, chunk
        handler._pool, handler._in_backward = None, []
        return handler

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool | None = None,
        max_inflight_offloads: int | None = None,
    ) -> None:
        self._pool = cpu_tensor_pool
        self.min_offloaded_tensor_size = min_offloaded_tensor_size
        self.chunk.rules.max_inflight_groups = max_inflight_offloads

    @property
    def cpu_tensor_pool(self) -> GPUTensorPool:
        """Where `offload` takes host memory."""
        return self._pool or self.manager.cpu_tensor_pool

    min_offloaded_tensor_size = _reached(
        "chunk.rules.min_tensor_elements", "Smallest tensor that is offloaded, in elements."
    )
    do_offload = _reached("manager.do_offload", "Whether groups are recorded at all.")
    d2h_stream = _reached("manager.d2h_stream", "The stream that copies to the host.")
    h2d_stream = _reached("manager.h2d_stream", "The stream that copies to the device.")
    vpp_rank = _reached("chunk.vp_stage", "Virtual pipeline stage.")
    offload_groups = _reached("chunk.groups", "The groups that were started, in order.")

    # Tensors

    def offload(
        self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True
    ) -> HostState:
        """Copy one tensor to the host; the compute stream waits for the copy, the host doesn't.

        Returns what to hand to `reload`: the device, the copy, and whether `cpu_tensor_pool` has
        allocated it. Without ``use_cpu_pool`` it is allocated, page-locked unless ``pin_memory`` is
        off. A `RuntimeError` says that the pool is full.
        """
        backend = self.manager.backend
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
        backend = self.manager.backend
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
        if type(tensor) is not torch.Tensor or not self.manager.backend.owns(tensor):
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
        engine = self.manager.engine
        return engine.start_group(self.chunk, name or "") if engine.records() else None

    def on_group_commit_forward(self, *args: Any, **kwargs: Any) -> OffloadGroup | None:
        """Close a group and issue its copies, if the policy moves it; None where none is open.

        Call forms: ``(forced_released_tensors)``, ``(name, forced_released_tensors)``.
        """
        found = read_arguments("on_group_commit_forward", args, kwargs)
        return self.commit(found.get("name"), found["forced_released_tensors"])

    def commit(
        self, name: str | None, forced: Iterable[torch.Tensor] | None, *, delay: bool = False
    ) -> OffloadGroup | None:
        """Close a group and issue its copies, now or at the next flush of delayed groups."""
        engine = self.manager.engine
        group = self.chunk.close_group(name) if engine.records() else None
        if group is not None:
            group.force(forced or ())
            engine.commit(group, delay=delay)
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
        self.manager.engine.enter_backward(group)
        self.manager._take_up(self)

    def on_group_start_backward(self) -> None:
        """Backward has left the group that `on_group_commit_backward` entered last."""
        if not self._in_backward:
            raise StateError("no group's backward is under way: call on_group_commit_backward")
        self.manager.engine.leave_backward(self._in_backward.pop())

    # The chunk's groups

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether the chunk has no group, or none of this name."""
        return not any(name in (None, group.name) for group in self.chunk.groups)

    def reset(self) -> None:
        """Leave what is open, which is kept on the device, and what backward is in."""
        self.chunk.open_groups.clear()
        self._in_backward.clear()


@dataclass
class _Order:
    """What callers by hand have queued in one step of the engine."""

    step_number: int
    handlers: dict[Chunk, ChunkOffloadHandler] = field(default_factory=dict)
    queue: deque[ChunkOffloadHandler] = field(default_factory=deque)
    staged: list[list[ChunkOffloadHandler]] = field(default_factory=list)
    delayed: list[Callable[[], Any]] = field(default_factory=list)
    current: ChunkOffloadHandler | None = None
    reached: GroupKey | None = None
    """What the engine had reached last when `current` was taken."""


class _OneInProcess(type):
    """Makes `OFFLOAD_MGR` the engine's one manager, to read and to set."""

    _last: PipelineOffloadManager | None = None

    @property
    def OFFLOAD_MGR(cls) -> PipelineOffloadManager | None:  # noqa: N802 - the documented name
        """The process's manager; None before it was asked for.

        May be set: to another, or to None for a new one of the same configuration.
        """
        return None if Engine.instance is None else PipelineOffloadManager.get_instance()

    @OFFLOAD_MGR.setter
    def OFFLOAD_MGR(cls, manager: PipelineOffloadManager | None) -> None:  # noqa: N802
        if manager is None:
            Engine.reset_instance()
        else:
            _OneInProcess._last, Engine.instance = manager, manager.engine


class PipelineOffloadManager(metaclass=_OneInProcess):
    """Megatron's manager: its documented names, and the engine's to run a step.

    Args:
        config: what is offloaded and within which bounds.
        engine: a manager of the engine to hold, in place of a new one of ``config``.
    """

    def __init__(
        self, config: OffloadConfig | None = None, *, engine: Engine | None = None
    ) -> None:
        self.engine = engine or Engine(config)
        """What does the work; for calls that take an engine's manager."""
        self.in_replay = False
        """Whether a CUDA graph is being replayed: delayed commits wait for the flush only then."""
        self._pool: HostTensorPool | None = None
        self._by_hand = _Order(self.engine.step_number)

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """Return the process's manager, made at the first call; a view of the engine's."""
        engine, manager = Engine.get_instance(), _OneInProcess._last
        if manager is None or manager.engine is not engine:
            manager = _OneInProcess._last = PipelineOffloadManager(engine=engine)
        return manager

    reset_instance = staticmethod(Engine.reset_instance)
    """Replaces the process's manager by a new one of the same configuration."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineOffloadManager:
        return self  # a copied module is run beside its original, on the same memory

    def __reduce__(self) -> tuple[Any, ...]:
        if self.engine is Engine.instance:
            return PipelineOffloadManager.get_instance, ()
        return type(self), (self.config,)

    def __getattr__(self, name: str) -> Any:
        """Return what the engine's manager has under a name that Megatron doesn't document."""
        if name.startswith("_") or name == "engine":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.engine, name)

    offload_summary_bytes = _reached(
        "engine.last_step.peak_released_bytes_by_name",
        "Most bytes off the device at a time, by group name.",
    )
    offload_summary_total_bytes = _reached(
        "engine.last_step.peak_released_bytes", "Most bytes off the device at a time."
    )
    d2h_stream = _reached("engine.backend.d2h_stream", "The stream that copies to the host.")
    h2d_stream = _reached("engine.backend.h2d_stream", "The stream that copies to the device.")

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

        Call forms (`FORMS`): ``(vp_size, vp_stage, min_offloaded_tensor_size)``, and
        from 0.17 on ``(pp_rank, vp_size, vp_stage, ...)``. The smallest size is in elements;
        ``max_inflight_offloads`` bounds the groups of one name in flight (0: the compute stream
        waits at every commit). What this package's own configuration sets wins: see the engine's
        `begin_chunk`. Arguments that fit neither form are a `TypeError`.
        """
        found = read_arguments("init_model_chunk_offload_handler", args, kwargs)
        chunk = self.engine.begin_chunk(
            vp_stage=found["vp_stage"],
            pp_rank=found.get("pp_rank"),
            min_tensor_elements=found["min_offloaded_tensor_size"],
            fraction=found.get("activation_offload_fraction"),
            delta_bytes_across_pp_ranks=found.get("delta_offload_bytes_across_pp_ranks"),
            max_inflight_groups=found.get("max_inflight_offloads"),
        )
        if self.engine.records():
            self._stage(self._handler_of(chunk), found["vp_size"] or 1)

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs, if any."""
        chunk = self.engine.cur_forward_chunk()
        return None if chunk is None else self._handler_of(chunk)

    def pop_forward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs; it is never used up."""
        return self.cur_forward_chunk()

    @property
    def _order(self) -> _Order:
        order = self._by_hand
        if order.step_number != self.engine.step_number:
            self._by_hand = _Order(self.engine.step_number)
            # A step that is found to be over ends when the first group of the next has begun.
            chunk = self.engine.cur_forward_chunk()
            if chunk in order.handlers:
                self._by_hand.handlers[chunk] = order.handlers[chunk]
                self.push(order.handlers[chunk])
        return self._by_hand

    def _handler_of(self, chunk: Chunk) -> ChunkOffloadHandler:
        return self._order.handlers.setdefault(chunk, ChunkOffloadHandler._of(self, chunk))

    # Chunks in backward, for callers who step through them by hand

    def _stage(self, handler: ChunkOffloadHandler, num_stages: int) -> None:
        """Queue a chunk of the last stage at once, those before it when their backwards follow."""
        order = self._order
        if len(order.staged) != num_stages:
            order.staged = [[] for _ in range(num_stages)]
        stage = min(handler.vpp_rank, num_stages - 1)
        order.staged[stage].append(handler)
        if stage == num_stages - 1:
            self.push(handler)
            self.flush()

    def flush(self) -> None:
        """Queue the staged chunks for backward, last stage first, once all had as many forwards."""
        staged = self._order.staged
        if len({len(handlers) for handlers in staged}) == 1:
            for handlers in reversed(staged[:-1]):
                self._order.queue.extend(handlers)
            staged.clear()

    def push(self, handler: ChunkOffloadHandler) -> None:
        """Queue a chunk for backward."""
        self._order.queue.append(handler)

    def front_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Return the queued chunk whose backward is next: the first with a group, of this name."""
        return next((h for h in self._order.queue if not h.is_empty_chunk(name)), None)

    def pop_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler:
        """Make the next queued chunk with a group (of this name) the current one of backward."""
        queue = self._order.queue
        while queue:
            handler = queue.popleft()
            if not handler.is_empty_chunk(name):
                self._take_up(handler)
                return handler
        of_name = "" if name is None else f" of the name {name!r}"
        raise StateError(f"no chunk with a group{of_name} is queued for backward: push() it first")

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose backward was entered last in this step, if any."""
        order, reached = self._order, self._last_reached
        if reached is not None and reached != order.reached:
            order.reached = reached
            for chunk, handler in order.handlers.items():
                if chunk.position == reached.chunk:
                    order.current = handler
        return order.current

    @property
    def _last_reached(self) -> GroupKey | None:
        order = self.engine.decisions.backward_order
        return order[-1] if order else None

    def _take_up(self, handler: ChunkOffloadHandler) -> None:
        order = self._order
        order.current, order.reached = handler, self._last_reached
        if handler in order.queue:
            order.queue.remove(handler)

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

    def push_offload_groups(self, *args: Any, **kwargs: Any) -> None:
        """Put off a commit until `flush_delayed_groups`; a chunk's own closes its group at once.

        Call forms: ``(group_hook, forced_released_tensors)``, and with ``name`` between.
        """
        found = read_arguments("push_offload_groups", args, kwargs)
        hook, forced = found["group_hook"], found["forced_released_tensors"]
        handler = getattr(hook, "__self__", None)
        if isinstance(handler, ChunkOffloadHandler):
            handler.commit(found.get("name"), forced, delay=True)
        else:
            names = (found["name"],) if "name" in found else ()
            self._order.delayed.append(partial(hook, *names, forced))

    def flush_delayed_groups(self) -> None:
        """Issue the copies of all groups that were put off, in the order of their commits."""
        self.engine.flush_delayed_groups()
        order = self._order
        hooks, order.delayed = order.delayed, []
        for hook in hooks:
            hook()

    # The step

    def reset(self, process_group: Any = None) -> None:
        """End the training step, and Free what `cpu_tensor_pool` has allocated; no collective."""
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

"""The one manager of a process: all that a program asks of the engine, one call at a time.

Every entry point works in any order. Backwards that never come, resets in the middle and exceptions
leave a manager whose next step is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self
from weakref import ref

import torch

from megatron_offload.backends import create_backend
from megatron_offload.backends.base import Backend
from megatron_offload.config import OffloadConfig
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.policy_config import SolvedConfig
from megatron_offload.engine.checking import Checker
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.guard import Guard, guarded
from megatron_offload.engine.hooks import is_recording
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.marks import Marks
from megatron_offload.engine.observer import Observer
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.step import Step
from megatron_offload.engine.transfers import Transfers
from megatron_offload.engine.verdicts import Verdicts
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.machine.job_ranks import cap_of_rank
from megatron_offload.memory.host_pool import HostPool

_logger = logging.getLogger(__name__)

_NO_CHUNK = (
    "group %r was started outside a chunk, so nothing of it is offloaded: take the step inside "
    "`with manager.step():`, or call begin_chunk() before each forward; where the step is another "
    "manager's, set PipelineOffloadManager.instance to that first. This is said once"
)
_NO_END = (
    "%d forwards and no end of a step, so nothing was learned from them: take each training step "
    "inside `with manager.step():`, or call reset() after it; where a context finds steps itself, "
    "let go of losses that no backward has used up. This is said once"
)
_NO_COMMIT = (
    "nothing is offloaded of groups that are started and never committed, as %s in this step: give "
    "group_commit() the name that group_start() was given. This is said once"
)
_CAPTURED_TOO_EARLY = (
    "a step was captured into a graph while it is looked at: trace and check others; "
    "where a plan is looked for, take some 50 steps before (cuda_graph_warmup_steps), or set "
    "policy: modules"
)
_NO_TUNER = (
    "policy %r looks for rows in a model, and this manager was given none, so that all that is "
    "marked is offloaded: offload_modules() and get_act_offloading_ctx_manager() take a model"
)


class Tuner(Protocol):
    """Finds by a manager's steps what to offload, as `megatron_offload.autotune` does."""

    is_converged: bool
    """Whether no more steps are looked at."""
    said: str
    """How that has ended, in one line."""

    def begin(self, manager: PipelineOffloadManager) -> None:
        """Begin anew: the manager has another configuration."""

    def save(self, folder: str | Path) -> None:
        """Leave the plans of rows that it has found, in the place of any that are there."""

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at a step that has ended."""


class PipelineOffloadManager(Verdicts):
    """Holds one `ChunkOffloadHandler` per microbatch and virtual pipeline stage in flight.

    As a context manager it catches the tensors that autograd saves inside, for the group that was
    started last.

    Args:
        config: what is offloaded and within which bounds.
        backend: where tensors live; by default what ``config.backend`` names.
    """

    instance: ClassVar[PipelineOffloadManager | None] = None
    """The process's manager: None before it was asked for; may be set to another."""

    at_first_use: Callable[[PipelineOffloadManager], None] | None = None
    """Is called with that one once it is made."""

    at_chunk: ClassVar[list[Callable[[], None]]] = []
    """Are called when a chunk begins: whose outputs are known may be imported at any time."""

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """Return the process's manager, made at the first call."""
        if PipelineOffloadManager.instance is None:
            PipelineOffloadManager.instance = PipelineOffloadManager()
            if PipelineOffloadManager.at_first_use is not None:
                PipelineOffloadManager.at_first_use(PipelineOffloadManager.instance)
        return PipelineOffloadManager.instance

    @classmethod
    def reset_instance(cls) -> None:
        """Replace the process's manager by a new one of the same configuration."""
        old = PipelineOffloadManager.instance
        if old is None:
            return
        old.close()
        new = type(old)(old.config)
        # Models register their parameters once, in the first forward of all.
        new.marks, new.tuner = old.marks, old.tuner
        if new.tuner is not None:
            new.tuner.begin(new)
        PipelineOffloadManager.instance = new

    def __init__(
        self, config: OffloadConfig | None = None, *, backend: Backend | None = None
    ) -> None:
        self.observers: list[Observer] = []
        """The observers."""
        self.tuner: Tuner | None = None
        """Finds what to offload."""
        self.marks = Marks()
        self.step_number = 0
        """Steps begun so far."""
        self._num_failed_allocations = 0
        self._last_step: StepStats | None = None
        self.configure(config or OffloadConfig(), backend=backend)

    @graph_break
    def configure(self, config: OffloadConfig, *, backend: Backend | None = None) -> None:
        """Start anew with other settings, as in the constructor; between steps only.

        Raises:
            ConfigError: it is something else; nothing has changed.
        """
        if not isinstance(config, OffloadConfig):
            raise ConfigError(
                f"a configuration is an OffloadConfig, not a {type(config).__name__}; "
                "OffloadConfig(**settings) makes one of a dict"
            )
        if hasattr(self, "config"):
            self.close()
        self.config = config
        self.backend = backend or create_backend(config)
        most = config.host_memory_bytes
        self.host_pool = HostPool(
            self.backend,
            slab_bytes=config.host_slab_bytes,
            cap_bytes=cap_of_rank(config.host_memory_share) if most is None else most,
        )
        self.budget = DeviceBudget(config.max_inflight_bytes, config.prefetch_bytes)
        self.guard = Guard(self.backend.sync_copies)
        owned = self.backend, self.host_pool, self.budget, self.guard
        self.transfers = Transfers(*owned, self.observers)
        self.window = self.transfers.window
        self.learner = Learner(config, self.transfers)
        self._has_had_rows = False
        self.follow_rows(config.rows)
        self.observers[:] = [one for one in self.observers if not isinstance(one, Checker)]
        if config.checking:
            self.observers.append(Checker())
        self.do_offload = config.enabled
        self._packs = []
        self._is_in_step = False
        self._has_begun = False
        self.decisions = step = Step(self.transfers, self.learner)
        self.commit, self.flush_delayed_groups = step.commit_group, step.flush_delayed_groups
        self.enter_backward, self.leave_backward = step.enter_backward, step.leave_backward
        self.tick = step.tick
        self._begin_step()
        if self.tuner is not None:
            self.tuner.begin(self)

    # The step

    @graph_break
    def begin_chunk(
        self,
        *,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
        min_tensor_elements: int | None = None,
        fraction: float | None = None,
        delta_bytes_across_pp_ranks: int | None = None,
        max_inflight_groups: int | None = None,
    ) -> ChunkOffloadHandler:
        """Begin the forward of one microbatch on one virtual pipeline stage.

        What is said here wins over the configuration's defaults, and what was set there over it.

        Args:
            vp_stage: virtual pipeline stage; None is 0.
            pp_rank: pipeline rank, whose ``delta_bytes_across_pp_ranks`` count; None is what
                `register_pipeline_rank` was given.
            min_tensor_elements: smallest tensor that is offloaded, in elements; against
                ``min_tensor_bytes`` too.
            fraction: as in the configuration.
            delta_bytes_across_pp_ranks: likewise.
            max_inflight_groups: most groups of one name whose device memory is held for their
                copies, beside ``max_inflight_bytes``: both hold. 0 makes the compute stream wait at
                every commit. None sets no such bound.

        Raises:
            StateError: as `claim`.
        """
        self.claim()
        if self.guard.has_failed:
            self.abort()
        elif self._packs:  # of a forward that an exception has ended
            self._take_off_hooks()
        if self.decisions.chunk is not None:
            self.decisions.chunk.forget_recipes()
        config = self.config
        if config.enabled:
            for prepare in self.at_chunk:
                prepare()
            self.learner.follow(pp_rank, fraction, delta_bytes_across_pp_ranks)
            if not self._has_begun:
                self._has_begun = True
                self._say_plan()
        smallest = config.smallest_tensor
        is_set = {"min_tensor_bytes", "min_tensor_elements"} & config.model_fields_set
        if min_tensor_elements is not None and not is_set:
            smallest = (0, min_tensor_elements)
        self.decisions.chunk = chunk = self.new_chunk(vp_stage or 0, *smallest)
        chunk.rules.max_inflight_groups = max_inflight_groups
        return chunk

    def chunk_to_record(self, name: str, *, is_marked: bool = True) -> ChunkOffloadHandler | None:
        """Return the chunk of a group that starts now; None where none is recorded.

        By rows one that ``is_marked`` by its model is recorded where a row offloads it; others are
        those of rows.

        A program that says nothing of its chunks inside `step` has one for all forwards between
        two backwards: what is decided by chunk, such as ``fraction``, is decided for them together.
        """
        if not self.may_record:
            return None
        named = self._offloaded if is_marked else self._row_names
        if self.rows is not None and name not in named:
            return None
        if not is_recording():
            self.is_hidden(name)  # which says so
            return None
        step, chunk = self.decisions, self.decisions.chunk
        is_over = chunk is not None and chunk.begun_behind not in (None, len(step.backward_order))
        if chunk is None or (is_over and not chunk.open_groups):
            if not self._is_in_step:
                self.transfers.warn_once(_NO_CHUNK, name)
                return None
            chunk = self.begin_chunk()
            chunk.begun_behind = len(step.backward_order)
        return chunk

    @graph_break
    def start_group(self, chunk: ChunkOffloadHandler, name: str) -> OffloadGroup:
        """Open a group of a chunk; tensors saved under the manager's hooks belong to it.

        Raises:
            StateError: another thread is not done with this manager.
        """
        self.guard.refuse_other_threads()
        if chunk.position is None:
            self.enter_chunk(chunk)
        group = chunk.open_group(name)
        for observer in self.observers:
            observer.group_starts(group)
        self.decisions.start(group)
        return group

    @guarded
    def enter_chunk(self, chunk: ChunkOffloadHandler) -> None:
        """Give a chunk its position in the step, now that it has a group."""
        step = self.decisions
        if not step.entered and self.backend.is_capturing():
            self.host_pool.forget_events()  # of steps before; the caller has waited for them
        if step.is_over():
            if step.backward_order:
                self.transfers.warn_once(_NO_END, len(step.entered))
                self._last_step = step.finish(names_leaks=False)
                self.learner.learn(step.profile())
            self._begin_step()
            step.chunk = chunk
            if chunk.begun_behind is not None:
                chunk.begun_behind = 0
        step.entered.append(chunk)
        chunk.position = len(step.entered) - 1

    @graph_break
    def reset(self) -> None:
        """End the training step: release what is in flight, learn, and count from zero.

        Holds no collective. Graphs that are still alive keep their data. After a call of the
        engine that was cut short by an exception it is `abort`.
        """
        if self.guard.has_failed:
            self.abort()
        else:
            self.flush_delayed_groups()
            self._take_off_hooks()
            self._end_step()
            self._say_first()
            if self.tuner is not None:
                self.tuner(self)
            elif isinstance(self.config.policy, SolvedConfig) and not (
                self.learner.is_open or self.rests or not self.config.enabled
            ):
                self.transfers.warn_once(_NO_TUNER, self.config.policy.kind)

    def end_step_if_over(self) -> bool:
        """End the step if its groups were committed and no graph is left; return whether it was.

        Graphs that are kept for good don't count.
        """
        call = self.last_call
        has_begun = bool(self.decisions.committed) or call is not None
        step = self.decisions
        is_idle = has_begun and step.is_idle()
        step.names_leaks = has_begun and not is_idle and step.is_held()
        is_over = (is_idle or step.names_leaks) and (call is None or call() is None)
        if is_over:
            self.reset()
        return is_over

    @guarded
    def _end_step(self) -> None:
        names = {group.name for chunk in self.decisions.entered for group in chunk.open_groups}
        if names:
            self.transfers.warn_once(_NO_COMMIT, ", ".join(map(repr, sorted(names))))
        self._last_step = self.decisions.finish(names_leaks=self.config.checking)
        if self.backend.is_capturing():
            self._last_step.is_captured = True
            if self.decisions.committed:  # else an evaluation; the graph gets what its copies use
                if self._is_looked_at or self.is_searching:
                    raise StateError(_CAPTURED_TOO_EARLY)
                self.transfers.wait_reloads(self.decisions.committed)  # of what is unread too
                self.host_pool.leave_to_graph()
        elif self.decisions.backward_order:
            self.learner.learn(self.decisions.profile())
        self._begin_step()

    @contextmanager
    def step(self) -> Iterator[PipelineOffloadManager]:
        """Run one training step inside; ends with `reset`, or with `abort` on an exception."""
        surrounding, self._is_in_step = self._is_in_step, True
        try:
            yield self
        except BaseException as error:
            self.note_failure(error)
            self.abort()
            if isinstance(error, torch.OutOfMemoryError) and self.tuner is not None:
                self.tuner(self)  # so that the next may need less
            raise
        finally:
            self._is_in_step = surrounding
        self.reset()

    @graph_break
    def abort(self) -> None:
        """Leave a failed step: copies drain, references drop, the next step begins clean.

        What the step has on the host is gone: a backward through its graphs raises `StateError`.
        """
        self.guard.refuse_nesting("abort")
        with self.guard.lock:
            self._take_off_hooks()
            self.guard.left.clear()
            self.decisions.abandon()
            if self.guard.has_failed:
                self.learner.restart()
                self.guard.has_failed = False
            self._begin_step()

    def note_failure(self, error: BaseException | None) -> None:
        """Count what has ended a forward, if memory could not be had."""
        self._num_failed_allocations += isinstance(error, torch.OutOfMemoryError)

    @property
    def num_out_of_memory(self) -> int:
        """How often memory could not be had so far, as far as it is known."""
        return self._num_failed_allocations + self.backend.memory().num_out_of_memory

    @guarded
    def trim(self) -> int:
        """Free all memory that no graph needs now; return the bytes that were unpinned.

        For between steps, before something else needs the memory; the next step takes it again.
        Blocks the host until the copies under way are over.
        """
        self.backend.sync_copies()
        self.backend.trim_device()
        return self.host_pool.shrink()

    @graph_break
    def close(self) -> None:
        """Abort what runs and free all host memory; a second call does nothing more."""
        self.abort()
        with self.guard.lock:
            self.host_pool.close()

    def _begin_step(self) -> None:
        self.step_number += 1
        self.last_call: ref[object] | None = None
        """The last call of this step whose inside is recomputed: there may be no groups besides."""
        self.marks.begin_step()
        self.decisions.begin()

    # Boundaries

    @guarded
    def join_offloads(self) -> None:
        """Make the compute stream wait for all copies to the host, and release their sources."""
        self.window.drain()

    @guarded
    def join_reloads(self) -> None:
        """Make the compute stream wait for all copies to the device of this step's groups."""
        self.transfers.wait_reloads(self.decisions.committed)

    # Copies, and what is asked for

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied module is run beside its original, on the same memory

    def __reduce__(self) -> tuple[Any, ...]:
        if self is PipelineOffloadManager.instance:
            return PipelineOffloadManager.get_instance, ()
        return type(self), (self.config,)

    @guarded
    def state_of(self) -> dict[str, Any]:
        """Return counts that must all be zero between steps, for leak checks."""
        return {
            "groups in flight": self.window.num_inflight,
            "host bytes": self.host_pool.stats.in_use_bytes,
            "bytes in flight": self.budget.inflight_bytes,
            "prefetched bytes": self.budget.held_bytes,
        }

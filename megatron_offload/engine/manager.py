"""The one manager of a process: all that a program asks of the engine, one call at a time.

Every entry point works in any order. Backwards that never come, resets in the middle and exceptions
leave a manager whose next step is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch

from megatron_offload.backends import create_backend
from megatron_offload.backends.base import Backend
from megatron_offload.config import OffloadConfig
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.guard import Guard, guarded
from megatron_offload.engine.hooks import graph_break
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.observer import Checker
from megatron_offload.engine.recording import Recording
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.step import Step
from megatron_offload.engine.transfers import Transfers
from megatron_offload.errors import ConfigError
from megatron_offload.machine.job_ranks import cap_of_rank
from megatron_offload.memory.host_pool import HostPool


class PipelineOffloadManager(Recording):
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

    at_chunk: ClassVar[list[Callable[[PipelineOffloadManager], object]]] = []
    """Are called when a chunk begins: whose outputs are known may be imported at any time."""

    at_reset: ClassVar[list[Callable[[PipelineOffloadManager], object]]] = []
    """Are called when a step has ended."""

    @staticmethod
    def pipeline_rank() -> int:
        """Return this process's pipeline rank, for chunks that are begun without one."""
        return 0

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
        super().__init__()
        self.step_number = 0
        """Steps begun so far."""
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
        self.follow_rows(config.rows)
        self.observers[:] = [one for one in self.observers if not isinstance(one, Checker)]
        if config.checking:
            self.observers.append(Checker())
        self.do_offload = config.enabled
        self._packs = []
        self.is_in_step = False
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
                `pipeline_rank` says.
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
            self.decisions.chunk.recipes.clear()
        config = self.config
        if config.enabled:
            for prepare in self.at_chunk:
                prepare(self)
            rank = self.pipeline_rank() if pp_rank is None else pp_rank
            self.learner.follow(rank, fraction, delta_bytes_across_pp_ranks)
        smallest = config.smallest_tensor(min_tensor_elements)
        self.decisions.chunk = chunk = self.new_chunk(vp_stage or 0, *smallest)
        chunk.rules.max_inflight_groups = max_inflight_groups
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
            step.end_unasked()
            self._begin_step()
            step.chunk = chunk
            if chunk.begun_behind is not None:
                chunk.begun_behind = 0
        step.enter(chunk)

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
            for note in self.at_reset:
                note(self)
            if self.tuner is not None:
                self.tuner(self)

    def end_step_if_over(self) -> bool:
        """End the step if its groups were committed and no graph is left; return whether it was."""
        if is_over := self.decisions.is_left():
            self.reset()
        return is_over

    @guarded
    def _end_step(self) -> None:
        is_looked_at = self._is_looked_at or self.is_searching
        self.decisions.finish(names_leaks=self.config.checking, is_looked_at=is_looked_at)
        self._begin_step()

    @contextmanager
    def step(self) -> Iterator[PipelineOffloadManager]:
        """Run one training step inside; ends with `reset`, or with `abort` on an exception."""
        surrounding, self.is_in_step = self.is_in_step, True
        try:
            yield self
        except BaseException as error:
            self.abort()
            if isinstance(error, torch.OutOfMemoryError) and self.tuner is not None:
                self.tuner(self)  # so that the next may need less
            raise
        finally:
            self.is_in_step = surrounding
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
            self.transfers.abandon(self.decisions.groups())
            if self.guard.has_failed:
                self.learner.profile, self.guard.has_failed = None, False
                self.transfers.kept_by_others.clear()
            self._begin_step()

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
        self.marks.begin_step()
        self.decisions.begin()

    @guarded
    def join_offloads(self) -> None:
        """Make the compute stream wait for all copies to the host, and release their sources."""
        self.window.drain()

    @guarded
    def join_reloads(self) -> None:
        """Make the compute stream wait for all copies to the device of this step's groups."""
        self.transfers.wait_reloads(self.decisions.committed)

    # What it says

    @property
    def last_step(self) -> StepStats:
        """Counters of the last finished step; until one is finished, of the one that runs."""
        step = StepStats() if self.rests else self.decisions.last or self.transfers.counted()
        step.why = self.why_nothing
        return step

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

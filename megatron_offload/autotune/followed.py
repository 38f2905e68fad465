"""What a search follows, what it says of that in the end, and does where memory runs short."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import nn

from megatron_offload.autotune.measured import StepTimes
from megatron_offload.autotune.model_steps import ModelSteps
from megatron_offload.autotune.row_answers import Alike, RowAnswers
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.row_config import LOSS, MODEL, RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.hooks import is_recording
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.files.renames import OldAttributes
from megatron_offload.files.strict_model import write_model
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.planning.found import NAME, RunFrontier
from megatron_offload.planning.frontier import KEEP, Plan
from megatron_offload.planning.row_choice import NOTHING, Stage

_logger = logging.getLogger(__name__)

ADVICE = (
    ". A larger 'most_slowdown_percent' lets it cost more, 'memory_target' says how much memory "
    "there is, 'rows' name what is offloaded or recomputed and cost nothing "
    "besides (docs/rows.md), and 'policy: modules' offloads everything"
)
_OUTSIDE = (
    ". Of {1} that a forward saves {0} are outside layers or in compiled ones, where no row reaches"
    " (a loss by rows makes no copies of logits: docs/recompute.md)"
)

_MUCH_LONGER = 4.0  # forwards for which rows are looked for again, where there are none
_MOST_SEARCHES = 3  # so often at most
_MOST_UNTRIMMED = 32  # forwards behind a search, of which none is long
MOST_SHARE = 0.85  # of the device's memory, what plans may reserve where it has no room for all
_MOST_FILLED = 0.95  # likewise in a forward that is larger than all before
LEAST_SHARE = 0.25  # of what is saved: where layers save less, all of it frees more


class FollowedRows(OldAttributes):
    """What a search follows: the plan that is looked at, and then the one that it has found.

    Args:
        models: the model, or the chunks of it that this rank has.
        manager: whose forwards these are.
        hook: sets the hooks of the rows that the manager follows.
        groups: between whose `begin` and `end` forwards lie, which say where a step begins, by
            `ModelSteps`. None: the manager's steps are those of the program.
        has_layers: whether layers may have rows. Else, and where most of what is saved is in no
            layer, as where the program checkpoints them, there is one plan: all is offloaded.

    Attributes:
        plan: what is followed; None where that is nothing.
        is_converged: whether no more steps are looked at.
        said: how it has ended, in one line.
        loss_is_by_rows: asked then whether the loss is, which is a row as well.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        manager: PipelineOffloadManager,
        hook: Callable[[], object],
        groups: AutomaticGroups | None = None,
        *,
        has_layers: bool = True,
    ) -> None:
        self._has_layers = has_layers
        self._models = WeakValueDictionary(enumerate(models))
        self._may_offload: Callable[[str, str], bool] = lambda *_: True
        self._has_groups = groups is not None
        self.loss_is_by_rows: Callable[[], bool] = lambda: False
        self.begin(manager)
        self.serve(hook, groups)

    def begin(self, manager: PipelineOffloadManager) -> None:
        """Begin anew, with what the manager's configuration leaves open."""
        self._manager, self._num_begun = ref(manager), 0
        self._begin_anew()

    def serve(self, hook: Callable[[], object], groups: AutomaticGroups | None = None) -> None:
        """Go on with another context for the same model and manager.

        Its hooks are of what this step follows: nothing, perhaps, where the next has the plan.
        """
        self._groups = (lambda: None) if groups is None else ref(groups)
        self._hook, manager = hook, self.manager
        if self.plan is not None and not self.is_converged:
            rows = manager.rows
            manager.rows = tuple(row for row in self.plan.rows() if row.site != MODEL)
            try:
                hook()
            finally:
                manager.rows = rows

    def _begin_anew(self) -> None:
        manager = self.manager
        self._num_begun += 1
        self._times = StepTimes(manager.backend.sync_elapsed_us)
        self.plan: Plan | None = None
        self.said = self._stage = ""
        self._clock: ModelSteps | None = None
        self._is_alone, self._speaks = True, rank_in() == 0
        self._is_tight = self._has_moved = self._is_outgrown = False
        """Whether there is no room for a step without rows; a plan has offloaded anything; rows are
        to be looked for again."""
        self._num_untrimmed = _MOST_UNTRIMMED
        """Forwards, until one of any length frees what only other plans needed."""
        self._longest, self._bare_tokens = math.inf, 1.0
        """Of forwards so far; and of those of the search."""
        self._num_ooms = self._num_over = 0
        # Of a forward of so many tokens, as it was watched:
        self._watched_tokens = self._num_inflight = self._layer_share = 1.0
        self._saved_bytes = self._bare_bytes = 0
        self._kinds = list[Alike]()
        self._link_bytes = dict[int, float]()
        policy = manager.config.tuned_policy or AutoConfig(kind="auto")
        if manager.config.whole_step_graph and isinstance(policy, AutoConfig):
            # What eager steps take says nothing of replays.
            policy = policy.model_copy(update={"measured_plans": 0})
        self._policy, self._answers = policy, RowAnswers(policy)
        self.is_converged = manager.config.tuned_policy is None
        if not self.is_converged:
            manager.follow_rows(None)
            manager.learner.follow_rules(is_open=True)

    @property
    def manager(self) -> PipelineOffloadManager:
        """The manager whose forwards these are."""
        found = self._manager()
        assert found is not None
        return found

    @property
    def _target_bytes(self) -> int | None:
        """What is to be reserved at most, None where that doesn't matter."""
        if isinstance(self._policy, MemoryTargetConfig):
            return self._policy.target_of(self.manager.learner.pp_rank or 0)
        capacity_bytes = self.manager.backend.capacity_bytes() if self._is_tight else None
        return None if capacity_bytes is None else int(MOST_SHARE * capacity_bytes)

    def _now(self) -> tuple[Any, int]:
        """Return a point of the compute stream, and what is reserved where that matters."""
        backend = self.manager.backend
        if backend.is_capturing():
            return None, 0
        is_asked = isinstance(self._policy, MemoryTargetConfig)
        reserved_bytes = backend.memory().reserved_bytes if is_asked else 0
        mark = None if self.is_converged else backend.timestamp(backend.compute_stream())
        return mark, reserved_bytes

    def _follow(self, plan: Plan) -> None:
        """Set the hooks of a plan."""
        manager = self.manager
        self.plan = plan
        manager.follow_rows(plan.rows(), is_own=True)
        try:
            self._hook()
        except ConfigError as error:
            self._answers = RowAnswers(self._policy)
            self._stop(f"the model has changed: {error}", "")
        else:
            if self._target_bytes is not None:
                manager.backend.trim_device()  # what is reserved is seen from here on

    def save(self, folder: str | Path) -> None:
        """Leave the plans among which it has chosen, for ``megatron-offload plan --from FOLDER``.

        Only the rank that answers knows them: others write nothing.

        Raises:
            StateError: it goes on.
        """
        if not self.is_converged:
            raise StateError("the search for rows goes on; save its plans once it has ended")
        path, choice = Path(folder) / NAME, self._answers.choice
        if choice is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_followed = self.plan is not None
            found = RunFrontier.of(choice, self.said, self._besides, is_followed=is_followed)
            write_model(path, found)
        elif self._speaks:
            path.unlink(missing_ok=True)

    @property
    def _besides(self) -> tuple[RowConfig, ...]:
        return (RowConfig(site=LOSS, by_rows=True),) if self.loss_is_by_rows() else ()

    def _finish(self, plan: Plan, text: str, rows: Sequence[RowConfig]) -> None:
        """Follow a plan to the end; ``rows`` are those of all stages together."""
        manager = self.manager
        if not rows:
            is_costly = isinstance(self._policy, AutoConfig) and text != NOTHING
            outside = (1 - self._layer_share) * self._saved_bytes
            if outside > LEAST_SHARE * self._saved_bytes:
                sizes = (format_bytes(int(size), 2) for size in (outside, self._saved_bytes))
                text += _OUTSIDE.format(*sizes)
            self._stop(text, ADVICE if is_costly else "")
            return
        has_effect = self._has_moved or any(row.recompute for row in plan.rows())
        if self._is_alone and self._policy.measured_plans and not has_effect:
            self._stop("what its rows would offload is needed again at once", "")
            return
        self._follow(plan)
        if self.is_converged:
            return
        self.is_converged = True
        if manager.config.whole_step_graph or not self._is_alone:  # no forward is looked at
            self._trim()
        self._say_rows(text, rows)

    def _say(self, text: str, policy: str = "") -> None:
        self.said = text
        if self._speaks:
            _logger.warning("megatron-offload: %s%s", policy, text)

    def _say_rows(self, text: str, rows_of_all: Sequence[RowConfig] | None = None) -> None:
        """Say which rows are followed, and why."""
        assert self.plan is not None
        own = self.plan.rows() if rows_of_all is None else rows_of_all
        rows = ", ".join(map(str, (*self._besides, *own)))
        scale = self._num_inflight * self._bare_tokens / self._watched_tokens
        most = min(self.plan.freed_bytes, self._saved_bytes)  # steps differ
        sizes = scale * most, scale * self._saved_bytes
        freed, saved = (format_bytes(int(size), 2) for size in sizes)  # what is needed soon is kept
        pinned = format_bytes(self.manager.host_pool.stats.slab_bytes_total, 2)
        found = f"rows: [{rows}] free up to {freed} of {saved} saved, {pinned} pinned; {text}"
        self._say(found, f"{self._policy.kind}: ")

    def _stop(self, why: str, advice: str, *, keeps_open: bool = False) -> None:
        """Offload nothing from here on but what the device has no room for; say why, once."""
        manager = self.manager
        self.is_converged, self.plan = True, None
        what = "only what the device has no room for is offloaded"
        if not keeps_open:
            what = "nothing is offloaded or recomputed"
            manager.learner.follow_rules()
            manager.follow_rows((), is_own=True)
            self._hook()
            manager.host_pool.prepare(0)
            manager.trim()  # no step comes that would unpin anything
        self._say(f"{what}: {why}{advice}")

    @property
    def _own(self) -> Stage | None:
        """The plans of this process, if it decides for itself."""
        choice = self._answers.choice if self._is_alone else None
        return None if choice is None else choice.stages.get(self._stage)

    def _trim(self) -> None:
        """Free what only other plans, and looking, needed of the device and of the host."""
        self._num_untrimmed = 0
        self.manager.host_pool.prepare(0)
        self.manager.backend.trim_device()

    def _trim_when_full(self) -> None:
        """Do so as a forward ends, if it is the fullest of its step, and a long one.

        Else what it has needed is had anew, which takes a step long. In the last that may pass this
        is done all the same: a program may have none that is as full as one in the search.
        """
        clock = self._clock
        if not self._num_untrimmed or self.plan is None or clock is None:
            return
        if self.manager.backend.is_capturing():
            return
        self._num_untrimmed = max(1, self._num_untrimmed - 1)
        is_full = 0 < clock.most_pending <= clock.num_pending
        is_long = is_full and clock.tokens[-1] >= self._times.measured_tokens
        if is_long or self._num_untrimmed == 1:
            self._trim()

    def _see_length(self, tokens: float) -> None:
        """Look at a forward that has begun, behind the search."""
        if tokens > self._longest and is_recording():
            self._longest = tokens
            self._make_room(tokens)
            # What frees nothing, or takes too long, in short steps may pay in such.
            is_longer = self._is_alone and tokens >= _MUCH_LONGER * self._bare_tokens
            self._is_outgrown = is_longer and not self.plan and self._num_begun < _MOST_SEARCHES

    def _see_memory(self) -> None:
        """Free more, if the step that is over had too little memory, or took more than it may."""
        clock, stage, is_short, over_bytes = self._clock, self._own, False, 0
        if clock is None:
            return
        is_pending, ended = not clock.is_over(), clock.ended
        clock.restart()
        if stage is None:
            return
        if is_pending:  # else it isn't worth asking the allocator with every step
            num_ooms = self.manager.backend.memory().num_out_of_memory
            is_short, self._num_ooms = num_ooms > self._num_ooms, num_ooms
        if isinstance(self._policy, MemoryTargetConfig):
            over_bytes = (ended or (None, 0))[1] - (self._target_bytes or 0)
            if over_bytes > 0:  # it may be what something else has left
                self.manager.backend.trim_device()
        self._num_over = self._num_over + 1 if over_bytes > 0 else 0
        if is_short or self._num_over > 1:
            clearly_bytes = stage.plan.freed_bytes + stage.plans[-1].freed_bytes // 8
            self._free(stage, clearly_bytes, "a step has had too little memory")
        elif is_pending and self.plan and self.plan.min_tokens:  # no longest has the peak alone
            self._free(stage, 0, "forwards come before others' backwards")

    def _make_room(self, tokens: float) -> None:
        """Follow a plan under which a forward fits that is longer than all before; it has begun."""
        manager, groups, stage = self.manager, self._groups(), self._own
        capacity_bytes, memory = manager.backend.capacity_bytes(), manager.backend.memory()
        if capacity_bytes is None or groups is None or stage is None:
            return
        room_bytes = _MOST_FILLED * capacity_bytes - memory.allocated_bytes
        saved_bytes = (self._bare_bytes - memory.allocated_bytes) * tokens / self._bare_tokens
        wanted_bytes = (saved_bytes - room_bytes) * self._watched_tokens / tokens
        if stage.plan.freed_bytes < wanted_bytes:
            first = next(iter(self._link_bytes), None)  # the layer that has begun without
            if self._free(stage, wanted_bytes, "a forward is larger than all before", late=first):
                groups.end()  # it may have begun without any rows
                groups.begin()

    def _free(self, stage: Stage, wanted_bytes: float, why: str, late: int | None = None) -> bool:
        """Follow a plan, in all forwards, that frees so much but in one layer; else the last."""
        for place in range(stage.place, len(stage.plans)):
            plan = stage.plans[place]
            late_bytes = 0 if late is None else plan.actions.get(late, KEEP).freed_bytes
            if plan.freed_bytes - late_bytes >= wanted_bytes:
                break
        is_other = place > stage.place or bool(self.plan and self.plan.min_tokens)
        if is_other:
            self._is_tight = True  # to try a site takes what there isn't
            stage.place = place
            self._follow(plan._replace(min_tokens=0))
            self._say_rows(why)
        return is_other

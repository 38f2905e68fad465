"""The measured search where a model is given: the rows that free most for what they may cost.

docs/rows.md says in which steps. Exactness depends on nothing here.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections import ChainMap
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary, ref

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.autotune.agree import Ranks, is_alone
from megatron_offload.autotune.layers import LayerWatch, SiteTimes
from megatron_offload.autotune.model_steps import ModelSteps
from megatron_offload.autotune.row_answers import RowAnswers, plan_of
from megatron_offload.autotune.slowdown import TimedStep, growth_of, slowdown_of
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.row_config import LOSS, MODEL, UNITS, RowConfig, ranges
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.hooks import is_recording
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.module_hooks import ModuleHook, named_modules
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.files.renames import OldAttributes
from megatron_offload.files.strict_model import write_model
from megatron_offload.machine.bandwidth import BandwidthError, Link, median_rates
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.model_map.sites import Site, sites_of_layers
from megatron_offload.model_map.watch import MayMove
from megatron_offload.planning.found import NAME, RunFrontier
from megatron_offload.planning.frontier import Part, Plan, to_plain
from megatron_offload.planning.row_choice import NOTHING, Slowdown, Stage, busy_share
from megatron_offload.recompute.sites import unproven_sites

_logger = logging.getLogger(__name__)

_Kind: TypeAlias = Literal["open", "watched", "timed", "bare", "trying", "warming", "rows"]
"""What a step is for: all is kept that the device has room for; the layers are watched; they are
timed; nothing stands in it; what is to be recomputed is tried, and kept; rows take their memory;
they are measured."""


ADVICE = (
    ". A larger 'most_slowdown_percent' lets it cost more, 'memory_target' says how much memory "
    "there is, 'rows' name what is offloaded or recomputed and cost nothing "
    "besides (docs/rows.md), and 'policy: modules' offloads everything"
)
_OUTSIDE = (
    ". Of {1} that a forward saves {0} are outside layers, such as logits and copies, which a loss "
    "by rows does without (docs/recompute.md)"
)
NO_CLOCK = (
    "there is no GPU here, so that nothing can be won. 'policy: modules', in Python "
    "OffloadConfig(policy='modules'), offloads everything all the same"
)

Look = TypeVar("Look", LayerWatch, SiteTimes)

_MUCH_LONGER = 4.0  # forwards for which rows are looked for again, where there are none
_MOST_SEARCHES = 3  # so often at most
_MOST_UNCALLED = 16  # steps without a forward of the layers that are looked at
_NUM_BARE = 6
_MOST_UNPREPARED = 40  # so many more at most, until memory is ready that a plan will pin
_NUM_UNPREPARED = 4  # likewise among ranks, whose steps are counted
_NUM_IN_A_ROUND = 8  # steps that are measured until it is asked what comes next
_MOST_SHARE = 0.85  # of the device's memory, what plans may reserve where it has no room for all
_SPARE_SHARE = 1.25  # of what steps so far would pin, what is made ready
_MOST_FILLED = 0.95  # likewise in a forward that is larger than all before
_LEAST_SHARE = 0.25  # of what is saved: where layers save less, all of it frees more
_PROBE_BYTES = 32 << 20  # what one of the copies moves that time the link
_LONG_SHARE = 0.75  # of the largest forward so far, what says enough of it
_MOST_SHORT = 3  # so many smaller ones are looked at in vain
_MEASURED_SHARE = 0.6  # of the most tokens so far: in such forwards a plan is measured, or longer
_MOST_PASSED = 3  # times as many steps in which others pass


class _Step(NamedTuple):
    """What is known of one that rows are measured by."""

    began: Any
    ended: Any
    size: float
    tokens: list[float]
    """Of each of its forwards."""
    has_rows: bool


class RowSearch(OldAttributes):
    """Finds rows by a model's own steps: what `PipelineOffloadManager.tuner` is where it is given.

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

    def is_of(self, model: nn.Module) -> bool:
        """Whether it looks for rows of this model."""
        return any(one is model for one in self._models.values())

    @property
    def is_orphan(self) -> bool:
        """Whether none of its models is left."""
        return not self._models

    def add(self, model: nn.Module) -> None:
        """Look for rows of another chunk too; begin anew where the first steps were without."""
        self._models = WeakValueDictionary(enumerate([*self._models.values(), model]))
        if self._clock is not None or self.is_converged:
            self.close()
            self._begin_anew()

    def begin(self, manager: PipelineOffloadManager) -> None:
        """Begin anew, with what the manager's configuration leaves open."""
        self._manager, self._num_begun = ref(manager), 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        manager = self.manager
        self.plan: Plan | None = None
        self.said = ""
        self._clock: ModelSteps | None = None
        self._steps: list[_Step] = []
        self._sizes: list[float] = []
        self._tokens: list[float] = []
        """Of all forwards; then of those of the step."""
        self._own_tokens: list[float] = []
        self._growth, self._has_lengths = 1.0, True
        self._look_size = 0.0
        """Of the forward that is looked at."""
        self._mark: Any = None
        self._kind: _Kind = "open"
        self._looks: LayerWatch | SiteTimes | None = None
        self._looked: set[nn.Module | None] = set()
        """Whose forward was looked at in this step."""
        self._rows: tuple[RowConfig, ...] = ()
        """Followed until there is a plan."""
        self._takes_part = self._has_begun = False
        self._trained: set[int] = set()
        """The models that had a forward with gradients: a teacher's are no part of the step."""
        self._is_alone, self._is_tight, self._largest = True, False, math.inf
        self._is_outgrown = self._has_moved = False
        self._num_begun += 1
        self._num_rounds, self._num_uncalled, self._stage = 0, 0, ""
        self._speaks = rank_in() == 0
        self._has_failed, self._num_ooms, self._num_over = False, 0, 0
        policy = manager.config.tuned_policy or AutoConfig(kind="auto")
        if manager.config.whole_step_graph and isinstance(policy, AutoConfig):
            # What eager steps take says nothing of replays.
            policy = policy.model_copy(update={"measured_plans": 0})
        self._policy, self._answers = policy, RowAnswers(policy)
        self._search = self._find()
        self.is_converged = manager.config.tuned_policy is None
        if not self.is_converged:
            manager.follow_rows(None)
            manager.learner.open()

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at the manager's step, where that is the program's: else do nothing."""
        if self._has_groups or not self._has_begun:
            return
        self._has_begun = False
        if self.is_converged:
            self._see_memory()
        elif not self._is_graph():
            self._step_is_over()

    @property
    def manager(self) -> PipelineOffloadManager:
        """The manager whose forwards these are."""
        found = self._manager()
        assert found is not None
        return found

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
            said = self.said.removeprefix("megatron-offload: ")
            found = RunFrontier.of(choice, said, self._besides, is_followed=self.plan is not None)
            write_model(path, found)
        elif self._speaks:
            path.unlink(missing_ok=True)

    @property
    def _besides(self) -> tuple[RowConfig, ...]:
        return (RowConfig(site=LOSS, by_rows=True),) if self.loss_is_by_rows() else ()

    # Steps as they come

    def step_begins(self) -> None:
        """A forward is about to begin that no other surrounds."""
        manager, groups, clock = self.manager, self._groups(), self._clock
        self._takes_part = groups is not None and is_recording() and manager.do_offload
        if not self._takes_part or groups is None:
            return
        if self._is_outgrown:
            self._begin_anew()
        elif self.is_converged:
            self._see_memory()
        elif not self._is_graph() and (clock is None or clock.is_over()):
            groups.end_step_if_over()
            self._step_is_over()
            self._mark = self._now()[0]

    def _is_graph(self) -> bool:
        if self.manager.backend.is_capturing() and not self.is_converged:
            self.is_converged = True  # the graph has what the last eager step had
            self.said = "megatron-offload: a step was captured before a plan was found"
            _logger.warning("%s", self.said)
        return self.is_converged

    def _step_is_over(self) -> None:
        clock = self._clock
        if clock is not None:
            ended = clock.ended[0] if clock.ended else None
            self._last = self._mark, self._now()[0] if ended is None else ended
            if clock.size:  # else it was no forward of this model
                self._sizes.append(clock.size / clock.num_forwards)
                if self._kind == "rows":
                    self._has_moved |= self.manager.last_step.offloaded_bytes > 0
                if self._kind in ("bare", "rows"):
                    how = self._own_tokens, self._kind == "rows"
                    self._steps.append(_Step(*self._last, clock.size, *how))
                self._tokens += self._own_tokens
        if clock is None or clock.size:
            self._take_next()
            self._num_uncalled = 0
        else:
            self._num_uncalled += 1
            if self._num_uncalled > _MOST_UNCALLED:
                self._stop("the layers that it has aren't called, or others look at them", ADVICE)
        if self._clock is not None:
            self._clock.restart()
        self._looked.clear()
        self._own_tokens = []

    def _now(self) -> tuple[Any, int]:
        """Return a point of the compute stream, and what is reserved where that matters."""
        backend = self.manager.backend
        if backend.is_capturing():
            return None, 0
        is_asked = isinstance(self._policy, MemoryTargetConfig)
        reserved_bytes = backend.memory().reserved_bytes if is_asked else 0
        mark = None if self.is_converged else backend.timestamp(backend.compute_stream())
        return mark, reserved_bytes

    def _take_next(self) -> None:
        """Go on with the search, and follow what the next step is for."""
        kind = next(self._search, None)
        if self.is_converged:
            if not self._is_alone:
                self.close()  # a longer step changes nothing
            return
        if kind is None:
            self._stop("an interrupt has ended the search", "")
            return
        self._kind = kind
        if kind != "open":
            has_rows = kind in ("trying", "warming", "rows")
            rows = self.plan.rows() if has_rows and self.plan else self._rows
            on_trial = kind == "trying" and not self._is_tight
            self.manager.follow_rows(rows, is_own=True, on_trial=on_trial)
            self._follow_in_library(rows)

    def _follow_in_library(self, rows: Sequence[RowConfig]) -> None:
        """Let a library do in this step what rows leave to it."""

    def forward_begins(self, model: nn.Module | None = None) -> None:
        """A forward of the model has begun, or of a chunk of it."""
        if not self._has_groups:
            self._takes_part = is_recording() and self.manager.do_offload
            if self._takes_part and not self._has_begun:
                self._has_begun, self._mark = True, self._now()[0]
        if self._takes_part:
            self._trained.add(id(model))
        if self._takes_part and self._clock is not None:
            self._clock.enter()
            if self._looks is not None and model not in self._looked:
                self._looked.add(model)
                self._looks.begin()

    def forward_ends(self, *, has_failed: bool) -> None:
        """It is about to end."""
        if self._clock is not None:
            self._clock.leave()
        if self._looks is not None:
            self._looks.end()
        self._has_failed |= has_failed

    def hook_end(self, model: nn.Module) -> RemovableHandle:
        """Let the end of a module's call be that of the forward."""
        end = ModuleHook(lambda *given: self.forward_ends(has_failed=given[-1] is None))
        return model.register_forward_hook(end, always_call=True)

    # The search; a step passes at each yield

    def _find(self) -> Generator[_Kind, None, None]:
        manager = self.manager
        backend, all_sites = manager.backend, self._sites()
        timed = all_sites or {
            str(number): Site(0, "layer", model, "it is a whole model")
            for number, model in self._models.items()
        }
        sites = all_sites if self._has_layers else {}
        numbers = sorted({site.layer for site in sites.values()})
        firsts = {
            path.rpartition(".")[0]: site
            for path, site in reversed(timed.items())
            if site.name == "layer"
        }
        first_layers = filter(None, (site.module() for site in firsts.values()))
        self._clock = ModelSteps(first_layers, self._now, self._layer_begins)
        self._num_ooms = manager.num_out_of_memory
        # A rerun may hold collectives, so that ranks don't decide on it by themselves.
        if sites and not any(site.refusal for site in sites.values()) and is_alone():
            manager.learner.follow_rules()
            self._recompute_layers(numbers, when_short=True)
        released_bytes = 0
        for _ in range(1 + self._has_groups):  # behind the first there is an optimizer's state
            yield "open"
            step = manager.last_step
            released_bytes += step.peak_released_bytes + step.recomputed_bytes
        if not backend.sync_elapsed_us(*self._last):
            self._stop(NO_CLOCK, "")
            return
        needed_bytes = self._bare_bytes = backend.memory().peak_allocated_bytes + released_bytes
        capacity_bytes = backend.capacity_bytes() or math.inf
        self._is_tight = released_bytes > 0 and needed_bytes > _MOST_SHARE * capacity_bytes
        if self._is_tight and manager.rows is None:
            yield from self._agree("layers can't be recomputed here unasked", "open")
            return
        manager.learner.follow_rules()
        others = numbers[:-1] if self._is_tight else []
        if self._is_tight:  # one layer stands for all
            sites = {path: site for path, site in sites.items() if site.layer == numbers[-1]}
            self._recompute_layers(others)
        elif not self._has_groups:  # what functions make is noted
            named = self._named_recompute
            may = manager.usual_recompute if named is None else named
            self._rows = tuple(RowConfig(site=x, recompute=True) for x in UNITS if x in may)
        look = partial(LayerWatch, sites, self._may_move(), manager)
        watch = yield from self._look("watched", look)
        self._rows = self._rows if self._is_tight else ()
        watched_size = self._watched_size = self._look_size
        holds_back = manager.config.whole_step_graph
        timing = partial(SiteTimes, sites or timed, backend, holds_back=holds_back)
        times = yield from self._look("timed", timing)
        times.scale = watched_size / self._look_size
        self._num_inflight = max(1.0, self._clock.most_pending / len(self._trained))
        self._forward_us = times.forward_us
        gbps = measure_link(manager)
        if not (self._is_tight or holds_back):
            for _ in range(_NUM_BARE):
                yield "bare"
            self._bare_bytes = backend.memory().peak_allocated_bytes
            sizes = self._sizes[-_NUM_BARE:]
            longest = max(sizes)
            times.sizes = [x / self._look_size for x in sizes if x >= _MEASURED_SHARE * longest]
        is_pipeline = self._num_inflight > 1
        if watch.layer_share < _LEAST_SHARE and not self._is_tight:
            self._actions = {0: tuple(watch.all_of_it(times, gbps))}
            self._link_bytes = [math.inf]
        else:
            self._actions = watch.actions(times, gbps, others, self._may_offload)
            self._link_bytes = times.link_bytes(gbps, self._actions, is_pipeline=is_pipeline)
        self._saving, self._largest_bytes = watch.saving, watch.largest_bytes
        self._saved_bytes, self._has_lengths = watch.saved_bytes, len(watch.tokens) == 1
        self._layer_share = watch.layer_share
        # What ranks have alike that have the same layers.
        seen = sorted((site.layer, x) for x, site in all_sites.items() if x in watch.called)
        self._stage = f"{manager.learner.pp_rank or 0}/{zlib.crc32(repr(seen).encode()):x}"
        del look, timing, sites, all_sites, timed, watch, times, firsts  # no model is held
        self._largest = self._size_of_bare = max(self._sizes)
        yield from self._agree()

    def close(self) -> None:
        """Look at no more forwards."""
        if self._clock is not None:
            self._clock.close()

    def _sites(self) -> dict[str, Site]:
        """Return layers and their parts by dotted name, in that of their model's number."""
        return {
            f"{number}.{path}": site
            for number, model in self._models.items()
            for path, site in sites_of_layers(model, self._named_recompute).items()
        }

    @property
    def _named_recompute(self) -> tuple[str, ...] | None:
        """What is configured that may be recomputed, if anything is."""
        config = self.manager.config
        return config.recompute if "recompute" in config.model_fields_set else None

    def _may_move(self) -> MayMove:
        manager, groups = self.manager, self._groups()
        chunk = manager.cur_forward_chunk() if groups is None else None
        if chunk is None:
            least_bytes = None if groups is None else groups.min_tensor_bytes
            chunk = manager.new_chunk(0, least_bytes or 0)
        return chunk.may_move

    def _recompute_layers(self, numbers: Sequence[int], *, when_short: bool = False) -> None:
        rows = (RowConfig(site="layer", layers=ranges(numbers), recompute=True),)
        self._rows = () if when_short else rows
        self.manager.follow_rows(rows, is_own=True, when_short=when_short)
        self._hook()

    def _look(self, kind: _Kind, make: Callable[[], Look]) -> Generator[_Kind, None, Look]:
        """Let forwards pass until a long one comes to its end.

        In short ones the device waits for the host, so that they say little of long ones, which
        decide how much memory is needed.
        """
        num_short = 0
        while True:
            look = make()
            self._looks, self._has_failed, self._look_size = look, False, 0.0
            yield kind
            self._looks = None
            is_short = self._look_size < _LONG_SHARE * max(self._sizes)
            if is_short and num_short < _MOST_SHORT and is_alone():  # ranks go on together
                num_short += 1
            elif not self._has_failed:
                return look

    def _agree(self, refusal: str = "", kind: _Kind = "bare") -> Generator[_Kind, None, None]:
        """Follow one plan after the other, as the first rank says, until one is final.

        Ranks that have the same layers follow the same rows, and no rank drops anything before all
        have tried it: to run again may take collectives. A ``refusal`` ends the search on all.
        """
        try:
            ranks = Ranks()
            self._is_alone, self._speaks = ranks.is_alone, ranks.answers
            said: dict[str, Any] = {"refusal": refusal}
            if not refusal:
                is_first = ranks.is_first_of(self._stage)
                said = self._words(to_plain(self._actions) if is_first else None)
            while True:
                found: str | None = None
                for found in ranks.ask(json.dumps(said), self._answers):
                    if found is None:
                        yield kind
                phase, text, plans = json.loads(found or '["", "", {}]')
                if phase == "refused":
                    self._stop(text, ADVICE, keeps_open=bool(refusal))
                    return
                if self._stage not in plans:
                    self._stop("no plan came that the ranks have agreed on", "")
                    return
                plan, said = plan_of(plans[self._stage]), {"stage": self._stage}
                if phase == "final":
                    own = [dict(plan_of(one).actions) for one in plans.values()]
                    layers = ChainMap(*own)
                    if len(layers) < sum(map(len, own)):  # numbers count within each stage
                        layers = ChainMap(dict(plan.actions))
                    rows = Plan(layers, 0, 0.0, 0, plan.min_tokens).rows()
                    self._finish(plan, text, rows)
                    return
                yield from self._look_at(phase, plan, said)
                if self.is_converged:
                    return
                if plan.min_tokens and not self._has_lengths:
                    self._answers = RowAnswers(self._policy)
                    said = self._words(to_plain(self._actions))
                said["target_bytes"] = self._target_bytes
        except dist.DistError as error:
            self._stop(f"the job's store can't be asked what other ranks do ({error})", "")

    def _words(self, actions: list[Any] | None) -> dict[str, Any]:
        """Return what this rank has, by which the first makes plans."""
        memory = self.manager.backend.memory()
        is_of_one = self._is_alone and self._num_inflight <= 1 and not self._is_tight
        elapsed_us = self.manager.backend.sync_elapsed_us
        forwards = [
            TimedStep(elapsed_us(x, y) / len(tokens), size / len(tokens), has_rows)
            for x, y, size, tokens, has_rows in self._steps
            if not has_rows
        ]
        self._growth = growth_of(forwards)
        has = {
            "num_inflight": self._num_inflight,
            "bare_bytes": self._bare_bytes,
            "reserved_bytes": memory.reserved_bytes or None,
            "target_bytes": self._target_bytes,
            # In a pipeline, and among ranks, what one forward needs isn't the peak of a step.
            "tokens": self._tokens if is_of_one and self._has_lengths else [],
            "saved_bytes": self._saved_bytes,
            "growth": self._growth,
        }
        own = {"stage": self._stage, "actions": actions, "link_bytes": self._link_bytes}
        return {**own, "bare_us": self._bare_us(forwards), "has": has}

    def _look_at(
        self, phase: str, plan: Plan, said: dict[str, Any]
    ) -> Generator[_Kind, None, None]:
        """Try a plan, or measure it; add what that has shown to what is said."""
        manager = self.manager
        if phase == "trying":
            yield from self._prepare(plan)
            measured = int(_MEASURED_SHARE * max(self._tokens))
            self._follow(plan._replace(min_tokens=min(plan.min_tokens, measured)))
            if self.is_converged:
                return
            yield "trying"
            if manager.num_out_of_memory > self._num_ooms:  # there was no room to try
                self._num_ooms, self._is_tight = manager.num_out_of_memory, True
            said["refused"] = self._newly_refused(plan)
            self._num_rounds = 0
            return
        if not self._num_rounds:
            if self._target_bytes is not None:
                manager.backend.trim_device()
            yield "warming"  # the device's memory is had anew, and budgets are learned
            self._steps = [one for one in self._steps if not one.has_rows]
        is_short = self._is_alone or self._target_bytes is not None  # else asking takes as long
        num_steps = _NUM_IN_A_ROUND if is_short else 2 * _NUM_IN_A_ROUND
        number, num_passed = self._num_rounds * num_steps, 0
        while number < (self._num_rounds + 1) * num_steps:
            # As the Thue-Morse sequence goes: each second or fourth step may have an optimizer's.
            has_rows = self._target_bytes is not None or number.bit_count() % 2
            yield "rows" if has_rows else "bare"
            if self._rows_share(self._steps[-1]):
                number += 1
            elif num_passed < _MOST_PASSED * num_steps:
                num_passed += 1
            else:  # so seldom are they: plans are for all
                self._has_lengths = False
                return
        self._num_rounds += 1
        busy = busy_share(self._tokens, plan.min_tokens, self._growth)
        said["slowdown"], said["num_steps"] = self._slowdown(busy), num_steps
        is_trimmed = self._target_bytes is not None  # to have it anew takes a step long
        said["reserved_bytes"] = manager.backend.memory().reserved_bytes if is_trimmed else 0

    def _prepare(self, plan: Plan) -> Generator[_Kind, None, None]:
        """Let memory be touched that the plan will pin; wait for it, but not for other ranks."""
        pool, backend = self.manager.host_pool, self.manager.backend
        for number in range(_MOST_UNPREPARED if self._is_alone else _NUM_UNPREPARED):
            size = max(self._sizes) / self._watched_size  # a longer forward may have come meanwhile
            wanted_bytes = int(_SPARE_SHARE * size * self._num_inflight * plan.copied_bytes)
            missing_bytes = min(wanted_bytes, pool.cap_bytes) - pool.stats.slab_bytes_total
            is_of_use = size * self._largest_bytes <= pool.slab_bytes and not self._is_tight
            if (missing_bytes <= 0 or not is_of_use) and (self._is_alone or not number):
                return
            if backend.is_host_prepared:
                pool.prepare(missing_bytes)
                if self._is_alone and backend.is_host_prepared:  # there is no thread that does it
                    return
            yield "bare"
            pool.pin_prepared()

    @property
    def _target_bytes(self) -> int | None:
        """What is to be reserved at most, None where that doesn't matter."""
        if isinstance(self._policy, MemoryTargetConfig):
            return self._policy.target_of(self.manager.learner.pp_rank or 0)
        capacity_bytes = self.manager.backend.capacity_bytes() if self._is_tight else None
        return None if capacity_bytes is None else int(_MOST_SHARE * capacity_bytes)

    def _slowdown(self, busy: float) -> Slowdown | None:
        """Return by how much rows make all steps longer, of which they are in so large a share."""
        elapsed_us, times = self.manager.backend.sync_elapsed_us, list[TimedStep]()
        for step in self._steps[:-2]:  # so that the host need not wait
            share = self._rows_share(step)
            if share > 0:
                us = elapsed_us(step.began, step.ended)
                times.append(TimedStep(us, step.size, share * step.has_rows))
        found = slowdown_of(times)
        return found and Slowdown(*(busy * percent for percent in found))

    def _rows_share(self, step: _Step) -> float:
        """Return how much of a step is in forwards in which the plan is followed."""
        assert self.plan is not None
        return busy_share(step.tokens, self.plan.min_tokens, self._growth)

    def _bare_us(self, forwards: Sequence[TimedStep]) -> float:
        """Return what a microbatch as large as that which was watched takes without rows."""
        if not forwards:
            return max(1.0, 3 * self._forward_us)
        own = (x.us * (self._watched_size / x.size) ** self._growth for x in forwards)
        return median(own) * len(self._trained)

    def _newly_refused(self, plan: Plan) -> list[Part]:
        """Return what of the plan that is followed has no effect."""
        manager, rows, refused = self.manager, plan.rows(), list[Part]()
        step = manager.last_step
        has_copied = step.offloaded_bytes or step.num_cancelled_offloads  # as backward was near
        if manager.refused_rows or (plan.copied_bytes and not has_copied):
            refused += [(row.site, row.offload) for row in rows if row.offload]
        sites, unproven = self._sites(), set[str]()
        for number, model in self._models.items():
            names = (f"{number}.{path}" for path in unproven_sites(named_modules(model)))
            unproven |= {sites[path].name for path in names if path in sites.keys() & self._saving}
        if not self._is_tight:
            refused += [(row.site, "recompute") for row in rows if row.site in unproven]
        return refused

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

    # The end

    def _finish(self, plan: Plan, text: str, rows: Sequence[RowConfig]) -> None:
        """Follow a plan to the end; ``rows`` are those of all stages together."""
        manager = self.manager
        if not rows:
            is_costly = isinstance(self._policy, AutoConfig) and text != NOTHING
            outside = (1 - self._layer_share) * self._saved_bytes
            if outside > _LEAST_SHARE * self._saved_bytes:
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
        manager.host_pool.prepare(0)
        manager.backend.trim_device()  # what only other plans, and looking, needed
        self._say(text, rows)

    def _say(self, text: str, rows_of_all: Sequence[RowConfig] | None = None) -> None:
        """Say which rows are followed, and why."""
        assert self.plan is not None
        own = self.plan.rows() if rows_of_all is None else rows_of_all
        rows = ", ".join(map(str, (*self._besides, *own)))
        scale = self._num_inflight * self._size_of_bare / self._watched_size
        sizes = scale * self.plan.freed_bytes, scale * self._saved_bytes
        freed, saved = (format_bytes(int(size), 2) for size in sizes)  # what is needed soon is kept
        pinned = format_bytes(self.manager.host_pool.stats.slab_bytes_total, 2)
        self.said = f"rows: [{rows}] free up to {freed} of {saved} saved, {pinned} pinned; {text}"
        if self._speaks:
            _logger.warning("megatron-offload: %s: %s", self._policy.kind, self.said)

    def _stop(self, why: str, advice: str, *, keeps_open: bool = False) -> None:
        """Let nothing move from here on but what the device has no room for; say why, once."""
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
        self.said = f"megatron-offload: {what}: {why}{advice}"
        if self._speaks:
            _logger.warning("%s", self.said)

    # Afterwards

    @property
    def _own(self) -> Stage | None:
        """The plans of this process, if it decides for itself."""
        choice = self._answers.choice if self._is_alone else None
        return None if choice is None else choice.stages.get(self._stage)

    def _layer_begins(self, size: float, tokens: float) -> None:
        if not self.is_converged:
            self._own_tokens.append(min(tokens, size))
        self._look_size = self._look_size or size  # of several forwards in a step the first
        if self.is_converged and size > self._largest and is_recording():
            self._largest = size
            self._make_room(size)
            # What frees nothing, or takes too long, in short steps may pay in such.
            is_longer = self._is_alone and size >= _MUCH_LONGER * self._size_of_bare
            self._is_outgrown = is_longer and not self.plan and self._num_begun < _MOST_SEARCHES

    def _see_memory(self) -> None:
        """Free more, if the step that is over had too little memory, or took more than it may."""
        clock, stage, is_short, over_bytes = self._clock, self._own, False, 0
        if clock is None or stage is None:
            return
        is_pending = not clock.is_over()
        if is_pending:  # else it isn't worth asking the allocator with every step
            num_ooms = self.manager.num_out_of_memory
            is_short, self._num_ooms = num_ooms > self._num_ooms, num_ooms
        if isinstance(self._policy, MemoryTargetConfig):
            over_bytes = (clock.ended or (None, 0))[1] - (self._target_bytes or 0)
            if over_bytes > 0:  # it may be what something else has left
                self.manager.backend.trim_device()
        self._num_over = self._num_over + 1 if over_bytes > 0 else 0
        clock.restart()
        if is_short or self._num_over > 1:
            self._go_deeper(stage)
        elif is_pending and self.plan and self.plan.min_tokens:  # no longest has the peak alone
            self._deepen(stage, stage.place, "forwards come before others' backwards")

    def _make_room(self, size: float) -> None:
        """Follow a plan under which a forward fits that is larger than all before; it has begun."""
        manager, groups, stage = self.manager, self._groups(), self._own
        capacity_bytes, memory = manager.backend.capacity_bytes(), manager.backend.memory()
        if capacity_bytes is None or groups is None or stage is None:
            return
        room_bytes = _MOST_FILLED * capacity_bytes - memory.allocated_bytes
        saved_bytes = (self._bare_bytes - memory.allocated_bytes) * size / self._size_of_bare
        share, first, place = size / self._watched_size, min(self._actions), stage.place
        for place in range(stage.place, len(stage.plans)):
            plan = stage.plans[place]
            late_bytes = plan.actions[first].freed_bytes if place > stage.place else 0
            if saved_bytes - share * (plan.freed_bytes - late_bytes) <= room_bytes:
                break  # the first layer has begun without
        if place > stage.place:
            self._deepen(stage, place, "a forward is larger than all before")
            groups.end()  # it may have begun without any rows
            groups.begin()

    def _go_deeper(self, stage: Stage) -> None:
        """Follow the next plan that frees clearly more, if there is one."""
        plans, place = stage.plans, stage.place
        least_bytes = plans[place].freed_bytes + plans[-1].freed_bytes // 8
        places = (p for p in range(place + 1, len(plans)) if plans[p].freed_bytes >= least_bytes)
        deeper = next(places, len(plans) - 1)
        if deeper > place or (self.plan and self.plan.min_tokens):
            self._deepen(stage, deeper, "a step has had too little memory")

    def _deepen(self, stage: Stage, place: int, why: str) -> None:
        self._is_tight = True  # to try a site takes what there isn't
        stage.place = place
        self._follow(stage.plans[place]._replace(min_tokens=0))
        self._say(why)


def measure_link(manager: PipelineOffloadManager) -> float:
    """Return what copies get to the host, in GB/s; 0 where there are none."""
    num_bytes = min(_PROBE_BYTES, int(manager.config.host_slab_bytes))
    try:
        return median_rates([Link(manager.backend, num_bytes)], "d2h")[0][0]
    except BandwidthError:
        return 0.0

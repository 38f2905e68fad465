"""The measured search where a model is given: the rows that free most for what they may cost.

docs/rows.md says in which steps. Exactness depends on nothing here.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import ref

import torch.distributed as dist
from torch import nn

from megatron_offload.autotune.agree import Ranks, is_alone
from megatron_offload.autotune.layers import LayerWatch, Site, SiteTimes, sites_of_layers
from megatron_offload.autotune.loop import ADVICE, NO_CLOCK, measure_link
from megatron_offload.autotune.model_steps import ModelSteps
from megatron_offload.autotune.slowdown import Slowdown, TimedStep, slowdown_of
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.row_config import RowConfig, ranges
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.hooks import is_recording
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.module_hooks import named_modules
from megatron_offload.errors import ConfigError
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.model_map.watch import MayMove
from megatron_offload.planning.frontier import Part, Plan, frontier
from megatron_offload.recompute.sites import unproven_sites

_logger = logging.getLogger(__name__)

_Kind: TypeAlias = Literal["open", "watched", "timed", "bare", "trying", "warming", "rows"]
"""What a step is for: all is kept that the device has room for; the layers are watched; they are
timed; nothing stands in it; what is to be recomputed is tried, and kept; rows take their memory;
they are measured."""

_NOTHING = (
    "nothing of what its layers save can be freed: smaller tensors than 1 MiB aren't offloaded, "
    "and layers that aren't of transformers or Megatron, are given a cache or have hooks aren't "
    "recomputed unless 'recompute' or 'rows' name them (docs/rows.md)"
)

Look = TypeVar("Look", LayerWatch, SiteTimes)

_NUM_BARE = 6
_MOST_MEASURED = 32
_MOST_DOUBT = 10.0  # in points: an interval that is wider says nothing
_AIM_SHARE = 0.9  # of what a step may cost, so that one that costs a little more is kept
_LEAST_GAIN_SHARE = 64  # plans that differ by less of the memory are the same
_MARGIN_SHARE = 96  # of a target, what is left to spare
_MOST_SHARE = 0.85  # of the device's memory, what plans may reserve where it has no room for all
_SPARE_SHARE = 1.25  # of what steps so far would pin, what is made ready
_MOST_FILLED = 0.95  # likewise in a forward that is larger than all before
_LEAST_SHARE = 0.25  # of what is saved: where layers save less, groups free more
_MOST_FITS = 6  # so many plans are followed until a target is kept


class RowSearch:
    """Finds rows by a model's own steps: what `PipelineOffloadManager.tuner` is where it is given.

    What a step is, `ModelSteps` says.

    Args:
        model: whose forwards these are.
        groups: between whose `begin` and `end` they lie.
        hook: sets the hooks of the rows that the manager follows.
        give_up: lets another look, where most of what is saved is in no layer, as where layers are
            checkpointed.

    Attributes:
        plan: what is followed; None where that is nothing.
        is_converged: whether no more steps are looked at.
        rests: whether none ever will be.
        said: how it has ended, in one line.
        tried: of each plan that was followed its place in the frontier, what it has cost, and what
            was reserved; on the rank that answers.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: AutomaticGroups,
        hook: Callable[[], object],
        give_up: Callable[[], object],
    ) -> None:
        self._model = ref(model)
        self.serve(groups, hook, give_up)
        self.begin(groups.manager)

    def serve(
        self, groups: AutomaticGroups, hook: Callable[[], object], give_up: Callable[[], object]
    ) -> None:
        """Go on with another context for the same model and manager."""
        self._groups, self._hook, self._give_up = ref(groups), hook, give_up

    def is_of(self, model: nn.Module) -> bool:
        """Whether it looks for rows of this model."""
        return self._model() is model

    def begin(self, manager: PipelineOffloadManager) -> None:
        """Begin anew, with what the manager's configuration leaves open."""
        self.plan: Plan | None = None
        self.said, self.rests = "", False
        self._manager = ref(manager)
        self._clock: ModelSteps | None = None
        self._steps: list[tuple[Any, Any, float, bool]] = []
        self._sizes: list[float] = []
        self._mark: Any = None
        self._kind: _Kind = "open"
        self._looks: LayerWatch | SiteTimes | None = None
        self._rows: tuple[RowConfig, ...] = ()
        """Followed until there is a plan."""
        self._place, self._plans, self._refused = 0, list[Plan](), set[Part]()
        self._is_alone, self._is_tight, self._largest = True, False, math.inf
        self._has_failed, self._num_ooms, self._num_over = False, 0, 0
        self.tried: list[tuple[int, Slowdown | None, int]] = []
        policy = manager.config.tuned_policy
        self.is_converged = policy is None
        if policy is not None:
            self._policy = policy
            self._search = self._find()
            manager.follow_rows(None)
            manager.learner.open()

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Do nothing at the end of a step: the next says that it is over."""

    @property
    def manager(self) -> PipelineOffloadManager:
        """The manager whose forwards these are."""
        found = self._manager()
        assert found is not None
        return found

    # Steps as they come

    def step_begins(self) -> None:
        """A forward is about to begin that no other surrounds."""
        manager, groups, clock = self.manager, self._groups(), self._clock
        self._takes_part = groups is not None and is_recording() and manager.do_offload
        if not self._takes_part or groups is None:
            return
        if self.is_converged:
            if self._plans and clock is not None and self._lacks_memory(clock):
                self._go_deeper()
            return
        backend = manager.backend
        if backend.is_capturing():
            self.is_converged = True  # the graph has what the last eager step had
            self.said = "a step was captured before a plan was found"
            return
        if clock is not None:
            if not clock.is_over():
                return
            ended = clock.ended[0] if clock.ended else None
            self._last = self._mark, self._now()[0] if ended is None else ended
            if clock.size:  # else it was no forward of this model
                self._num_forwards = clock.num_forwards
                self._sizes.append(clock.size / clock.num_forwards)
                if self._kind in ("bare", "rows"):
                    self._steps.append((*self._last, clock.size, self._kind == "rows"))
        groups.end_step_if_over()
        if clock is None or clock.size:
            self._take_next()
        if self._clock is not None:
            self._clock.restart()
        self._mark = self._now()[0]

    def _now(self) -> tuple[Any, int]:
        """Return a point of the compute stream, and what is reserved where that matters."""
        backend = self.manager.backend
        if backend.is_capturing():
            return None, 0
        is_asked = isinstance(self._policy, MemoryTargetConfig)
        reserved_bytes = (backend.reserved_bytes() or 0) if is_asked else 0
        mark = None if self.is_converged else backend.timestamp(backend.compute_stream())
        return mark, reserved_bytes

    def _take_next(self) -> None:
        """Go on with the search, and follow what the next step is for."""
        kind = next(self._search, None)
        if self.is_converged:
            return
        if kind is None:
            self._stop("an interrupt has ended the search", "")
            return
        self._kind = kind
        if kind != "open":
            has_rows = kind in ("trying", "warming", "rows")
            rows = self._plans[self._place].rows() if has_rows else self._rows
            on_trial = kind == "trying" and not self._is_tight
            self.manager.follow_rows(rows, is_own=True, on_trial=on_trial)

    def forward_begins(self) -> None:
        """It has begun."""
        if self._takes_part and self._clock is not None:
            self._clock.enter()
            if self._looks is not None and self._clock.num_forwards == 1:
                self._looks.begin()

    def forward_ends(self, *, has_failed: bool) -> None:
        """It is about to end."""
        if self._clock is not None:
            self._clock.leave()
        if self._looks is not None:
            self._looks.end()
        self._has_failed |= has_failed

    # The search; a step passes at each yield

    def _find(self) -> Generator[_Kind, None, None]:
        manager = self.manager
        backend, sites = manager.backend, self._sites()
        if not sites:
            self._stop("no repeated layers were found in this model that aren't compiled", ADVICE)
            return
        numbers = sorted({site.layer for site in sites.values()})
        self._clock = ModelSteps(next(iter(sites.values())).module, self._now)
        self._clock.layer_begins = self._layer_begins  # type: ignore[method-assign]
        self._num_ooms = manager.num_out_of_memory
        # A rerun may hold collectives, so that ranks don't decide on it by themselves.
        if all(site.may_rerun for site in sites.values()) and is_alone():
            manager.learner.follow_plan(None)
            self._recompute_layers(numbers, when_short=True)
        released_bytes = 0
        for _ in range(2):  # behind the first there is an optimizer's state
            yield "open"
            step = manager.last_step
            released_bytes += step.peak_released_bytes + step.recomputed_bytes
        if not backend.sync_elapsed_us(*self._last):
            self._stop(NO_CLOCK, "")
            self.rests = True
            return
        needed_bytes = backend.peak_allocated_bytes() + released_bytes
        capacity_bytes = backend.capacity_bytes() or 0
        self._is_tight = released_bytes > 0 and needed_bytes > _MOST_SHARE * capacity_bytes
        if self._is_tight and manager.rows is None:
            self._stop("layers can't be recomputed here unasked", ADVICE, keeps_open=True)
            return
        manager.learner.follow_plan(None)
        others = numbers[:-1] if self._is_tight else []
        if self._is_tight:  # one layer stands for all
            sites = {path: site for path, site in sites.items() if site.layer == numbers[-1]}
            self._recompute_layers(others)
        look = partial(LayerWatch, sites, self._may_move())
        watch = yield from self._look("watched", look)
        watched_size = self._watched_size = self._sizes[-1]
        times = yield from self._look("timed", partial(SiteTimes, sites, backend))
        times.scale = watched_size / self._sizes[-1]
        self._bare_bytes, self._forward_us = needed_bytes, times.forward_us
        gbps, _, _ = measure_link(manager, "d2h")
        self._actions, layer_share = watch.actions(times, gbps, others), watch.layer_share
        self._called = watch.called
        del look, sites, watch, times  # of the model nothing is held
        self._plan_anew()
        if layer_share < _LEAST_SHARE:
            self.is_converged, self.said = True, "most of what is saved is in no layer"
            self._give_up()
            return
        if len(self._plans) > 1:  # touch what will be pinned
            most = _SPARE_SHARE * max(self._sizes) / watched_size
            copied_bytes = self._plans[self._next_place()[0]].copied_bytes
            manager.host_pool.prepare(int(most * copied_bytes))
        if not self._is_tight:
            for _ in range(_NUM_BARE):
                yield "bare"
            self._bare_bytes = backend.peak_allocated_bytes()
        self._largest = self._size_of_bare = max(self._sizes)
        try:
            ranks = Ranks()
            self._is_alone = ranks.is_alone
            yield from self._agree(ranks)
        except dist.DistError as error:
            self._stop(f"the job's store can't be asked what other ranks do ({error})", "")

    def _sites(self) -> dict[str, Site]:
        model = self._model()
        return {} if model is None else sites_of_layers(model)

    def _may_move(self) -> MayMove:
        groups = self._groups()
        least_bytes = None if groups is None else groups.min_tensor_bytes
        return self.manager.new_chunk(0, least_bytes or 0).may_move

    def _recompute_layers(self, numbers: Sequence[int], *, when_short: bool = False) -> None:
        rows = (RowConfig(site="layer", layers=ranges(numbers), recompute=True),)
        self._rows = () if when_short else rows
        self.manager.follow_rows(rows, is_own=True, when_short=when_short)
        self._hook()

    def _look(self, kind: _Kind, make: Callable[[], Look]) -> Generator[_Kind, None, Look]:
        """Let forwards pass until one comes to its end."""
        while True:
            look = make()
            self._looks, self._has_failed = look, False
            yield kind
            self._looks = None
            if not self._has_failed:
                return look

    def _agree(self, ranks: Ranks) -> Generator[_Kind, None, None]:
        """Follow one plan after the other, as the first rank says, until one is final.

        No rank drops anything before all have tried it: to run again may take collectives.
        """
        manager, found = self.manager, None
        said: list[Any] = []
        while True:
            for found in ranks.ask(json.dumps([self._signature(), *said]), self._answer):
                if found is None:
                    yield "bare"
            if not found:
                self._stop("no plan came that the ranks have agreed on", "")
                return
            signature, refused, place, phase, text = json.loads(found)
            if signature != self._signature():
                self._stop("the ranks' models differ", "")
                return
            self._refuse(refused)
            if phase == "final":
                self._finish(place, text)
                return
            measured, reserved_bytes, newly_refused = None, 0, list[Part]()
            if phase == "trying":
                self._follow(place)
                if self.is_converged:
                    return
                yield "trying"
                if manager.num_out_of_memory > self._num_ooms:  # there was no room to try
                    self._num_ooms, self._is_tight = manager.num_out_of_memory, True
                newly_refused = self._newly_refused()
            else:
                manager.backend.trim_device()
                yield "warming"  # the device's memory is had anew
                yield from self._measure()
                measured = self._slowdown()
                reserved_bytes = manager.backend.reserved_bytes() or 0
            said = [phase, measured, reserved_bytes, newly_refused]

    def _measure(self) -> Generator[_Kind, None, None]:
        """Take steps with rows and, in between, without."""
        self._steps = [one for one in self._steps if not one[3]]
        if self._target_bytes is not None:
            for _ in range(8):
                yield "rows"
            return
        assert isinstance(self._policy, AutoConfig)
        limit = self._policy.most_slowdown_percent
        for number in range(_MOST_MEASURED):
            # As the Thue-Morse sequence goes: each second or fourth step may have an optimizer's.
            yield "rows" if number.bit_count() % 2 else "bare"
            if number % 8 == 7:
                found = self._slowdown()
                is_clear = found is not None and (found.low > limit or found.high < limit)
                if found is not None and is_clear and found.high - found.low < 2.0:
                    return

    @property
    def _target_bytes(self) -> int | None:
        """What is to be reserved at most, None where that doesn't matter."""
        if isinstance(self._policy, MemoryTargetConfig):
            return self._policy.targets(1)[0]
        capacity_bytes = self.manager.backend.capacity_bytes() if self._is_tight else None
        return None if capacity_bytes is None else int(_MOST_SHARE * capacity_bytes)

    def _slowdown(self) -> Slowdown | None:
        elapsed_us = self.manager.backend.sync_elapsed_us
        done = self._steps[:-2]  # so that the host need not wait
        return slowdown_of([TimedStep(elapsed_us(x, y), size, on) for x, y, size, on in done])

    def _bare_us(self) -> float:
        """Return what a forward and its backward take without rows."""
        elapsed_us = self.manager.backend.sync_elapsed_us
        times = sorted(elapsed_us(x, y) for x, y, _, has_rows in self._steps if not has_rows)
        return times[len(times) // 2] / self._num_forwards if times else 3 * self._forward_us

    # Plans

    def _plan_anew(self) -> None:
        """Make the frontier of all that hasn't been refused."""
        self._plans = frontier(
            {
                number: [one for one in actions if self._refused.isdisjoint(one.parts)]
                for number, actions in self._actions.items()
            }
        )

    def _refuse(self, parts: Sequence[Sequence[Any]]) -> None:
        """Plan without these from here on."""
        if parts:
            self._refused |= {(site, what) for site, what in parts}
            self._plan_anew()
            self._place, self.tried = 0, []

    def _signature(self) -> str:
        """Return what other ranks have too, if their models are alike."""
        return str({number: len(actions) for number, actions in self._actions.items()})

    def _newly_refused(self) -> list[Part]:
        """Return what of the plan that is followed has no effect."""
        manager, model = self.manager, self._model()
        if model is None:
            return []
        rows = self._plans[self._place].rows()
        refused: list[Part] = []
        if manager.refused_rows:
            refused += [(row.site, row.offload) for row in rows if row.offload]
        sites, modules = self._sites(), named_modules(model)
        called = (path for path in unproven_sites(modules) if path in self._called)
        unproven = {sites[path].name for path in called if path in sites}
        if not self._is_tight:
            refused += [(row.site, "recompute") for row in rows if row.site in unproven]
        return refused

    def _follow(self, place: int) -> None:
        """Set the hooks of a plan."""
        manager = self.manager
        self._place, self.plan = place, self._plans[place]
        manager.follow_rows(self.plan.rows(), is_own=True)
        try:
            self._hook()
        except ConfigError as error:
            self._plans = []
            self._stop(f"the model has changed: {error}", "")
        else:
            manager.backend.trim_device()  # what is reserved is seen from here on

    # What the rank that answers does

    def _answer(self, texts: Sequence[str]) -> str:
        everyone = [json.loads(text) for text in texts]
        signature, refused, place, phase = everyone[0][0], list[Part](), self._place, "measuring"
        everyone = [one for one in everyone if len(one) > 1]
        text = ""
        if everyone and everyone[0][1] == "trying":
            refused = [(site, what) for one in everyone for site, what in one[4]]
            self._refuse(refused)
            if not (refused or self._policy.measured_plans):
                phase, text = "final", "as predicted"
        elif everyone:
            place = self._place
            worst = max((Slowdown(*one[2]) for one in everyone if one[2]), default=None)
            self.tried.append((place, worst, max(one[3] for one in everyone)))
        if refused or not everyone or everyone[0][1] == "measuring":
            place, is_final, text = 0, True, _NOTHING
            if len(self._plans) > 1:
                place, is_final, text = self._next_place()
            phase = "final" if is_final else "trying"
        return json.dumps([signature, refused, place, phase, text])

    def _next_place(self) -> tuple[int, bool, str]:
        target_bytes = self._target_bytes
        return self._next() if target_bytes is None else self._next_within(target_bytes)

    def _next(self) -> tuple[int, bool, str]:
        """Return the plan to follow for `AutoConfig`, whether it is final, and why in words."""
        assert isinstance(self._policy, AutoConfig)
        limit, plans, bare_us = self._policy.most_slowdown_percent, self._plans, self._bare_us()
        points = {0: (0.0, 0.0)}
        for place, found, _ in self.tried:
            is_known = found is not None and found.high - found.low <= max(_MOST_DOUBT, 4 * limit)
            points[place] = plans[place].us, found.percent if found and is_known else math.inf
        quick = max(place for place, (_, percent) in points.items() if percent <= limit)
        slow = min(
            (p for p, (_, percent) in points.items() if percent > limit and p > quick),
            default=len(plans),
        )
        if len(self.tried) < max(1, self._policy.measured_plans):
            aim = _AIM_SHARE * limit
            us, percent = points[quick]
            if slow < len(plans):
                slow_us, slow_percent = points[slow]
                most_us = us + (slow_us - us) * max(0.0, aim - percent) / (slow_percent - percent)
            elif not self.tried:
                most_us = aim / 100 * bare_us
            else:  # as much again at most as it seems to take
                most_us = us * min(4.0, aim / max(percent, 0.05)) if us else aim / 100 * bare_us
            least_bytes = plans[quick].freed_bytes + self._bare_bytes // _LEAST_GAIN_SHARE
            good = [
                p
                for p in range(quick + 1, slow)
                if plans[p].us <= most_us and plans[p].freed_bytes >= least_bytes
            ]
            if good and max(good) not in points:
                return max(good), False, ""
        found = next((x for place, x, _ in self.tried if place == quick), None)
        if found is not None:
            return quick, True, f"a step takes {found}, at most {limit:g} % is wanted"
        percent = 100 * min(plan.us for plan in plans[1:]) / bare_us
        least = f"the least that frees anything is predicted to cost {percent:.2g} %"
        if self.tried:
            known = [x for p, x, _ in self.tried if x and points[p][1] < math.inf]
            least = f"steps differ too much to see what rows cost ({self.tried[-1][1]})"
            if known:
                least = f"the least costly plan that was tried takes {min(known)}"
        return 0, True, f"{least}, and at most {limit:g} % is wanted"

    def _next_within(self, target_bytes: int) -> tuple[int, bool, str]:
        """The same for a target."""
        wanted_bytes = target_bytes - target_bytes // _MARGIN_SHARE
        sizes = {place: size for place, _, size in self.tried}
        good = min((place for place, size in sizes.items() if size <= target_bytes), default=None)
        lowest = 1 + max(
            (place for place, size in sizes.items() if size > target_bytes), default=-1
        )
        highest = (len(self._plans) if good is None else good) - 1
        if self.tried:
            last, _, reserved_bytes = self.tried[-1]
            freed_bytes = self._plans[last].freed_bytes + reserved_bytes - wanted_bytes
            is_near = good is not None and sizes[good] >= target_bytes - target_bytes // 24
            if is_near or lowest > highest or len(self.tried) >= _MOST_FITS:
                place = last if good is None else good
                found = next(x for p, x, _ in self.tried if p == place)
                cost = f"; a step takes {found}" if found else ""
                size, target = (format_bytes(x, 2) for x in (sizes[place], target_bytes))
                return place, True, f"{size} are reserved, at most {target} is wanted{cost}"
        elif self.manager.backend.memory() is None:
            return 0, True, "what this device has in use isn't known, so no target can be kept"
        else:
            without_bytes = max(self.manager.backend.reserved_bytes() or 0, self._bare_bytes)
            freed_bytes = without_bytes - wanted_bytes
            if freed_bytes <= 0:
                return 0, True, "all fits"
        places = (p for p, plan in enumerate(self._plans) if plan.freed_bytes >= freed_bytes)
        return min(max(lowest, next(places, highest)), highest), False, ""

    # The end

    def _finish(self, place: int, text: str = "") -> None:
        manager = self.manager
        if place == 0:
            is_costly = isinstance(self._policy, AutoConfig) and len(self._plans) > 1
            self._stop(text, ADVICE if is_costly else "")
            return
        self._follow(place)
        if self.plan is None or self.is_converged:
            return
        self.is_converged = True
        manager.host_pool.prepare(0)
        self._say(text)

    def _say(self, text: str) -> None:
        """Say which rows are followed, and why."""
        assert self.plan is not None
        rows = ", ".join(map(str, self.plan.rows()))
        freed_bytes = self.plan.freed_bytes * self._size_of_bare / self._watched_size
        freed = format_bytes(int(freed_bytes), 2)  # what is needed soon is kept all the same
        self.said = f"rows: [{rows}] free up to {freed}; {text}"
        if rank_in() == 0:
            _logger.warning("megatron-offload: %s: %s", self._policy.kind, self.said)

    def _stop(self, why: str, advice: str, *, keeps_open: bool = False) -> None:
        """Let nothing move from here on but what the device has no room for; say why, once."""
        manager = self.manager
        self.is_converged, self.plan = True, None
        what = "only what the device has no room for is offloaded"
        if not keeps_open:
            what = "nothing is offloaded or recomputed"
            manager.learner.follow_plan(None)
            manager.follow_rows((), is_own=True)
            self._hook()
            manager.host_pool.prepare(0)
            manager.trim()  # no step comes that would unpin anything
        self.said = f"megatron-offload: {what}: {why}{advice}"
        if rank_in() == 0:
            _logger.warning("%s", self.said)

    # Afterwards

    def _layer_begins(self, size: float) -> None:
        if self.is_converged and size > self._largest and is_recording():
            self._largest = size
            self._make_room(size)

    def _lacks_memory(self, clock: ModelSteps) -> bool:
        """Whether the step that is over had too little memory, or took more than its target."""
        is_short, over_bytes = False, 0
        if not clock.is_over():  # else it isn't worth asking the allocator with every step
            num_ooms = self.manager.num_out_of_memory
            is_short, self._num_ooms = num_ooms > self._num_ooms, num_ooms
        if isinstance(self._policy, MemoryTargetConfig):
            over_bytes = (clock.ended or (None, 0))[1] - self._policy.targets(1)[0]
            if over_bytes > 0:  # it may be what something else has left
                self.manager.backend.trim_device()
        self._num_over = self._num_over + 1 if over_bytes > 0 else 0
        clock.restart()
        return is_short or self._num_over > 1

    def _make_room(self, size: float) -> None:
        """Follow a plan under which a forward fits that is larger than all before; it has begun."""
        manager, groups = self.manager, self._groups()
        capacity_bytes, memory = manager.backend.capacity_bytes(), manager.backend.memory()
        is_known = capacity_bytes is not None and memory is not None and self._actions
        if not is_known or groups is None or not self._is_alone:
            return
        assert capacity_bytes is not None
        assert memory is not None
        room_bytes = _MOST_FILLED * capacity_bytes - memory.allocated_bytes
        saved_bytes = (self._bare_bytes - memory.allocated_bytes) * size / self._size_of_bare
        share, first = size / self._watched_size, min(self._actions)
        place = self._place
        for place in range(self._place, len(self._plans)):
            plan = self._plans[place]
            late_bytes = plan.actions[first].freed_bytes if place > self._place else 0
            if saved_bytes - share * (plan.freed_bytes - late_bytes) <= room_bytes:
                break  # the first layer has begun without
        if place > self._place:
            self._is_tight = True
            self._follow(place)
            groups.end()  # it may have begun without any rows
            groups.begin()
            self._say("a forward is larger than all before")

    def _go_deeper(self) -> None:
        """Follow the next plan that frees clearly more, if there is one and no other rank minds."""
        if not self._is_alone:
            return  # a rerun may hold collectives
        plans, place = self._plans, self._place
        least_bytes = plans[place].freed_bytes + plans[-1].freed_bytes // 8
        places = (p for p in range(place + 1, len(plans)) if plans[p].freed_bytes >= least_bytes)
        deeper = next(places, len(plans) - 1)
        if deeper > place:
            self._is_tight = True  # to try a site takes what there isn't
            self._follow(deeper)
            self._say("a step has had too little memory")

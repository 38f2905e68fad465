"""The measured loop: a run finds by its own steps what to keep, and what to move.

    first three steps   everything moves or is made again; memory is pinned, and taken anew
    the fourth, fifth   are profiled and measured
    then, per plan      one takes its memory anew, the next is measured; three plans at most

Before plans for replays of a graph two steps move nothing, where the device can hold that, and the
second is profiled too; a third takes its memory anew. What replays cost no step of the loop shows.

It begins from the side that fits and keeps where steps wait. What a plan costs is told by what its
own steps have lost; only where the device waits for the host some are taken without offload, and
the quickest of three counts. Only steps that are looked at are timed. Exactness depends on nothing
here: what goes wrong costs a warning, and everything goes on moving.

A rank that waits for a copy, or makes something again, often loses what it would have waited for
another rank anyway. So what each pass has lost is put into the simulated step without offload: as
much longer as that becomes, the plan has made the step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from megatron_offload.autotune.agree import Ranks, stand_aside
from megatron_offload.autotune.search import MOST_PLANNING_S, PlanSearch, can_hold, search_of
from megatron_offload.config import OffloadConfig
from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import StepProfile
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.manager import CAPTURED_TOO_EARLY, PipelineOffloadManager
from megatron_offload.errors import OffloadError, StateError
from megatron_offload.observe.measure import MeasuredStep, StepTimer
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning import profiled_job
from megatron_offload.planning.choice import SLOW_LINK_SHARE, Chooser
from megatron_offload.planning.files import PLANS, PROFILES
from megatron_offload.planning.job import NO_OFFLOAD, Job, RankSettings
from megatron_offload.planning.plan import MeasuredCost, OffloadPlan
from megatron_offload.planning.policy import ModulesPolicy
from megatron_offload.planning.replay import ending_after
from megatron_offload.planning.schedule import PassKind
from megatron_offload.planning.simulate import simulate

_MOST_PROGRAMS = 3  # so often it begins anew, where a program has changed for good

_SPARE_SHARE = 16  # of the device's memory, what plans leave to spare

_MOST_IDLE_SHARE = 0.25
"""Where the device waits for the host at more boundaries, the host is taken to be the limit."""

_COPIES_GBPS = 10_000.0  # `Job.copies_gbps` where it isn't measured

_logger = logging.getLogger(__name__)

_NOT_HEARD = "another rank has nothing that moves, or was not heard within %g s"

_numbers = itertools.count()  # of this process's loops: ranks that run one program count alike


def tune(manager: PipelineOffloadManager, *, timeout_s: float = 60.0) -> MeasuredLoop:
    """Let a manager's steps find what to move, where its configuration leaves that open.

    That is with policy ``auto`` or ``memory_target``, and where nothing is said of what stays. A
    manager that has a loop keeps it, and a loop follows its manager's configuration. A rank waits
    for the others of its job no longer than ``timeout_s``.
    """
    if not isinstance(manager.tuner, MeasuredLoop):
        manager.tuner = MeasuredLoop(timeout_s)
    return manager.tuner


class MeasuredLoop:
    """What `tune` gives a manager.

    Attributes:
        plan: what is followed, with what was measured of it; None while everything moves.
        is_settled: whether no more steps are looked at.
        said: how it has settled, in one line.
    """

    def __init__(self, timeout_s: float) -> None:
        self.plan: OffloadPlan | None = None
        self.is_settled = False
        self.said = ""
        self._timeout_s = timeout_s
        self._config: OffloadConfig | None = None
        self._steps: Generator[None, None, None] | None = None
        self._looking = contextlib.ExitStack()
        self._is_host_bound = self._is_aside = self._has_had_groups = False
        self._known: StepProfile | None = None
        self._followed: OffloadPlan | None = None

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at the step that has ended, and prepare for the next."""
        if manager.config is not self._config:
            with contextlib.suppress(StateError):
                self._looking.close()
            self._config = manager.config
            self._manager = weakref.proxy(manager)  # which holds this: no circle
            self.plan = self._followed = self._known = self._steps = None
            self.said, self._is_host_bound = "", False
            policy = manager.config.tuned_policy
            self.is_settled = policy is None
            if policy is not None:
                self._policy = policy
                self._steps = self._take_steps()
        if manager.last_step.is_captured:
            if manager.last_step.num_groups and not self.is_settled:
                raise StateError(CAPTURED_TOO_EARLY)
            if self._is_host_bound and not manager.config.whole_step_graph:
                self._is_host_bound = False  # it is said once
                _logger.warning(
                    "a step was captured with a plan of eager steps, whose limit was the host; a "
                    "replay has none: set whole_step_graph for plans of replays"
                )
            return
        if self._steps is not None:
            self._has_had_groups |= manager.last_step.num_groups > 0
            if self._has_had_groups is self._is_aside:  # others would wait for a rank without any
                self._is_aside = not self._has_had_groups
                stand_aside(1 if self._is_aside else -1)
            self._has_stayed = manager.is_staying
            next(self._steps, None)

    # What is done behind each step; a step passes at each yield.

    def _take_steps(self) -> Generator[None, None, None]:
        for _ in range(_MOST_PROGRAMS):
            while not self._learner.is_steady:
                yield
            rules = self._learner.policy
            if self._manager.config.policy is None and rules != ModulesPolicy():
                self.is_settled = True  # the model's own settings say what stays
                return
            self.is_settled = False
            yield  # its memory was just trimmed
            profile = bare = None
            while profile is None:
                profile = yield from self._profiled()
            if not profile.step_us:
                self.is_settled = True
                if self._manager.config.policy is not None:
                    _logger.warning(
                        "policy %r plans by times, and this device has no clock, so everything "
                        "moves; the simulated one has one with simulated.host_time",
                        self._policy.kind,
                    )
                return
            if self._manager.config.whole_step_graph:
                bare = yield from self._profiled_bare(profile)
            yield from self._plan(profile, bare)
            while not self._is_other(profile):
                if self._is_led:
                    self.is_settled = True
                    return
                yield
            self._follow(None)
            _logger.warning("the program has changed: everything moves, until a step was profiled")

    def _profiled(self, *, stays: bool = False) -> Generator[None, None, StepProfile | None]:
        """Let a step pass that moves, or ``stays``; return what it has shown, or None."""
        is_replayed = self._manager.config.whole_step_graph
        profiling = profile_step(self._manager, holds_back=is_replayed)
        recorded = self._looking.enter_context(profiling)
        yield
        try:
            self._looking.close()
        except StateError:
            return None
        if self._has_stayed != stays:
            return None
        return self._learner.without_unlisted(recorded.profile)

    def _profiled_bare(self, moved: StepProfile) -> Generator[None, None, StepProfile | None]:
        """Let steps pass that move nothing, and return what the last has shown.

        None where the device can't hold such a step; as many pass all the same, for other ranks
        may hold theirs. None pass where nobody knows.
        """
        capacity_bytes = self._capacity_bytes
        if capacity_bytes is None:
            return None
        holds = can_hold(profiled_job.bare_peak_bytes(moved), capacity_bytes)
        staying = self._manager.staying("a step without offload is looked at")
        with staying if holds else contextlib.nullcontext():
            yield  # takes its memory anew
            bare = yield from self._profiled(stays=True)
        yield  # likewise
        return bare if bare is not None and bare.has_groups_of(moved) else None

    def _measured(self, profile: StepProfile) -> Generator[None, None, MeasuredStep | None]:
        """Let enough steps pass; return the quickest, None if one isn't like the profiled."""
        steps: list[MeasuredStep] = []
        while len(steps) < self._num_steps:
            timer = StepTimer(self._manager)
            with self._manager.observed_by(timer):
                yield
            if self._is_other(profile) or self._is_led:
                return None
            is_like = profile.has_groups_of(self._learner.profile or profile)
            if timer.has_ended and is_like and not self._has_stayed:
                steps.append(timer.read())
        quickest = min(steps, key=lambda step: step.step_us)
        return quickest._replace(reserved_bytes=steps[-1].reserved_bytes)

    def _plan(self, profile: StepProfile, bare: StepProfile | None) -> Generator[None, None, None]:
        """Agree on a plan, measure what it costs, and correct it, until one stays."""
        self._num_steps = 1
        first = yield from self._measured(profile)
        if first is None:
            return
        self._ranks = ranks = Ranks(str(next(_numbers)), self._timeout_s)
        shown, gbps = profile, None
        if bare is not None:
            shown = profiled_job.undisturbed(profile, bare)
            gbps = profiled_job.copies_gbps(profile, bare, first.copied_bytes)
        text, stage = PROFILES.to_json(shown), profile.run.pp_rank
        said = [stage, first, gbps, text if ranks.is_first_of(str(stage)) else ""]
        answer = ranks.ask(json.dumps(said), self._first_answer)
        if answer is None:
            _logger.warning("%s; this one plans alone", _NOT_HEARD % self._timeout_s)
            answer = ranks.ask(json.dumps([stage, first, gbps, text]), self._first_answer)
        while answer is not None and not self._take(answer):
            yield  # the first behind a change takes its memory anew
            step = yield from self._measured(profile)
            if step is None:
                return
            answer = ranks.ask(json.dumps([stage, step]), self._next_answer)
            if answer is None:
                _logger.warning("%s; this one keeps its plan", _NOT_HEARD % self._timeout_s)
                self._settle("the plan that was last agreed on stays")

    # What the rank that answers does.

    def _first_answer(self, texts: Sequence[str]) -> str:
        """Plan by the profiles of all ranks; each pipeline rank's comes once, others are empty."""
        *_, told_gbps, found = zip(*map(json.loads, texts), strict=True)
        profiles = [PROFILES.parse(text, "the profile of a rank") for text in found if text]
        if self._ranks.is_alone:
            profiles = [replace(one, run=one.run._replace(pp_rank=0)) for one in profiles]
        size = 1 + max(profile.run.pp_rank for profile in profiles)
        if len(profiles) < size:
            return ""  # a rank without groups has nothing to tell of
        if profiled_job.slowest_link(profiles) is None:
            said = "nothing comes back from the host, so that nothing is planned"
            return json.dumps([None, 1, True, True, said])
        profiles = [replace(one, run=one.run._replace(pp_size=size)) for one in profiles]
        profiles.sort(key=lambda profile: profile.run.pp_rank)
        try:
            with ending_after(MOST_PLANNING_S):
                self._search = self._search_by(profiles, [one for one in told_gbps if one])
            return self._next_answer(texts)
        except OffloadError as error:
            return json.dumps([None, 1, True, False, f"no plan can be made: {error}"])

    def _search_by(self, profiles: Sequence[StepProfile], told_gbps: Sequence[float]) -> PlanSearch:
        config, policy = self._manager.config, self._policy
        machine = profiled_job.slowest_link(profiles) or Machine()
        job = profiled_job.job_of(profiles, profiled_job.schedule_of(profiles), machine)
        gbps = min(told_gbps, default=_COPIES_GBPS)
        self._job = replace(job, joins=not config.whole_step_graph, copies_gbps=gbps)
        limits = RankSettings(
            max_inflight_bytes=config.max_inflight_bytes, prefetch_bytes=config.prefetch_bytes
        )
        is_measured = policy.kind == "auto" and policy.measured_plans > 0
        share = 1.0 if is_measured and not config.whole_step_graph else SLOW_LINK_SHARE
        chooser = Chooser(profiles, self._job, limits, link_share=share)
        search = search_of(chooser, policy, self._capacity_bytes)
        search.for_replays = config.whole_step_graph
        return search

    def _next_answer(self, texts: Sequence[str]) -> str:
        """Take what the step of a plan has shown, and correct it."""
        by_rank: dict[int, list[MeasuredStep]] = {}
        for stage, step, *_ in map(json.loads, texts):
            by_rank.setdefault(0 if self._ranks.is_alone else stage, []).append(MeasuredStep(*step))
        reserved = [
            max((step.reserved_bytes or 0 for step in by_rank.get(rank, ())), default=0) or None
            for rank in range(len(self._job.static_bytes))
        ]
        cost, search = cost_of(self._job, by_rank), self._search
        idle_share = max(step.idle_share for steps in by_rank.values() for step in steps)
        _logger.debug(
            "%s is lost, %s bytes are reserved, %.2f of boundaries wait for the host",
            *(cost, reserved, idle_share),
        )
        is_host_bound = idle_share > _MOST_IDLE_SHARE
        self._is_host_bound |= is_host_bound
        search.note(cost, reserved, is_host_bound=is_host_bound)
        text = PLANS.to_json(replace(search.plan, bandwidths=profiled_job.FROM_COPIES))
        return json.dumps([text, search.num_steps, search.is_settled, search.is_kept, search.said])

    def _take(self, answer: str) -> bool:
        """Follow the plan of an answer; return whether it stays."""
        text, self._num_steps, is_settled, is_kept, said = json.loads(answer)
        if text is not None:
            plan = PLANS.parse(text, "the answer")
            missing = 1 + (self._learner.pp_rank or 0) - plan.pp_size
            if missing > 0:  # it was made by this rank alone
                plan = replace(plan, ranks=plan.ranks * (1 + missing))
            self._follow(plan)
        if is_settled:
            self._settle(said, logging.INFO if is_kept else logging.WARNING)
        return bool(is_settled)

    def _follow(self, plan: OffloadPlan | None) -> None:
        before, self.plan = self.plan, plan
        if plan is None or before is None or not plan.is_like(before):
            self._followed = plan
            self._learner.follow_plan(plan, is_own=True)
            self._manager.backend.trim_device()  # what is reserved is seen from here on

    def _settle(self, said: str, level: int = logging.INFO) -> None:
        self.is_settled, self.said = True, said
        if self._learner.moves_nothing:
            self._manager.trim()  # no step comes that would unpin what the first have pinned
        else:
            self._manager.backend.trim_device()  # what only other plans, and looking, needed
        if self._ranks.answers:
            _logger.log(level, "%s: %s", self._policy.kind, said)

    @property
    def _capacity_bytes(self) -> int | None:
        """The most that a rank may reserve, None where nobody knows."""
        capacity_bytes = self._manager.backend.capacity_bytes()
        return None if capacity_bytes is None else capacity_bytes - capacity_bytes // _SPARE_SHARE

    @property
    def _learner(self) -> Learner:
        return self._manager.learner

    @property
    def _is_led(self) -> bool:
        """Whether someone else has given a plan."""
        return self._learner.plan is not self._followed

    def _is_other(self, profile: StepProfile) -> bool:
        """Whether the steps are others by now than the one that was profiled, for good."""
        learner = self._learner
        if learner.profile is None or learner.profile is self._known:
            return False
        if profile.has_groups_of(learner.profile):
            self._known = learner.profile
            return False
        return learner.is_steady


def cost_of(job: Job, shown: Mapping[int, Sequence[MeasuredStep]]) -> MeasuredCost:
    """Return what a step has cost, by what each process of each pipeline rank has measured."""
    settings = []
    for rank, passes in enumerate(job.schedule.ranks):
        steps, chunks = shown.get(rank), job.schedule.chunks_of(rank)
        lost_us: tuple[float, ...] = ()
        if steps and all(step.lost_us for step in steps):
            slowest = max(steps, key=lambda step: sum(map(sum, step.lost_us)))
            slowed_us = slowest.copied_bytes / job.copies_gbps / 1e3 / len(passes)
            lost_us = tuple(
                slowest.lost_us[chunks[one.stage, one.microbatch]][one.kind is PassKind.BACKWARD]
                + slowed_us
                for one in passes
            )
        settings.append(replace(NO_OFFLOAD, lost_us=lost_us))
    step_us = max(step.step_us for steps in shown.values() for step in steps)
    return MeasuredCost(step_us, simulate(job, settings).step_us - simulate(job).step_us)

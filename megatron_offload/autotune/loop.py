"""The measured loop: a run finds by its own steps what to offload, and whether anything pays.

docs/planning.md says in which steps, and when it looks again. Exactness depends on nothing here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_offload.autotune.agree import Ranks
from megatron_offload.autotune.search import MOST_PLANNING_S, PlanSearch, search_of
from megatron_offload.config import RECOMPUTE_SITES
from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import StepProfile
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.manager import PipelineOffloadManager, Tuner
from megatron_offload.errors import OffloadError, StateError
from megatron_offload.files.renames import OldAttributes
from megatron_offload.machine.bandwidth import BandwidthError, Link, median_rates
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.observe.measure import MeasuredStep, StepTimer
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning import profiled_job
from megatron_offload.planning.choice import SLOW_LINK_SHARE, Chooser
from megatron_offload.planning.files import PLANS, PROFILES
from megatron_offload.planning.found import NAME
from megatron_offload.planning.job import NO_OFFLOAD, Job, RankSettings
from megatron_offload.planning.plan import MeasuredCost, OffloadPlan
from megatron_offload.planning.policy import ModulesPolicy
from megatron_offload.planning.replay import ending_after
from megatron_offload.planning.schedule import PassKind
from megatron_offload.planning.simulate import simulate

_MOST_PROGRAMS = 3  # so often it begins anew, where a program has changed for good
_MOST_STEPS = 12  # looked at, unless the program changes for good or runs out of memory
_MOST_LONGER = 0.5  # all of them together may take so much longer than without
_SPARE_SHARE = 16  # of the device's memory, what plans leave to spare
_MOST_IDLE_SHARE = 0.25  # of boundaries: where more of them wait for the host, steps are CPU-bound
_GROWN_SHARE = 4  # a step that needs more by this part of what one saves is longer
_MOST_EMPTY = 8  # so many steps without a group are no evaluation before training
_PROBE_BYTES = 32 << 20  # what one of the copies moves that time the link

_logger = logging.getLogger(__name__)

ADVICE = (
    ". A larger 'most_slowdown_percent' lets it cost more, 'memory_target' says how much memory "
    "there is, 'rows' name what is offloaded or recomputed and cost nothing "
    "besides (docs/rows.md), and 'policy: modules' offloads everything"
)
NO_CLOCK = (
    "there is no GPU here, so that nothing can be won. 'policy: modules', in Python "
    "OffloadConfig(policy='modules'), offloads everything all the same"
)


def tune(manager: PipelineOffloadManager, loop: MeasuredLoop | None = None) -> MeasuredLoop:
    """Let a manager's steps find what to offload, where its configuration leaves that open.

    That is with policy ``auto`` or ``memory_target``, and where nothing is said of what is kept. A
    manager that has a loop keeps it, unless one is given; it follows the manager's configuration.
    """
    found = loop or manager.tuner
    if not isinstance(found, MeasuredLoop):
        found = MeasuredLoop()
    if manager.tuner is not found:
        manager.tuner = found
        found.begin(manager)
    return found


class MeasuredLoop(OldAttributes):
    """What `tune` gives a manager.

    Args:
        may_take_rows: whether another may look for rows, where the model is known.

    Attributes:
        by_rows: looks for rows in its place.
        plan: what is followed, with what was measured of it; None where there is none.
        is_converged: whether no more steps are looked at.
        rests: whether none ever will be.
        said: how it has converged, in one line.
    """

    def __init__(self, *, may_take_rows: bool = True) -> None:
        self.may_take_rows = may_take_rows
        self.by_rows: Tuner | None = None
        self.plan: OffloadPlan | None = None
        self.is_converged = self.rests = False
        self.said = ""
        self._looking = contextlib.ExitStack()
        self._num_empty = 0
        self._followed: OffloadPlan | None = None
        self._profile: StepProfile | None = None
        self._steps: Generator[None, None, None] | None = None

    def begin(self, manager: PipelineOffloadManager) -> None:
        """Begin anew, between two steps, with what the manager's configuration leaves open."""
        with contextlib.suppress(StateError):
            self._looking.close()
        self._manager = weakref.proxy(manager)  # which holds this: no circle
        self.plan = self._followed = self._profile = self._steps = None
        self.by_rows = None
        self.said, self._is_host_bound, self._has_warned = "", False, False
        self.rests = False
        policy = manager.config.tuned_policy
        self.is_converged = policy is None
        if policy is not None:
            self._policy = policy
            self._steps = self._take_steps()
            next(self._steps)

    def save(self, folder: str | Path) -> None:
        """Leave the plans of rows that were found, in the place of any that are there."""
        if self.by_rows is not None:
            self.by_rows.save(folder)
        elif rank_in() == 0:
            (Path(folder) / NAME).unlink(missing_ok=True)

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at the step that has ended, and prepare for the next."""
        search = self.by_rows
        if search is not None:
            search(manager)
            if self.by_rows is search:  # else it has left that to groups
                self.is_converged, self.said = search.is_converged, search.said
            return
        if manager.last_step.is_captured:
            if self._is_host_bound and self.plan and not manager.config.whole_step_graph:
                self._is_host_bound = False  # it is said once
                _logger.warning(
                    "a step was captured with a plan of eager steps, whose limit was the host; a "
                    "replay has none: set whole_step_graph for plans of replays"
                )
            return
        is_training = manager.last_step.num_groups or manager.is_skipping
        self._num_empty = 0 if is_training else self._num_empty + 1
        if self._steps is not None and is_training:
            next(self._steps, None)
        self.is_converged |= self._num_empty > _MOST_EMPTY  # nothing of this rank can be offloaded

    # What is done behind each step; a step passes at each yield.

    def _take_steps(self) -> Generator[None, None, None]:
        for _ in range(_MOST_PROGRAMS):
            self._num_looked, self._longer_us, self._bare_us = 0, 0.0, 0.0
            self._learner.open()
            yield
            if self._manager.config.policy is None and self._learner.policy != ModulesPolicy():
                self._learner.follow_plan(None)  # the model's own settings say what is kept
                self.is_converged = True
                return
            is_other = False
            while not is_other:
                self.is_converged, self._followed = False, None
                yield from self._find_plan()
                self._num_ooms = self._manager.num_out_of_memory
                self._peak_bytes = self._manager.backend.peak_allocated_bytes()
                while not self._needs_more():
                    if self._has_external_plan:
                        self.is_converged = True
                        return
                    is_other = self._profile is not None and self._is_other(self._profile)
                    if is_other:
                        break
                    yield
                self._learner.open()
        self._stop("its steps have other groups again and again", ADVICE)

    def _needs_more(self) -> bool:
        """Whether a step ran out of memory, or without offload took longer than any before."""
        if self._profile is None:
            return False
        if self._manager.num_out_of_memory > self._num_ooms:
            self._num_looked, self._longer_us = 0, 0.0
            return True
        if not self._learner.moves_nothing or not self._may_look:
            return False
        most_bytes = self._peak_bytes + self._profile.saved_bytes // _GROWN_SHARE
        return self._peak_bytes > 0 and self._manager.backend.peak_allocated_bytes() > most_bytes

    @property
    def _may_look(self) -> bool:
        """Whether another plan may be, which takes two steps."""
        most_us = _MOST_LONGER * _MOST_STEPS * self._bare_us
        return self._num_looked + 2 <= _MOST_STEPS and self._longer_us <= most_us

    def _find_plan(self) -> Generator[None, None, None]:
        """Look at a step in which all is kept, then agree on a plan, measure and correct it."""
        recorded = None
        while recorded is None:
            if not self._may_look:
                self._stop("no step came to its end of those that were looked at", "")
                return
            step, recorded = yield from self._look(profiles=True)
        profile = self._profile = self._learner.without_unlisted(recorded)
        if not profile.step_us:
            self._stop(NO_CLOCK, "")
            self.rests = self._learner.moves_nothing
            return
        self._is_host_bound = step.idle_share > _MOST_IDLE_SHARE
        self._bare_us = profile.step_us - self._is_host_bound * min(
            step.host_us, profile.step_us / 2
        )
        self._longer_us += profile.step_us - self._bare_us
        gbps = None
        if self._manager.config.whole_step_graph:  # in a replay it counts what copies slow
            self._learner.follow_plan(None)
            moved, recorded = yield from self._look(profiles=True)
            if recorded is not None and recorded.has_groups_of(profile):
                gbps = profiled_job.copies_gbps(recorded, profile, moved.copied_bytes)
        try:
            yield from self._agree_on_plan(profile, step, gbps)
        except dist.DistError as error:
            self._stop(f"the job's store can't be asked what other ranks do ({error})", "")

    def _agree_on_plan(
        self, profile: StepProfile, step: MeasuredStep, gbps: float | None
    ) -> Generator[None, None, None]:
        if not profile.offloaded_bytes:
            self._learner.move_nothing()  # until there is an answer
        ranks = self._ranks = Ranks()
        stage = profile.run.pp_rank
        d2h_gbps, h2d_gbps, pin_us = measure_link(self._manager, "d2h", "h2d")
        text = PROFILES.to_json(replace(profile, d2h_gbps=d2h_gbps, h2d_gbps=h2d_gbps))
        most_us = _MOST_LONGER * _MOST_STEPS * self._bare_us - self._longer_us
        self._most_pinned_bytes = most_us / pin_us if pin_us else math.inf
        text = text if ranks.is_first_of(str(stage)) else ""
        said, answer = [stage, step, False, gbps, text], self._first_answer
        while True:
            found = None
            for found in ranks.ask(json.dumps(said), answer):
                if found is None:
                    yield
            if not found:
                self._stop("no plan came that the ranks have agreed on", "")
            if not found or self._take(found):
                return
            for _ in range(2):  # the first behind a change takes its memory
                step, _ = yield from self._look()
                while not (step.step_us or self._learner.moves_nothing) and self._may_look:
                    step, _ = yield from self._look()  # an exception has ended it, or it was empty
                if self._is_other(profile) or self._has_external_plan:
                    return
            said, answer = [stage, step, not self._may_look], self._next_answer

    def _look(
        self, *, profiles: bool = False
    ) -> Generator[None, None, tuple[MeasuredStep, StepProfile | None]]:
        """Let a step pass; return what it took, and its profile if it was whole."""
        manager, is_replayed = self._manager, self._manager.config.whole_step_graph
        self._num_looked += 1
        with contextlib.ExitStack() as looking:
            timer = StepTimer(manager)
            looking.enter_context(manager.observed_by(timer))
            looking.enter_context(timer.clock.adding_up())
            if profiles:
                profiling = profile_step(manager, holds_back=is_replayed)
                recorded = looking.enter_context(profiling)
            self._looking = looking.pop_all()
        yield
        profile = None
        with contextlib.suppress(StateError):
            self._looking.close()
            profile = recorded.profile if profiles else None
        if not timer.has_ended:  # nothing of this rank moves, or an exception has ended it
            reserved_bytes = manager.backend.reserved_bytes()
            return MeasuredStep(0.0, [], 0, reserved_bytes, 0.0, 0.0), None
        step, shown = timer.read(), self._learner.profile
        if self._bare_us and shown and self._profile and not is_replayed:  # else it says nothing
            share = shown.saved_bytes / max(1, self._profile.saved_bytes)
            self._longer_us += step.step_us - self._bare_us * share
            if share != 1 and self._policy.kind == "auto":
                step = step._replace(reserved_bytes=None)  # of another length, that says nothing
        return step, profile

    # What the rank that answers does.

    def _first_answer(self, texts: Sequence[str]) -> str:
        """Plan by the profiles of all ranks; each pipeline rank's comes once, others are empty."""
        _, steps, _, reported_gbps, found = zip(*map(json.loads, texts), strict=True)
        profiles = [PROFILES.parse(text, "the profile of a rank") for text in found if text]
        is_alone = self._ranks.is_alone
        if is_alone:
            profiles = [replace(one, run=one.run._replace(pp_rank=0)) for one in profiles]
        size = 1 + max(profile.run.pp_rank for profile in profiles)
        if len(profiles) < size:
            return self._nothing("a pipeline rank has nothing that could be offloaded")
        if profiled_job.slowest_link(profiles) is None:
            return self._nothing("no host memory can be pinned")
        profiles = [replace(one, run=one.run._replace(pp_size=size)) for one in profiles]
        profiles.sort(key=lambda profile: profile.run.pp_rank)
        worst = max((MeasuredStep(*step) for step in steps), key=_host_percent)
        limit = getattr(self._policy, "most_slowdown_percent", math.inf)
        needed_bytes = max(profile.peak_reserved_bytes for profile in profiles)
        fits = needed_bytes + needed_bytes // 8 <= (self._capacity_bytes or math.inf)
        if _host_percent(worst) > limit and fits and not self._manager.config.whole_step_graph:
            return self._nothing(
                "the host launches these steps hardly faster than the device runs them, and in the "
                "one that was looked at it took "
                f"{_host_percent(worst):.0f} % of its time to record and to time what is saved; at "
                f"most {limit:g} % is wanted"
            )
        planning_s = min(MOST_PLANNING_S, max(1.0, 5e-6 * profiles[0].step_us))
        try:
            with ending_after(planning_s):
                began_s = time.thread_time()
                self._search = self._search_by(profiles, [x for x in reported_gbps if x])
            self._search.left_s = planning_s - (time.thread_time() - began_s)
            return self._next_answer(texts)
        except OffloadError as error:
            return self._nothing(f"no plan can be made: {error}")

    def _nothing(self, why: str) -> str:
        return json.dumps([None, True, False, f"{why}{ADVICE}"])

    def _search_by(
        self, profiles: Sequence[StepProfile], reported_gbps: Sequence[float]
    ) -> PlanSearch:
        config, policy = self._manager.config, self._policy
        machine = profiled_job.slowest_link(profiles) or Machine()
        job = profiled_job.job_of(profiles, profiled_job.schedule_of(profiles), machine)
        gbps = min(reported_gbps, default=math.inf)
        self._job = replace(job, copies_gbps=gbps)
        limits = RankSettings(
            max_inflight_bytes=config.max_inflight_bytes, prefetch_bytes=config.prefetch_bytes
        )
        is_measured = policy.kind == "auto" and policy.measured_plans > 0
        share = 1.0 if is_measured and not config.whole_step_graph else SLOW_LINK_SHARE
        chooser = Chooser(profiles, self._job, limits, link_share=share)
        search = search_of(chooser, policy, self._capacity_bytes, self._most_pinned_bytes)
        search.for_replays = config.whole_step_graph
        return search

    def _next_answer(self, texts: Sequence[str]) -> str:
        """Take what the step of a plan has shown, and correct it."""
        by_rank: dict[int, list[MeasuredStep]] = {}
        is_over = False
        for stage, step, takes_too_long, *_ in map(json.loads, texts):
            by_rank.setdefault(0 if self._ranks.is_alone else stage, []).append(MeasuredStep(*step))
            is_over |= takes_too_long
        if is_over:
            return self._nothing("to look for a plan takes these steps too long")
        reserved = [
            max((step.reserved_bytes or 0 for step in by_rank.get(rank, ())), default=0) or None
            for rank in range(len(self._job.static_bytes))
        ]
        search, steps = self._search, list(itertools.chain(*by_rank.values()))
        is_host_bound = max(step.idle_share for step in steps) > _MOST_IDLE_SHARE
        if search.plan.does_something:
            cost = cost_of(self._job, by_rank)
        else:  # it is what the others are compared with
            cost = MeasuredCost(max(step.step_us for step in steps), 0.0)
        search.note(cost, reserved, is_host_bound=is_host_bound)
        said = search.said
        if search.is_converged and not search.plan.does_something and self._policy.kind == "auto":
            limit = self._policy.most_slowdown_percent
            why = f"{search.least_cost()}, and at most {limit:g} % is wanted"
            return self._nothing(why)
        text = PLANS.to_json(replace(search.plan, bandwidths=profiled_job.FROM_COPIES))
        return json.dumps([text, search.is_converged, search.is_kept, said])

    def _take(self, answer: str) -> bool:
        """Follow the plan of an answer; return whether it is final."""
        text, is_converged, is_kept, said = json.loads(answer)
        if text is None:
            self._stop(said, "")
            return True
        plan = PLANS.parse(text, "the answer")
        missing = 1 + (self._learner.pp_rank or 0) - plan.pp_size
        if missing > 0:  # it was made by this rank alone
            plan = replace(plan, ranks=plan.ranks * (1 + missing))
        before, self.plan = self.plan, plan
        if before is None or not plan.is_like(before) or self._followed is None:
            self._followed = plan
            self._learner.follow_plan(plan, is_own=True)
            self._manager.backend.trim_device()  # what is reserved is seen from here on
        if is_converged:
            self.is_converged, self.said = True, said
            self._manager.backend.trim_device()  # what only other plans, and looking, needed
            if self._ranks.answers:
                level = logging.INFO if is_kept else logging.WARNING
                _logger.log(level, "%s: %s", self._policy.kind, said)
        return bool(is_converged)

    def _stop(self, why: str, advice: str) -> None:
        """Let nothing move from here on but what the device has no room for; say why, once."""
        self.is_converged, self.plan, self._followed = True, None, None
        if self._profile is not None and self._profile.offloaded_bytes:
            what = "only what the device has no room for is offloaded"
            self._learner.open()
        else:
            is_chosen = any(kind not in RECOMPUTE_SITES for kind in self._manager.recompute)
            what = "nothing is offloaded" + " or recomputed" * is_chosen
            self._learner.move_nothing()
            if self._manager.host_pool.stats.slab_bytes_total:
                self._manager.trim()  # no step comes that would unpin it
        level = logging.INFO if self._has_warned else logging.WARNING
        self.said, self._has_warned = f"megatron-offload: {what}: {why}{advice}", True
        if rank_in() == 0:
            _logger.log(level, "%s", self.said)

    @property
    def _capacity_bytes(self) -> int | None:
        """The most that a rank may reserve, None where unknown."""
        capacity_bytes = self._manager.backend.capacity_bytes()
        return None if capacity_bytes is None else capacity_bytes - capacity_bytes // _SPARE_SHARE

    @property
    def _learner(self) -> Learner:
        return self._manager.learner

    @property
    def _has_external_plan(self) -> bool:
        """Whether someone else has given a plan."""
        return self._learner.plan is not self._followed

    def _is_other(self, profile: StepProfile) -> bool:
        """Whether the steps are others by now than the one that was profiled, for good."""
        shown = self._learner.profile
        return shown is not None and not profile.has_groups_of(shown) and self._learner.is_steady


def measure_link(manager: PipelineOffloadManager, *ways: str) -> tuple[float, float, float]:
    """Return what copies get to the host and back, all ``ways`` at once, in GB/s.

    Zeros: there are none. And what it takes to pin a byte, in microseconds.
    """
    backend = manager.backend
    num_bytes = min(_PROBE_BYTES, int(manager.config.host_slab_bytes))
    try:
        began = backend.timestamp(backend.compute_stream())
        link = Link(backend, num_bytes)
        ended = backend.timestamp(backend.compute_stream())
        gbps = dict(zip(ways, median_rates([link], *ways)[0], strict=True))
    except BandwidthError:
        return 0.0, 0.0, 0.0
    pin_us = backend.sync_elapsed_us(began, ended) / (2 * num_bytes)
    return gbps.get("d2h", 0.0), gbps.get("h2d", 0.0), pin_us


def _host_percent(step: MeasuredStep) -> float:
    """Return how much longer the engine's own work makes a CPU-bound step."""
    if step.idle_share <= _MOST_IDLE_SHARE:
        return 0.0
    return 100 * step.host_us / max(step.step_us - step.host_us, 1.0)


def cost_of(job: Job, shown: Mapping[int, Sequence[MeasuredStep]]) -> MeasuredCost:
    """Return what a step has cost, by what each process of each pipeline rank has measured.

    A rank often loses what it would have waited for another one anyway. So what passes have lost is
    put into the simulated step without offload: as much longer as that becomes, the step was.
    """
    settings = []
    for rank, passes in enumerate(job.schedule.ranks):
        steps, chunks = shown.get(rank), job.schedule.chunks_of(rank)
        lost_us: tuple[float, ...] = ()
        if steps and all(step.lost_us for step in steps):
            slowest = max(steps, key=lambda step: sum(map(sum, step.lost_us)))
            slowed_us = slowest.copied_bytes / job.copies_gbps / 1e3 / len(passes)
            seen_us = dict(enumerate(slowest.lost_us))  # of fewer forwards than were profiled
            lost_us = tuple(
                seen_us.get(chunks[one.stage, one.microbatch], (0.0, 0.0))[
                    one.kind is PassKind.BACKWARD
                ]
                + slowed_us
                for one in passes
            )
        settings.append(replace(NO_OFFLOAD, lost_us=lost_us))
    everyone = [step for steps in shown.values() for step in steps]
    longer_us = simulate(job, settings).step_us - simulate(job).step_us
    longer_us += max(step.host_us * (step.idle_share > _MOST_IDLE_SHARE) for step in everyone)
    return MeasuredCost(max(step.step_us for step in everyone), longer_us)

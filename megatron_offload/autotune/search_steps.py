"""What each step of a search is for: a generator yields it before the step comes."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch.distributed as dist

from megatron_offload.autotune.agree import Ranks, is_alone
from megatron_offload.autotune.followed import ADVICE, LEAST_SHARE, MOST_SHARE, FollowedRows
from megatron_offload.autotune.layers import LayerWatch, SiteTimes
from megatron_offload.autotune.model_steps import ModelSteps
from megatron_offload.autotune.row_answers import ANSWER, RowAnswers, by_layer
from megatron_offload.core.row_config import UNITS, RowConfig, ranges
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.machine.bandwidth import BandwidthError, Link, median_rates
from megatron_offload.model_map.module_hooks import named_modules
from megatron_offload.model_map.sites import Site, sites_of_layers
from megatron_offload.observe.verdicts import NO_CLOCK
from megatron_offload.planning.frontier import KEEP, Part, Plan, frontier
from megatron_offload.recompute.sites import unproven_sites

StepKind: TypeAlias = Literal["open", "watched", "timed", "bare", "trying", "warming", "rows"]
"""What a step is for: all is kept that the device has room for; the layers are watched; they are
timed; nothing stands in it; what is to be recomputed is tried, and kept; rows take their memory;
they are measured."""

Look = TypeVar("Look", LayerWatch, SiteTimes)

_NUM_BARE = 6
_MOST_BARE = 14  # until memory is ready that a plan will pin
_SPARE_SHARE = 1.25  # of what steps so far would pin, what is made ready
_NUM_IN_A_ROUND = 2  # steps that are measured until it is asked what comes next
_NUM_IN_A_LONG_ROUND = 8  # likewise among ranks, where that takes as long, and for a target
_PROBE_BYTES = 32 << 20  # what one of the copies moves that time the link
_LEAST_LONG_SHARE = 0.25  # of forwards, by which plans are for long ones alone
_MOST_SHORT = 3  # so many smaller ones are looked at in vain
_MODEL = -1  # in place of a layer's number
_LARGE_SHARE = 0.5  # of what is saved: where layers that don't run again free less, all may move


class SearchSteps(FollowedRows):
    """Looks at steps, each for what `_find` says."""

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._search = self._find()
        self._span: tuple[Any, Any] = None, None
        """From the first to the last of the step before."""
        self._looks: LayerWatch | SiteTimes | None = None
        self._look_tokens, self._has_failed = 0.0, False
        """Of what is looked at: the tokens of its first forward, and whether it has raised."""
        self._trained = set[int]()
        """The models that had a forward with gradients: a teacher's are no part of the step."""
        self._rows: tuple[RowConfig, ...] = ()
        """Followed until there is a plan."""
        self._num_measured = 0

    def _layer_begins(self, tokens: float) -> None:
        if self.is_converged:
            self._see_length(tokens)
        self._look_tokens = self._look_tokens or tokens  # of several in a step the first

    def _find(self) -> Generator[StepKind, None, None]:
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
        alive = (site.module() for site in firsts.values())
        first_layers = (layer for layer in alive if layer is not None)  # which may have no len()
        self._clock = ModelSteps(first_layers, self._now, self._layer_begins)
        self._num_ooms = manager.backend.memory().num_out_of_memory
        # A rerun may hold collectives, so that ranks don't decide on it by themselves.
        if sites and not any(site.refusal for site in sites.values()) and is_alone():
            manager.learner.follow_rules()
            self._recompute_layers(numbers, when_short=True)
        released_bytes = 0
        for _ in range(1 + self._has_groups):  # behind the first there is an optimizer's state
            yield "open"
            step = manager.last_step
            released_bytes += step.peak_released_bytes + step.recomputed_bytes
        if not backend.sync_elapsed_us(*self._span):
            self._stop(NO_CLOCK, "")
            return
        needed_bytes = self._bare_bytes = backend.memory().peak_allocated_bytes + released_bytes
        capacity_bytes = backend.capacity_bytes() or math.inf
        self._is_tight = released_bytes > 0 and needed_bytes > MOST_SHARE * capacity_bytes
        if self._is_tight and (manager.rows is None or len(numbers) < 2):
            yield from self._agree(refusal="layers can't be recomputed here unasked, or it has one")
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
        least_bytes = getattr(self._groups(), "min_tensor_bytes", None) or 0
        may_move = manager.new_chunk(0, least_bytes).may_move
        look = partial(LayerWatch, sites, may_move, manager)
        watch = yield from self._look("watched", look)
        self._rows = self._rows if self._is_tight else ()
        self._watched_tokens = self._look_tokens
        holds_back = manager.config.whole_step_graph
        timing = partial(SiteTimes, sites or timed, backend, holds_back=holds_back)
        times = yield from self._look("timed", timing)
        times.scale = self._watched_tokens / self._look_tokens
        if not holds_back:
            times.sizes = [tokens / self._look_tokens for tokens in self._times.long]
        self._num_inflight = max(1.0, self._clock.most_pending / len(self._trained))
        self._forward_us = times.forward_us
        gbps = measure_link(manager)
        in_layers, self._saved_bytes = watch.sizes_in_layers, sum(watch.sizes.values())
        self._largest_bytes = max(in_layers, default=0)
        self._layer_share = sum(in_layers) / max(1, self._saved_bytes)
        all_of_it = [([_MODEL], (KEEP, *watch.all_of_it(times, gbps)))]
        if self._layer_share < LEAST_SHARE and not self._is_tight:
            self._kinds, self._link_bytes = [all_of_it], {}
        else:
            self._kinds = watch.actions(times, gbps, others, self._may_offload)
            is_pipeline = self._num_inflight > 1
            layers = [x for numbers, _ in self._kinds[0] for x in numbers]
            self._link_bytes = times.link_bytes(gbps, layers, is_pipeline=is_pipeline)
            is_plain = self._has_groups and is_alone() and all(x.refusal for x in sites.values())
            if is_plain and not (self._is_tight or self._named_recompute or times.host_share):
                has_copies = any(x.copied_bytes for _, own in self._kinds[0] for x in own)
                most_bytes = frontier(by_layer(self._kinds), self._link_bytes)[-1].freed_bytes
                if has_copies and most_bytes < _LARGE_SHARE * self._saved_bytes:
                    self._kinds.append(all_of_it)
        self._saving, self._has_lengths = watch.saving, len(watch.tokens) == 1
        # What ranks have alike that have the same layers.
        seen = sorted((site.layer, x) for x, site in all_sites.items() if x in watch.called)
        self._stage = f"{manager.learner.pp_rank or 0}/{zlib.crc32(repr(seen).encode()):x}"
        del look, timing, sites, all_sites, timed, watch, times, firsts  # no model is held
        has_bare = not (self._is_tight or holds_back)
        first = RowAnswers(self._policy)([json.dumps(self._words())])
        plan = ANSWER.validate_json(first)[-1][self._stage]
        ready_bytes = yield from self._prepare(plan, _NUM_BARE if has_bare else 0)
        if has_bare:
            self._bare_bytes = backend.memory().peak_allocated_bytes
        self._longest = self._bare_tokens = max(self._times.tokens)
        yield from self._agree(ready_bytes)

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

    def _recompute_layers(self, numbers: Sequence[int], *, when_short: bool = False) -> None:
        rows = (RowConfig(site="layer", layers=ranges(numbers), recompute=True),)
        self._rows = () if when_short else rows
        self.manager.follow_rows(rows, is_own=True, when_short=when_short)
        self._hook()

    def _look(self, kind: StepKind, make: Callable[[], Look]) -> Generator[StepKind, None, Look]:
        """Let forwards pass until a long one comes to its end.

        In short ones the device waits for the host, so that they say little of long ones, which
        decide how much memory is needed.
        """
        num_short = 0
        while True:
            look = make()
            self._looks, self._look_tokens, self._has_failed = look, 0.0, False
            yield kind
            self._looks = None
            is_short = self._look_tokens < self._times.measured_tokens
            if is_short and num_short < _MOST_SHORT and is_alone():  # ranks go on together
                num_short += 1
            elif not self._has_failed:
                return look

    def _prepare(self, plan: Plan, num_steps: int = 0) -> Generator[StepKind, None, float]:
        """Let memory be touched that a plan will pin; wait for it, but not for other ranks.

        So many steps pass at least. Returned is what a plan may copy of a forward as large as the
        one that was watched, without pinning any that isn't ready.
        """
        pool, backend = self.manager.host_pool, self.manager.backend
        for number in itertools.count():
            size = max(self._times.tokens) / self._watched_tokens  # a longer forward may have come
            share = _SPARE_SHARE * size * self._num_inflight
            is_of_use = size * self._largest_bytes <= pool.slab_bytes and not self._is_tight
            wanted_bytes = min(int(share * plan.copied_bytes), pool.cap_bytes) if is_of_use else 0
            missing_bytes = wanted_bytes - pool.stats.slab_bytes_total
            if missing_bytes > 0 and backend.is_host_prepared:
                pool.prepare(missing_bytes)
                if backend.is_host_prepared:  # there is no thread that does it
                    missing_bytes = 0
            most = _MOST_BARE if is_alone() else num_steps
            if number >= num_steps and (missing_bytes <= 0 or number >= most):
                break
            yield "bare"
            pool.pin_prepared()
        return math.inf if missing_bytes <= 0 else pool.stats.slab_bytes_total / share

    def _agree(
        self, ready_bytes: float = math.inf, refusal: str = ""
    ) -> Generator[StepKind, None, None]:
        """Follow one plan after the other, as the first rank says, until one is final.

        Ranks that have the same layers follow the same rows, and no rank drops anything before all
        have tried it: to run again may take collectives. A ``refusal`` ends the search on all.
        """
        try:
            ranks = Ranks()
            self._is_alone, self._speaks = is_alone(), ranks.answers
            said: dict[str, Any] = {"refusal": refusal}
            if not refusal:
                said = self._words(ready_bytes, has_kinds=ranks.is_first_of(self._stage))
            while True:
                found: str | None = None
                for found in ranks.ask(json.dumps(said), self._answers):
                    if found is None:
                        yield "open" if refusal else "bare"
                phase, text, plans = ANSWER.validate_json(found or '["", "", {}]')
                if self._stage not in plans:
                    why = text or "no plan came that the ranks have agreed on"
                    self._stop(why, ADVICE if text else "", keeps_open=bool(text and refusal))
                    return
                plan = plans[self._stage]
                if phase == "final":
                    layers = {x: own for one in plans.values() for x, own in one.actions.items()}
                    if len(layers) < sum(len(one.actions) for one in plans.values()):
                        layers = {**plan.actions}  # numbers count within each stage
                    self._finish(plan, text, plan._replace(actions=layers).rows())
                    return
                look_at = self._try if phase == "trying" else self._measure
                said = yield from look_at(plan)
                if self.is_converged:
                    return
                said |= {"stage": self._stage, "target_bytes": self._target_bytes}
        except dist.DistError as error:
            self._stop(f"the job's store can't be asked what other ranks do ({error})", "")

    def _words(self, ready_bytes: float = math.inf, *, has_kinds: bool = True) -> dict[str, Any]:
        """Return what this rank has, by which the first makes plans."""
        times = self._times
        forward_us = times.fit(self._watched_tokens)
        # In a pipeline, and among ranks, what one forward needs isn't the peak of a step.
        is_of_one = is_alone() and self._num_inflight <= 1 and not self._is_tight
        are_usual = len(times.long) >= _LEAST_LONG_SHARE * len(times.tokens)
        may_be_long = is_of_one and self._has_lengths and are_usual
        has = {
            "kinds": self._kinds if has_kinds else None,
            "link_bytes": [*self._link_bytes.items()],
            "num_inflight": self._num_inflight,
            "bare_bytes": self._bare_bytes,
            "reserved_bytes": self.manager.backend.memory().reserved_bytes or None,
            "target_bytes": self._target_bytes,
            "tokens": times.tokens if may_be_long else [],
            "saved_bytes": self._saved_bytes,
            "growth": times.growth,
            "ready_bytes": ready_bytes,
        }
        bare_us = forward_us * len(self._trained) if forward_us else max(1.0, 3 * self._forward_us)
        return {"stage": self._stage, "bare_us": bare_us, "has": has}

    def _try(self, plan: Plan) -> Generator[StepKind, None, dict[str, Any]]:
        """Follow a plan; return what of it can't be."""
        yield from self._prepare(plan)
        least = min(plan.min_tokens, self._times.measured_tokens)
        self._follow(plan._replace(min_tokens=least))
        if self.is_converged:
            return {}
        yield "trying"
        num_ooms = self.manager.backend.memory().num_out_of_memory
        if num_ooms > self._num_ooms:  # there was no room to try
            self._num_ooms, self._is_tight = num_ooms, True
        self._num_measured = 0
        return {"refused": self._newly_refused(plan)}

    def _measure(self, plan: Plan) -> Generator[StepKind, None, dict[str, Any]]:
        """Take some steps with the rows that are followed, and without; return what they show."""
        backend, is_free = self.manager.backend, self._target_bytes is None
        if not self._num_measured:
            if not is_free:
                backend.trim_device()
            yield "warming"  # the device's memory is had anew, and budgets are learned
            self._times.forget_rows()
        num_steps = _NUM_IN_A_ROUND if is_free and self._is_alone else _NUM_IN_A_LONG_ROUND
        for number in range(self._num_measured, self._num_measured + num_steps):
            # A fourth, without a period: each second or fourth step may have an optimizer's.
            is_bare = not (number.bit_count() % 2 or (number >> 1).bit_count() % 2)
            yield "bare" if is_bare and is_free else "rows"
        self._num_measured += num_steps
        assert self.plan is not None
        return {
            "slowdown": self._times.slowdown(self.plan.min_tokens, plan.min_tokens),
            "num_steps": num_steps,
            # To have it anew takes a step long.
            "reserved_bytes": 0 if is_free else backend.memory().reserved_bytes,
        }

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
            saving = sites.keys() & self._saving
            unproven |= {sites[path].name for path in names if path in saving}
        if not self._is_tight:
            refused += [(row.site, "recompute") for row in rows if row.site in unproven]
        return refused


def measure_link(manager: PipelineOffloadManager) -> float:
    """Return what copies get to the host, in GB/s; 0 where there are none."""
    num_bytes = min(_PROBE_BYTES, int(manager.config.host_slab_bytes))
    try:
        return median_rates([Link(manager.backend, num_bytes)], "d2h")[0][0]
    except BandwidthError:
        return 0.0

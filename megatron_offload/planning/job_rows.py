"""Rows on a described job: what they may do with each of its layers, and the job that does it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, NamedTuple

from megatron_offload.core.row_config import UNITS, RowConfig, ranges
from megatron_offload.planning.frontier import (
    BACKWARD_SHARE,
    KEEP,
    LINK_SHARE,
    Action,
    Part,
    Plan,
    link_bytes,
    total,
)
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork
from megatron_offload.planning.model_cost import run_again
from megatron_offload.planning.simulate import fair_rates

WHOLE_SITES = ("attention", "mlp.experts", "mlp", "layer")
"""What a row may recompute as a whole; the later go before those that lie in them."""

_GROUPS = {
    "attention": frozenset({"qkv_linear", "core_attn", "attn_proj"}),
    "mlp.experts": frozenset({"expert_fc1", "moe_act", "expert_fc2"}),
    "self_attention.linear_qkv": frozenset({"qkv_linear"}),
    "self_attention.core_attention": frozenset({"core_attn"}),
    "mlp.linear_fc1": frozenset({"mlp_fc1"}),
    "mlp.linear_fc2": frozenset({"mlp_fc2"}),
}
_BESIDE_MLP = _GROUPS["attention"] | {"attn_norm", "mlp_norm"}
_ACTIVATIONS = ("mlp_act", "moe_act")  # of both ``mlp_act`` is the row

_COPY_SHARE = 1e-3  # of a copy's time, for an order among what the link carries
_FORWARD_SHARE = 1 / 3  # of a layer's kernels, what its forward launches


def units_of(job: Job) -> tuple[str, ...]:
    """Return the units that rows may recompute in all layers."""
    found = {unit.unit for stage in job.stages for group in stage.groups for unit in group.units}
    return tuple(unit for unit in UNITS if not found.isdisjoint(_names([unit])))


def with_units(job: Job, units: Collection[str]) -> Job:
    """Return the step with units recomputed in all layers, and all else as it was."""
    names = _names(units)
    stages = (
        replace(stage, groups=tuple(group.with_recompute(names) for group in stage.groups))
        for stage in job.stages
    )
    return replace(job, stages=tuple(stages))


def with_rows(job: Job, rows: Sequence[RowConfig], stages: Collection[int] | None = None) -> Job:
    """Return the step as rows make it: what none of them names is kept.

    Of a site that is offloaded all groups are; a tensor's rank among them isn't known. Other stages
    than those that are named are left as they were.
    """
    chosen = range(len(job.stages)) if stages is None else stages
    pairs = enumerate(job.stages)
    return replace(job, stages=tuple(_stage(x, rows) if n in chosen else x for n, x in pairs))


def alternatives(job: Job, settings: RankSettings) -> Iterator[tuple[str, tuple[RowConfig, ...]]]:
    """Yield what can be done, in words and as rows, of what may be; the first is nothing.

    A plan chooses layer by layer; these are what one sets without it, to see what it wins.
    """
    marked = [[group.layer for group in stage.groups if group.is_marked] for stage in job.stages]
    stages = [sorted({layer for layer in own if layer is not None}) for own in marked]
    num_layers = max(map(len, stages))

    def some(first: int, end: int, **does: Any) -> RowConfig:
        chosen = ranges(layer for own in stages for layer in own[first:end])
        return RowConfig(site="layer", layers=chosen, **does)

    yield "nothing", ()
    if not num_layers:  # the job recomputes all layers itself
        return
    may = settings.recomputable((*UNITS, *WHOLE_SITES))
    units = units_of(job)
    selective = [RowConfig(site=unit, recompute=True) for unit in units]
    is_selective = bool(units) and {*units} <= {*may}
    if is_selective:
        yield f"recompute {', '.join(units)}", tuple(selective)
    counts = sorted({num_layers // 4, num_layers // 2, num_layers} - {0})
    for count in counts if "layer" in may else ():  # the first of each stage, as ``block``
        which = "all layers" if count == num_layers else f"{count} of {num_layers} layers"
        yield f"recompute {which}", (some(0, count, recompute=True),)
    everything = some(0, num_layers, offload="all")
    yield "offload everything", (everything,)
    if is_selective:
        yield f"offload others, recompute {', '.join(units)}", (*selective, everything)
    if counts[1:] and "layer" in may:
        half = some(0, counts[-2], recompute=True), some(counts[-2], num_layers, offload="all")
        yield f"recompute {counts[-2]} of {num_layers} layers, offload others", half


def inflight(job: Job, rank: int) -> Counter[int]:
    """Return of each stage the microbatches that a rank holds when it holds most."""
    held, most, num_bytes, most_bytes = Counter[int](), Counter[int](), 0, -1
    own = job.schedule.stages_of(rank)
    sizes = {number: sum(x.saved_bytes for x in job.stages[number].groups) for number in own}
    for one in job.schedule.ranks[rank]:
        change = 1 if one.kind == "F" else -1
        held[one.stage] += change
        num_bytes += change * sizes[one.stage]
        if num_bytes > most_bytes:
            most, most_bytes = held.copy(), num_bytes
    return most


class _Layer(NamedTuple):
    number: int
    """In the whole model."""
    stage: StageWork
    groups: list[GroupWork]
    num_inflight: int
    """Microbatches whose backward is still to come when the rank holds most."""

    @property
    def forward_us(self) -> float:
        return sum(group.forward_us for group in self.groups)


class RankLayers:
    """The layers of one pipeline rank, with units that are recomputed in all of them.

    Attributes:
        units_us: what these take in a microbatch.
        units_bytes: what they free in all microbatches in flight.
    """

    def __init__(self, job: Job, rank: int, units: Collection[str] = ()) -> None:
        before, job = job, with_units(job, units)
        held = inflight(job, rank)
        self._again = Action(tuple((unit, "recompute") for unit in units))
        self.units_us, self.units_bytes = 0.0, 0
        for number in job.schedule.stages_of(rank):
            pairs = zip(before.stages[number].groups, job.stages[number].groups, strict=True)
            for one, other in pairs:
                self.units_us += other.backward_us - one.backward_us
                self.units_bytes += held[number] * (one.num_bytes - other.num_bytes)
        self._layers = [
            _Layer(layer, job.stages[number], groups, held[number])
            for number in job.schedule.stages_of(rank)
            for layer, groups in _layers(job.stages[number])
            if layer is not None
        ]
        # What a GPU's copies get while all of a node copy: one way, or where other microbatches are
        # in flight as much in as out.
        self._is_deep = any(layer.num_inflight > 1 for layer in self._layers)
        even = job.machine.model_copy(update={"node_d2h_share": 0.5})
        num_gpus = min(job.gpus_per_rank, job.machine.gpus_per_node)
        num = min(job.ranks_per_node, job.schedule.num_ranks)
        ways = ((0, 0, num),) if self._is_deep else ((num, 0, 0), (0, num, 0))
        rates = [rate for way in ways for rate in fair_rates(even, num_gpus, *way) if rate]
        self._gbps = min(rates) / 1e3
        self.link_bytes_per_us = 1e3 * self._gbps
        num_held = sum(layer.num_inflight for layer in self._layers) / max(1, len(self._layers))
        self._host_bytes = job.machine.host_bytes / (num_gpus * num * max(1.0, num_held))
        stages = [job.stages[number] for number in job.schedule.stages_of(rank)]
        self._forward_us, self._backward_us = (
            sum(x.slowness(has_engine=False) * us(group) for x in stages for group in x.groups)
            for us in (lambda group: group.forward_us, lambda group: group.backward_us)
        )

    def counted_us(self, plan: Plan) -> float:
        """Return what a microbatch takes at least with a plan: compute, or copies beside it."""
        copy_us = plan.copied_bytes / self.link_bytes_per_us
        first_us, second_us = self._forward_us, self._backward_us + self.units_us + plan.us
        if self._is_deep:  # both ways at once
            return max(first_us + second_us, copy_us)
        return max(first_us, copy_us) + max(second_us, copy_us)

    def actions(self, sites: Collection[str]) -> dict[int, tuple[Action, ...]]:
        """Return what rows do with each layer at first, and may do, recompute of sites included.

        What is freed counts in all microbatches in flight, the time in one; units count apart.
        """
        return {layer.number: tuple(self._actions(layer, sites)) for layer in self._layers}

    def _actions(self, layer: _Layer, sites: Collection[str]) -> Iterator[Action]:
        slowness = layer.stage.slowness(has_engine=True)

        def rerun(*own: str) -> Iterator[Action]:
            for site in own:
                groups = [group for group in layer.groups if _is_in(group, site)]
                freed_bytes = sum(group.saved_bytes for group in groups)
                freed_bytes -= _input_bytes(site, groups, layer.stage)
                if site in sites and groups and freed_bytes > 0:
                    us = slowness * sum(group.forward_us for group in groups)
                    freed_bytes *= layer.num_inflight
                    yield Action(((site, "recompute"),), freed_bytes, us)

        def offloaded(*own: str) -> Iterator[Action]:
            for site in own:
                groups = [group for group in layer.groups if _is_in(group, site)]
                num_bytes = sum(group.num_bytes for group in groups)
                if num_bytes and any(group.is_marked for group in groups):
                    us = _COPY_SHARE * num_bytes / self._gbps / 1e3
                    if slowness > 1:  # the device waits for the host
                        us += layer.stage.host_us_per_group * len(groups)
                    names = {group.name for group in groups if group.num_bytes}
                    inner = [x for x, within in _GROUPS.items() if "." in x and within < names]
                    freed_bytes = layer.num_inflight * num_bytes
                    parts: list[Part] = [(x, "all") for x in (site, *inner)]
                    yield Action(tuple(parts), freed_bytes, us, num_bytes)

        choices = (
            [KEEP, *rerun(*own), *offloaded(*own)]
            for own in (("attention",), ("mlp", "mlp.experts"))
        )
        yield from (total((self._again, *chosen)) for chosen in product(*choices))
        yield from (total((self._again, whole)) for whole in offloaded("layer"))
        yield from rerun("layer")

    def link_bytes(self, share: float) -> dict[int, float]:
        """Return `link_bytes` of the layers, of which ``share`` shall be taken.

        A GPU's part of its node's host memory bounds them, too.
        """
        forward_us = {layer.number: layer.forward_us for layer in self._layers}
        deep = {layer.number for layer in self._layers if layer.num_inflight > 1}
        found = link_bytes(forward_us, share * LINK_SHARE * self._gbps * 1e3, deep)
        return {number: min(num_bytes, self._host_bytes) for number, num_bytes in found.items()}

    def paced(self, plan: Plan, actions: Mapping[int, tuple[Action, ...]]) -> Plan:
        """Return a plan by which layers that are alike begin copies as the link ends those before.

        Where that is too slow for all copies, they begin at even distances. What is done is the
        same, in other layers.
        """
        lasts_us = [
            layer.forward_us * (BACKWARD_SHARE if layer.num_inflight > 1 else 1)
            for layer in self._layers
        ]
        us_per_byte = min(1e-3 / self._gbps, sum(lasts_us) / max(1, plan.copied_bytes))
        waiting = defaultdict[tuple[Action, ...], list[Action]](list)
        for number in sorted(actions, reverse=True):
            waiting[actions[number]].append(plan.actions[number])
        found = dict[int, Action]()
        now_us = copied_bytes = 0.0
        for layer, us in zip(self._layers, lasts_us, strict=True):
            own = waiting[actions[layer.number]]
            is_free = copied_bytes * us_per_byte <= now_us
            wanted = [place for place, x in enumerate(own) if bool(x.copied_bytes) == is_free]
            found[layer.number] = action = own.pop(wanted[-1] if wanted else -1)
            copied_bytes += action.copied_bytes
            now_us += us
        return plan._replace(actions=found)


def _layers(stage: StageWork) -> list[tuple[int | None, list[GroupWork]]]:
    """Return the groups of each layer; without its number where rows can do nothing with them.

    That is where the job recomputes it as a whole.
    """
    found = groupby(stage.groups, key=lambda group: group.layer)
    layers = [(layer, list(groups)) for layer, groups in found]
    return [(layer if len(groups) > 1 else None, groups) for layer, groups in layers]


def _is_in(group: GroupWork, site: str) -> bool:
    if site == "mlp":
        return group.name not in _BESIDE_MLP
    return site == "layer" or group.name in _GROUPS.get(site, ())


def _names(units: Collection[str]) -> set[str]:
    return {name for unit in units for name in (_ACTIVATIONS if unit in _ACTIVATIONS else (unit,))}


def _input_bytes(site: str, groups: Sequence[GroupWork], stage: StageWork) -> int:
    """Return what a site is given, and keeps where it runs again."""
    is_routed = site == "mlp.experts" and groups  # a token has a copy for each of its experts
    return groups[0].saved_bytes if is_routed else stage.output_bytes


def _stage(stage: StageWork, rows: Sequence[RowConfig]) -> StageWork:
    done, host_us, layers = list[GroupWork](), stage.host_us, _layers(stage)
    num_groups = max(1, sum(len(groups) for layer, groups in layers if layer is not None))
    for layer, groups in layers:
        if layer is None:
            done += groups
            continue
        own = [row for row in rows if row.has_layer(layer)]
        again = [row.site for row in own if row.recompute]
        offloaded = [row.site for row in own if not row.recompute]
        units = _names([site for site in again if site in UNITS])
        whole = [site for site in WHOLE_SITES if site in again]
        site_of = {x.name: site for site in whole for x in groups if _is_in(x, site)}
        host_us += stage.host_us * _FORWARD_SHARE * len(site_of) / num_groups
        for site, alike in groupby(groups, key=lambda group: site_of.get(group.name)):
            same = list(alike)
            if site is not None:
                done.append(run_again(site, same, _input_bytes(site, same, stage)))
                continue
            for group in same:
                left = replace(group, is_marked=True).with_recompute(units)
                is_offloaded = any(_is_in(group, one) for one in offloaded)
                has_any = left.num_bytes > 0 or left.recomputed != ()
                done.append(replace(left, is_marked=is_offloaded and has_any))
    return replace(stage, groups=tuple(done), host_us=host_us)

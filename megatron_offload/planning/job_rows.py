"""Rows on a described job: what they may do with each of its layers, and the job that does it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product

from megatron_offload.core.row_config import UNITS, RowConfig
from megatron_offload.planning.frontier import KEEP, Action, Part, Plan, total
from megatron_offload.planning.job import GroupWork, Job, StageWork
from megatron_offload.planning.model_cost import run_again
from megatron_offload.planning.simulate import fair_rates

WHOLE_SITES = ("attention", "mlp.experts", "mlp", "layer")
"""What a row may recompute as a whole; the later go before those that lie in them."""

_ATTENTION = frozenset({"qkv_linear", "core_attn", "attn_proj"})
_NORMS = frozenset({"attn_norm", "mlp_norm"})  # modules beside attention and MLP
_GROUPS = {
    "attention": _ATTENTION,
    "mlp.experts": frozenset({"expert_fc1", "moe_act", "expert_fc2"}),
    "self_attention.linear_qkv": frozenset({"qkv_linear"}),
    "self_attention.core_attention": frozenset({"core_attn"}),
    "mlp.linear_fc1": frozenset({"mlp_fc1"}),
    "mlp.linear_fc2": frozenset({"mlp_fc2"}),
}
_ACTIVATIONS = ("mlp_act", "moe_act")  # of both ``mlp_act`` is the row

_COPY_SHARE = 1e-3  # of a copy's time, for an order among what the link carries
_LINK_SHARE = 1.1  # of what a link carries while layers run: behind the last one there is more
_BACKWARD_SHARE = 3  # a forward and a backward, in forwards
_FORWARD_SHARE = 1 / 3  # of a layer's kernels, what its forward launches


def units_of(job: Job) -> tuple[str, ...]:
    """Return the units that rows may recompute in all layers."""
    found = {unit.unit for stage in job.stages for group in stage.groups for unit in group.units}
    return tuple(unit for unit in UNITS if not found.isdisjoint(_names(unit)))


def with_units(job: Job, units: Collection[str]) -> Job:
    """Return the step with units recomputed in all layers, and all else as it was."""
    names = {name for unit in units for name in _names(unit)}
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


def actions_of(job: Job, rank: int, sites: Collection[str]) -> dict[int, tuple[Action, ...]]:
    """Return what rows may do with each layer of a rank, by its number in the whole model.

    What is freed counts in all microbatches whose backward is still to come when the rank holds
    most, the time in one.

    Args:
        job: the step, with units recomputed as they will be.
        rank: of the pipeline.
        sites: those that may be recomputed.
    """
    held, found = inflight(job, rank), dict[int, tuple[Action, ...]]()
    for number in job.schedule.stages_of(rank):
        stage = job.stages[number]
        slowness = stage.slowness(has_engine=True)
        for layer, groups in _layers(stage):
            own = _Layer(stage, groups, slowness, _gbps(job))
            found[layer] = tuple(
                action._replace(freed_bytes=held[number] * action.freed_bytes)
                for action in own.actions(sites)
            )
    return found


def link_bytes(job: Job, rank: int, share: float) -> dict[int, float]:
    """Return of each layer how much of it and of those behind it can be copied by its backward.

    Where several microbatches are under way, backwards of others lie between.

    Args:
        job: the step.
        rank: of the pipeline.
        share: of that, as much as shall be taken.
    """
    held, found, behind_us = inflight(job, rank), dict[int, float](), 0.0
    for number in reversed(job.schedule.stages_of(rank)):
        is_alone = held[number] <= 1
        for layer, groups in reversed(_layers(job.stages[number])):
            own_us = sum(group.forward_us for group in groups)
            us = behind_us if is_alone else _BACKWARD_SHARE * (behind_us + own_us)
            found[layer] = share * _LINK_SHARE * _gbps(job) * 1e3 * us
            behind_us += own_us
    return found


def paced(job: Job, rank: int, plan: Plan, actions: Mapping[int, tuple[Action, ...]]) -> Plan:
    """Return a plan by which layers that are alike begin copies as the link ends those before.

    What is done is the same, in other layers.
    """
    waiting = defaultdict[tuple[Action, ...], list[Action]](list)
    for number in sorted(actions, reverse=True):
        waiting[actions[number]].append(plan.actions[number])
    held, found = inflight(job, rank), dict[int, Action]()
    now_us = free_us = 0.0
    for stage in job.schedule.stages_of(rank):
        for layer, groups in _layers(job.stages[stage]):
            own = waiting[actions[layer]]
            wanted = [
                place
                for place, one in enumerate(own)
                if bool(one.copied_bytes) == (free_us <= now_us)
            ]
            found[layer] = own.pop(wanted[-1] if wanted else -1)
            if found[layer].copied_bytes:
                free_us = max(free_us, now_us) + found[layer].copied_bytes / _gbps(job) / 1e3
            own_us = sum(group.forward_us for group in groups)
            now_us += own_us * (1 if held[stage] <= 1 else _BACKWARD_SHARE)
    return plan._replace(actions=found)


def inflight(job: Job, rank: int) -> Counter[int]:
    """Return of each stage the microbatches that a rank holds when it holds most."""
    held, most, most_bytes = Counter[int](), Counter[int](), -1
    sizes = {x: sum(g.saved_bytes for g in job.stages[x].groups) for x in range(len(job.stages))}
    for one in job.schedule.ranks[rank]:
        held[one.stage] += 1 if one.kind == "F" else -1
        num_bytes = sum(sizes[stage] * number for stage, number in held.items())
        if num_bytes > most_bytes:
            most, most_bytes = held.copy(), num_bytes
    return most


def _gbps(job: Job) -> float:
    """Return what a GPU's copies get each way while all of a node copy."""
    machine = job.machine
    num_gpus = min(job.gpus_per_rank, machine.gpus_per_node)
    num_ranks = min(job.ranks_per_node, job.schedule.num_ranks)
    return min(fair_rates(machine, num_gpus, 0, 0, num_ranks)[2:]) / 1e3


def _layers(stage: StageWork) -> list[tuple[int, list[GroupWork]]]:
    """Return the groups of each layer, but for those that the job recomputes as a whole."""
    found = groupby(stage.groups, key=lambda group: group.layer)
    layers = [(layer, list(groups)) for layer, groups in found if layer is not None]
    return [(layer, groups) for layer, groups in layers if len(groups) > 1]


def _is_in(group: GroupWork, site: str) -> bool:
    if site == "mlp":
        return group.name not in _ATTENTION | _NORMS
    return site == "layer" or group.name in _GROUPS.get(site, ())


def _names(unit: str) -> tuple[str, ...]:
    return _ACTIVATIONS if unit in _ACTIVATIONS else (unit,)


class _Layer:
    """What may be done with one layer of a stage."""

    def __init__(
        self, stage: StageWork, groups: Sequence[GroupWork], slowness: float, gbps: float
    ) -> None:
        self._stage, self._groups, self._slowness, self._gbps = stage, groups, slowness, gbps

    def actions(self, sites: Collection[str]) -> Iterator[Action]:
        choices = [
            [KEEP, *self._rerun(own, sites), *map(self._offloaded, own)]
            for own in (("attention",), ("mlp", "mlp.experts"))
        ]
        for pair in product(*choices):
            action = total(pair)
            if action.freed_bytes > 0:
                yield action
        yield from self._rerun(("layer",), sites)

    def _rerun(self, own: Sequence[str], sites: Collection[str]) -> Iterator[Action]:
        for site in own:
            groups = self._in(site)
            freed_bytes = sum(group.saved_bytes for group in groups)
            freed_bytes -= _input_bytes(site, groups, self._stage)
            if site in sites and groups and freed_bytes > 0:
                us = self._slowness * sum(group.forward_us for group in groups)
                yield Action(((site, "recompute"),), freed_bytes, us)

    def _offloaded(self, site: str) -> Action:
        groups = self._in(site)
        num_bytes = sum(group.num_bytes for group in groups)
        if not num_bytes or not any(group.is_marked for group in groups):
            return KEEP
        us = _COPY_SHARE * num_bytes / self._gbps / 1e3
        if self._slowness > 1:  # the device waits for the host
            us += self._stage.host_us_per_group * len(groups)
        names = {group.name for group in groups if group.num_bytes}
        parts: list[Part] = [(site, "all")]
        parts += [(x, "all") for x, inner in _GROUPS.items() if "." in x and inner < names]
        return Action(tuple(dict.fromkeys(parts)), num_bytes, us, num_bytes)

    def _in(self, site: str) -> list[GroupWork]:
        return [group for group in self._groups if _is_in(group, site)]


def _input_bytes(site: str, groups: Sequence[GroupWork], stage: StageWork) -> int:
    """Return what a site is given, and keeps where it runs again."""
    is_routed = site == "mlp.experts" and groups  # a token has a copy for each of its experts
    return groups[0].saved_bytes if is_routed else stage.output_bytes


def _stage(stage: StageWork, rows: Sequence[RowConfig]) -> StageWork:
    groups, host_us = list[GroupWork](), stage.host_us
    num_groups = max(1, sum(len(own) for _, own in _layers(stage)))
    for layer, own in groupby(stage.groups, key=lambda group: group.layer):
        before = list(own)
        if layer is None or len(before) == 1:
            groups += before
            continue
        does = defaultdict[bool, list[str]](list)
        for row in rows:
            if row.has_layer(layer):
                does[row.recompute].append(row.site)
        after, num_again = _with_sites(before, does[True], does[False], stage)
        host_us += stage.host_us * _FORWARD_SHARE * num_again / num_groups
        groups += after
    return replace(stage, groups=tuple(groups), host_us=host_us)


def _with_sites(
    groups: Sequence[GroupWork],
    again: Collection[str],
    offloaded: Collection[str],
    stage: StageWork,
) -> tuple[list[GroupWork], int]:
    """Return a layer's groups as rows make them, and how many of them run again."""
    units = [name for site in again if site in UNITS for name in _names(site)]
    done: list[GroupWork] = []
    site_of: dict[str, str] = {}
    for site in WHOLE_SITES:
        if site in again:
            site_of |= {group.name: site for group in groups if _is_in(group, site)}
    for found, alike in groupby(groups, key=lambda group: site_of.get(group.name)):
        own = list(alike)
        if found is not None:
            done.append(run_again(found, own, _input_bytes(found, own, stage)))
            continue
        for group in own:
            left = replace(group, is_marked=True).with_recompute(units)
            is_offloaded = any(_is_in(group, site) for site in offloaded)
            has_any = left.num_bytes or left.recomputed
            done.append(replace(left, is_marked=bool(is_offloaded and has_any)))
    return done, len(site_of)

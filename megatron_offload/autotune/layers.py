"""What may be done with each layer of a model, and what that frees and costs, as seen in it.

One forward shows what the layers and their parts save and are given, another how long they run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise, product
from statistics import mean, median
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from megatron_offload.autotune.row_answers import Alike
from megatron_offload.backends.base import Backend
from megatron_offload.core.row_config import EXPERTS, MODEL, MOE_ACT
from megatron_offload.engine.boundary import hook_backward
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.memory.layout import layout_of
from megatron_offload.memory.nested import tensors_in
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.model_map.module_hooks import tokens_of
from megatron_offload.model_map.sites import CallTimes, Site, modules_of
from megatron_offload.model_map.structure import has_forward
from megatron_offload.model_map.watch import MayMove, SavedMemory
from megatron_offload.planning.frontier import KEEP, LINK_SHARE, Action, Part, link_bytes, total

ROUTED = EXPERTS, MOE_ACT
"""How sites end that are given what is routed to them, in an MLP that does nothing else then."""

_MOST_TENSORS = 8
_LEAST_BYTES = 1 << 20  # of a tensor that is offloaded: a smaller one frees little for its call
# Between other work, with cold caches, these are some three times what loops show (measured in
# Megatron's small layers on an H200: the log of measurements, 2026-11-30).
_SITE_US = 250.0  # what a call that runs again takes of the host's time besides
_GROUP_US = 450.0  # likewise a group that is offloaded
_TENSOR_US = 45.0  # and each of its tensors
_VIEW_US = 20.0  # and each view of them that is saved
_KEPT_US = 4.0  # and each tensor at all
_LAYER_US = _GROUP_US + _MOST_TENSORS * _TENSOR_US  # and what is offloaded of a layer, at most
_UNIT_US_PER_BYTE = 1e-6  # of an activation that is called again, which reads and writes memory
_PART_US = 1000.0  # what a copy takes at least that is worth a group of its own
_MOST_EXPOSED = 0.5  # of the host's time: where more delays the device, groups aren't divided
_COPY_SHARE = 0.03  # of a copy's time, what it slows the device: they share its memory
_REPLAY_COPY_SHARE = 0.17  # likewise in replays, whose kernels come without gaps between
_REPLAY_SHARE = 0.5  # as `LINK_SHARE` in replays, in which no host makes room between copies
# [Note: a layer's share of the link] Under LoRA backward is hardly longer than forward. There a
# step took 22 % longer with 2.2 times what the forwards of 9 layers carry, and 1.1 % with 1.5 times
# that of 12 layers; a tenth more than backward carries made reloads late (the log of measurements).
_LAYER_SHARE = 1.5  # of what it carries in a layer's forward, at most
_BACKWARD_SHARE = 0.85  # of what it carries in its backward, which reloads it


class LayerWatch(SavedMemory):
    """Sees what the sites of a model save and are given in one forward."""

    def __init__(
        self, sites: Mapping[str, Site], may_move: MayMove, manager: PipelineOffloadManager
    ) -> None:
        super().__init__(may_move, manager)
        self._sites = sites
        self._inputs: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self.tokens: set[float] = set()
        """That the sites were given, but experts."""
        self.saving: set[str] = set()
        """Those that saved something: not what only passes on what it is given. Known once
        `actions` has been asked."""

    def begin(self) -> None:
        """Watch what comes."""
        alive = modules_of(self._sites)
        modules = {
            f"{path}.{name}".rstrip("."): part
            for path, module in alive.items()
            for name, part in module.named_modules()
        }
        self.watch(modules)

    @property
    def sizes_in_layers(self) -> list[int]:
        """Of what could be offloaded and is saved inside layers."""
        return [self.sizes[key] for key, paths in self.savers.items() if any(paths)]

    def all_of_it(self, times: SiteTimes, gbps: float) -> Iterator[Action]:
        """Yield what offloads all that is saved, in layers and outside, if anything can be."""
        num_bytes = sum(self.sizes.values())
        if num_bytes and gbps:
            copy_us = num_bytes / gbps / 1e3
            us = times.copy_share * copy_us + max(0.0, copy_us - times.forward_us)
            yield Action(((MODEL, "all"),), num_bytes, us, num_bytes)

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        super()._enter(path, module, args, kwargs)
        if path not in self._sites:
            return
        if not self._sites[path].name.endswith(ROUTED):
            self.tokens.add(tokens_of(args, kwargs))
        for leaf in tensors_in((args, kwargs)):
            is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
            if is_plain and not is_functorch_wrapped_tensor(leaf):
                self.storages.append(StorageRef(leaf.untyped_storage()))
                self._inputs[path][self.storages[-1].cdata] = layout_of(leaf).num_bytes

    def actions(
        self,
        times: SiteTimes,
        gbps: float,
        numbers: Sequence[int],
        may_offload: Callable[[str, str], bool] = lambda *_: True,
    ) -> list[Alike]:
        """Return what may be done with layers, without functions that run again, and with.

        Args:
            times: of the same sites, in a forward of the same size.
            gbps: what copies get; 0 where nothing can be offloaded.
            numbers: of layers that were not watched, and are taken to be like the last that was.
            may_offload: whether what the site saves of this name and dotted name may be offloaded.
        """
        found = tuple[defaultdict[int, list[_SeenSite]], ...](defaultdict(list) for _ in range(2))
        savers, made, num_saved = self.savers, self.made, Counter[str]()
        for calls, _ in self.saves:
            num_saved.update(call.path for call in calls)
        self._num_calls = Counter(x.path for x in {x for calls, _ in self.saves for x in calls})
        all_inside: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        for key, paths in savers.items():
            around = [
                {*accumulate(path.split("."), "{}.{}".format)} & self._sites.keys()
                for path in paths
            ]
            for path in set().union(*around):
                all_inside[path][key] = all(path in one for one in around)
        readers = Counter(
            (self._sites[path].name, key) for path, all_ in self._inputs.items() for key in all_
        )
        for path, site in self._sites.items():
            inside = all_inside[path]
            if not inside:
                continue
            self.saving.add(path)
            units: defaultdict[str, list[int]] = defaultdict(list)
            for key in inside.keys() & made.keys():
                units[made[key]].append(self.sizes[key])
            inputs = self._inputs[path]
            kept_bytes = sum(
                size
                for key, size in inputs.items()
                if key not in savers and readers[site.name, key] == 1
            )
            for has_units, layers in enumerate(found):
                saved = {
                    x: is_own for x, is_own in inside.items() if not has_units or x not in made
                }
                freed_bytes = sum(
                    self.sizes[x] for x, is_own in saved.items() if is_own and x not in inputs
                )
                own = [KEEP]
                if site.name == MOE_ACT and times.is_partial:
                    continue
                if site.name == MOE_ACT:  # what is behind it saves what it returns
                    experts = {} if has_units else all_inside[path.rpartition(".")[0]]
                    every = saved | {x: y for x, y in experts.items() if made.get(x) == "mlp_act"}
                    num_bytes = sum(self.sizes[x] for x, is_own in every.items() if is_own)
                    us = _UNIT_US_PER_BYTE * num_bytes + times.exposed_us(_SITE_US)
                    own.append(Action(((MOE_ACT, "recompute"),), num_bytes, us))
                elif not site.refusal and freed_bytes > kept_bytes:
                    us = times.us(path) + times.exposed_us(_SITE_US)
                    own.append(Action(((site.name, "recompute"),), freed_bytes - kept_bytes, us))
                if gbps > 0 and site.name != MOE_ACT and may_offload(site.name, path):
                    own += self._offloads(path, saved, num_saved[path], times, gbps)
                again = KEEP
                for unit, sizes in units.items() if has_units and site.name == "layer" else ():
                    host_us = (_SITE_US + _GROUP_US) * len(sizes)
                    us = _UNIT_US_PER_BYTE * sum(sizes) + times.exposed_us(host_us)
                    again = total((again, Action(((unit, "recompute"),), sum(sizes), us)))
                layers[site.layer].append(_SeenSite(site.name, own, again))
        most_bytes = {number: gbps * 1e3 * us for number, us in times.copied_us().items()}
        kinds: list[dict[int, tuple[Action, ...]]] = []
        for layers in found if made else found[:1]:
            given = {x: tuple(_actions_of(seen, most_bytes[x])) for x, seen in layers.items()}
            for number, actions in kinds[0].items() if kinds else ():
                # In what runs again as a whole no function does by itself.
                given[number] += tuple(x for x in actions if ("layer", "recompute") in x.parts)
            kinds.append(given)
        last = max(found[0], default=-1)
        return [_alike(one | {number: one[last] for number in numbers if one}) for one in kinds]

    def _offloads(
        self, path: str, saved: Mapping[int, bool], num_saved: int, times: SiteTimes, gbps: float
    ) -> Iterator[Action]:
        """Yield what offloads a site, of what it saves, and whether it is saved there alone."""
        site, inner = self._sites[path], Counter[str]()
        for key, is_own in saved.items():
            if is_own and times.host_share < _MOST_EXPOSED:
                inner[_part(site, path, self.savers[key][0])] += self.sizes[key]
        # A group takes some of the host's time, so that it has to be worth a copy.
        least_bytes = max(_LEAST_BYTES, _PART_US * gbps * 1e3)
        large = sorted(x for x, size in inner.items() if x and size >= least_bytes)
        sizes = [(self.sizes[x], is_own, len(self.savers[x])) for x, is_own in saved.items()]
        found = _offloads(sizes, self._num_calls[path], has_inner=bool(large))
        for what, num_tensors, num_views, num_bytes in found:
            host_us = _GROUP_US + _TENSOR_US * num_tensors + _VIEW_US * num_views
            us = times.exposed_us(host_us + _KEPT_US * num_saved)
            us += times.copy_share * num_bytes / gbps / 1e3
            parts: list[Part] = [(site.name, what)]
            parts += [(part, "all") for part in large if what == "all"]
            yield Action(tuple(parts), num_bytes, us, num_bytes)


def _part(site: Site, path: str, saver: str) -> str:
    """Return the part of a site that saves something, as rows name it; empty of the site itself."""
    name = saver.removeprefix(path).lstrip(".").partition(".")[0]
    inner = getattr(site.module(), name, None)
    if not (isinstance(inner, nn.Module) and has_forward(inner)):
        return ""
    depth = 0 if site.name == "layer" else 1 + site.name.count(".")  # below its layer
    return ".".join([*path.split(".")[len(path.split(".")) - depth :], name])


def _offloads(
    sizes: Iterable[tuple[int, bool, int]], num_calls: int = 1, *, has_inner: bool
) -> Iterator[tuple[int | Literal["all"], int, int, int]]:
    """Yield what of a site may be offloaded, of the sizes of what it saves.

    With these come whether they are saved there alone, and how often. With what is offloaded comes
    how many tensors that is, how often these are saved, and their bytes. Rows pick the largest
    tensors of each call, all alike; where others save one too, all that are left to a site may go.
    With parts that are groups of their own (``has_inner``) all of it leaves sooner.
    """
    num_bytes, num_views, ordered = 0, 0, sorted(sizes, key=lambda one: (-one[0], one[1]))
    for number in range(1, _MOST_TENSORS + 1):
        taken = ordered[(number - 1) * num_calls : number * num_calls]
        if not (taken and all(own and size >= _LEAST_BYTES for size, own, _ in taken)):
            break
        num_bytes += sum(size for size, *_ in taken)
        num_views += sum(views for *_, views in taken)
        if number * num_calls < len(ordered) or not has_inner:
            yield number, min(number * num_calls, len(ordered)), num_views, num_bytes
    own = [(size, views) for size, is_own, views in ordered if is_own]
    all_bytes, all_views = map(sum, zip(*own, strict=True)) if own else (0, 0)
    if all_bytes - (0 if has_inner else num_bytes) >= _LEAST_BYTES:
        yield "all", len(own), all_views, all_bytes


class _SeenSite(NamedTuple):
    name: str
    actions: list[Action]
    """What may be done with it, but for what functions have made."""
    again: Action
    """Of a layer: that these run again."""


def _actions_of(found: list[_SeenSite], most_bytes: float) -> Iterator[Action]:
    """Yield what is done with one layer at first, and may be: with the whole, or with its parts."""
    base, choices = KEEP, dict[str, list[Action]]()
    for seen in found:
        base = total((base, seen.again))  # all else comes on top of it
        choices[seen.name] = _merged(choices.get(seen.name), seen.actions)
    for name in [name for name in choices if name.endswith(ROUTED)]:
        choices.setdefault("mlp", [KEEP]).extend(choices.pop(name)[1:])  # one or the other
    whole = choices.pop("layer", [KEEP])[1:]
    if any(action.copied_bytes for all_ in choices.values() for action in all_):
        # A group is released as a whole, so that small ones are sooner.
        whole = [action for action in whole if not action.copied_bytes]
    yield base
    for action in whole:
        if action.copied_bytes <= most_bytes and (action.copied_bytes or not base.parts):
            yield total((base, action))
    for chosen in product(*choices.values()):
        action = total((base, *chosen))
        if action.parts != base.parts and action.copied_bytes <= most_bytes:
            yield action


def _merged(before: list[Action] | None, own: list[Action]) -> list[Action]:
    """Return what may be done with sites of one name in layers of one number: the same with all."""
    if before is None:
        return own
    by_part: dict[tuple[Part, ...], Action] = {action.parts: action for action in own}
    return [
        total((action, by_part[action.parts]))._replace(parts=action.parts)
        for action in before
        if action.parts in by_part
    ]


def _alike(given: Mapping[int, tuple[Action, ...]]) -> Alike:
    """Give layers that differ in their times alone the same actions, with the mean of the times."""
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, actions in given.items():
        groups[tuple(action._replace(us=0.0) for action in actions)].append(number)
    found: Alike = []
    for numbers in groups.values():
        columns = zip(*(given[number] for number in numbers), strict=True)
        actions = tuple(
            column[0]._replace(us=sum(action.us for action in column) / len(column))
            for column in columns
        )
        found.append((numbers, actions))
    return found


class SiteTimes(CallTimes):
    """Sees how long the sites of a model run in one forward, and what surrounds them."""

    def __init__(
        self, sites: Mapping[str, Site], backend: Backend, *, holds_back: bool = False
    ) -> None:
        super().__init__(sites, backend, holds_back=holds_back)
        self._host_us, self._num_layers = 0.0, 0
        """What all layers have taken to be launched, and how many those were."""
        self._reached: list[tuple[str, Any]] = []
        """Layers whose backward has begun, in order, and when."""
        self.is_partial = False
        """Whether a backward was for some tensors alone, in which checkpoints raise."""
        self.sizes = [1.0]
        """As ``scale``, of other forwards in which rows will be followed."""

    def _ended(self, path: str, began_us: float, args: Any, output: Any) -> None:
        if self._sites[path].name != "layer":
            return
        self._host_us += self._backend.host_us() - began_us
        self._num_layers += 1
        hook_backward(output, partial(self._reach, path))

    def _reach(self, path: str, grad: object) -> None:
        self._reached.append((path, self._now()))
        self.is_partial |= not torch.autograd._is_checkpoint_valid()

    def copied_us(self) -> dict[int, float]:
        """Return, by layer, how long copies of what it saves may take.

        The last backward, whose end isn't seen, is taken to be like the others. Where none was,
        forward alone counts.
        """
        backward_us = defaultdict[str, float](float)
        for (path, began), (other, ended) in pairwise(self._reached):
            if path.partition(".")[0] == other.partition(".")[0]:  # of one chunk, on end
                us = self.scale * self._backend.sync_elapsed_us(began, ended)
                backward_us[path] += _BACKWARD_SHARE * us
        usual_us = median(backward_us.values()) if backward_us else math.inf
        found = defaultdict[int, float](float)
        for path, site in self._sites.items():
            if site.name == "layer":
                forward_us = _LAYER_SHARE * self.us(path)
                found[site.layer] += min(forward_us, backward_us.get(path, usual_us))
        return found

    @property
    def forward_us(self) -> float:
        """How long all layers have run."""
        return sum(self.us(path) for path, site in self._sites.items() if site.name == "layer")

    def link_bytes(
        self, gbps: float, numbers: Iterable[int], *, is_pipeline: bool
    ) -> dict[int, float]:
        """Return `link_bytes` of layers; those that were not timed are like the last that was.

        One that is called again is deep, as in a pipeline.
        """
        by_layer, calls = defaultdict[int, float](float), Counter(path for path, *_ in self._spans)
        for path, site in self._sites.items():
            by_layer[site.layer] += self.us(path) if site.name == "layer" else 0.0
        last_us = by_layer[max(by_layer)] if by_layer else 0.0
        share = _REPLAY_SHARE if self.holds_back else LINK_SHARE
        order, wanted = dict.fromkeys(self._sites[path].layer for path in calls), sorted(numbers)
        called = [number for number in order if number in wanted]
        own_us = {x: by_layer.get(x, last_us) for x in max(called, wanted, key=len)}
        again = {site.layer for path, site in self._sites.items() if calls[path] > 1}
        return link_bytes(own_us, share * gbps * 1e3, own_us if is_pipeline else again)

    @property
    def copy_share(self) -> float:
        """How much of its own time a copy takes from the device."""
        return _REPLAY_COPY_SHARE if self.holds_back else _COPY_SHARE

    @property
    def host_share(self) -> float:
        """How much of what rows take of the host's time in a layer delays the device, at most."""
        return self.exposed_us(_LAYER_US) / _LAYER_US

    def exposed_us(self, host_us: float) -> float:
        """Return how long the device waits where a layer takes so much more of the host's time.

        All of it where it waits for the host, less where layers take longer than to be launched.
        What else rows do in the layer takes of the same slack.
        """
        if self.holds_back or not self._host_us:  # on virtual time the host takes none
            return 0.0
        device_us, most_us = self.forward_us / self.scale, max(host_us, _LAYER_US)
        slack_us = [(device_us * size - self._host_us) / self._num_layers for size in self.sizes]
        return host_us * mean(min(1.0, max(0.0, 1 - slack / most_us)) for slack in slack_us)

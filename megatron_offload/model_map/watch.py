"""One forward of a model, watched: which call saves which memory, and whether rows are whole.

A tensor that several calls save is freed only where all of them are offloaded: q, k and v read one
norm's output, and to offload two of three frees nothing. Such rows are refused. What a norm or an
activation returns can only be dropped where it is saved, so that behind the forward hooks stand
there as well.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import eq
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from megatron_offload.core.row_config import UNITS, RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.hooks import graph_break, put_on, take_off
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.observer import Observer
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import ConfigError
from megatron_offload.memory.layout import layout_of
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.model_map.module_hooks import (
    compiled_parts,
    hook_calls,
    named_modules,
    remove,
    unhook,
)
from megatron_offload.model_map.offload_site import (
    FindManager,
    LargestTensors,
    OffloadSite,
    SaverSite,
    outputs,
)
from megatron_offload.model_map.rows import FoundRows
from megatron_offload.model_map.structure import has_forward, keeps_inside

_logger = logging.getLogger(__name__)

MayMove = Callable[[torch.Tensor], bool]


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a module."""

    path: str


class SavedMemory(Observer):
    """What a forward saves, by module, between `watch` and `end`.

    Attributes:
        manager: whose forward it is, if there is one.
        transfers: of the manager, which takes the hooks off that an interrupt has left.
        sizes: by the identity of storages, in the order of saving, the bytes that would be copied.
        saves: for each tensor that was saved, but parameters, the calls around it, and the identity
            of its storage; None of what can't be offloaded.
        made: by the identity of storages, the site by which rows recompute what is in there.
        storages: these, as long as no other gets their identity.
    """

    needs_groups = False

    def __init__(
        self,
        may_move: MayMove,
        manager: PipelineOffloadManager | None = None,
        rows: FoundRows | None = None,
    ) -> None:
        self.manager, self.transfers = manager, None if manager is None else manager.transfers
        self.sizes: dict[int, int] = {}
        self.saves: list[tuple[tuple[_Call, ...], int | None]] = []
        self._spans: dict[int, tuple[int, int]] = {}  # of all tensors in each, first byte and end
        self.made: dict[int, str] = {}
        self.storages: list[StorageRef] = []
        self._may_move, self._rows = may_move, rows or FoundRows({}, {}, frozenset())
        self._calls: list[_Call] = [_Call("")]
        self._is_over = True
        self.called = set[str]()
        """Paths of modules."""
        self._handles: list[RemovableHandle] = []
        self._leaves = set[str]()  # modules of which only what they return may be dropped
        self._unseen = set[str]()  # sites that return what is of a class of its own

    def watch(self, modules: Mapping[str, nn.Module], owner: Hashable = None) -> None:
        """Watch what comes, in modules by their dotted names that are in no compiled graph."""
        self._is_over, compiled = False, compiled_parts(modules.values())
        for path, module in modules.items():
            if path and has_forward(module) and module not in compiled:
                enter, leave = partial(self._enter, path), partial(self._leave, path)
                how: Any = {"is_outer": True, "ends_graph": path in self._rows.offloaded}
                self._handles += hook_calls(module, enter, leave, owner=owner, **how)
        put_on(self.pack, SavedTensor.unpack)

    def end(self) -> None:
        """Watch no more."""
        self.stop()
        remove(self._handles)

    def stop(self) -> None:
        """Watch no more, and leave the hooks on modules in their places until `end`."""
        take_off(partial(eq, self.pack))
        self._is_over = True

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_over:
            self._calls.append(_Call(path))
            self.called.add(path)

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        while len(self._calls) > 1:  # more than one where another hook has raised
            if self._calls.pop().path == path:
                break
        is_dropped = self._rows.drops_output(path) and not self._is_over
        for tensor in outputs((), output) if is_dropped else ():
            if any(tensor is given for given in args):
                continue  # it only returns it
            is_plain = type(tensor) is torch.Tensor and not is_functorch_wrapped_tensor(tensor)
            if not is_plain:
                self._unseen.add(self._rows.recomputed[path].site)
            elif tensor.layout is torch.strided:
                self.storages.append(StorageRef(tensor.untyped_storage()))
                self.made[self.storages[-1].cdata] = self._rows.recomputed[path].site
                if keeps_inside(module) and self._may_move(tensor):
                    self._leaves.add(path)

    @graph_break
    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Note a tensor that no row is about; the pack hook."""
        if not is_parameter(tensor):
            self.tensor_saved(tensor)
        return SavedTensor(tensor, "kept")

    @property
    def chunk(self) -> ChunkOffloadHandler | None:
        """Whose forward it is, as of `AutomaticGroups`."""
        return None if self.manager is None else self.manager.cur_forward_chunk()

    def tensor_saved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that is saved now."""
        key = None
        if self._may_move(tensor):
            key = tensor.untyped_storage()._cdata
            if key not in self.sizes:
                self.storages.append(StorageRef(tensor.untyped_storage()))
            layout = layout_of(tensor)
            low, high = self._spans.get(key, (layout.low, layout.high))
            low, high = self._spans[key] = min(low, layout.low), max(high, layout.high)
            self.sizes[key] = high - low
            recipes = {} if self.chunk is None else self.chunk.recipes
            if key in recipes:  # a function has made it
                self.made[key] = recipes[key].unit
        self.saves.append((tuple(self._calls), key))

    @cached_property
    def savers(self) -> dict[int, list[str]]:
        """By the identity of storages, which modules save each, once all was watched."""
        found: dict[int, list[str]] = {}
        for calls, key in self.saves:
            if key is not None:
                found.setdefault(key, []).append(calls[-1].path)
        return found

    def idle_rows(self, manager: PipelineOffloadManager) -> Iterator[tuple[RowConfig, str]]:
        """Yield each row that frees nothing of sites that were called, and why.

        Raises:
            ConfigError: one names modules of which nothing but what they return can be dropped.
        """
        recomputed, named = self._rows.recomputed, {**self._rows.offloaded, **self._rows.recomputed}
        saved = {
            self.made.get(key) for key, paths in self.savers.items() if {*paths} - {*recomputed}
        }
        stats, inside = manager.transfers.stats, defaultdict[str, set[bool]](set)
        for calls, key in self.saves:
            inner = next((x.path for x in reversed(calls) if x.path in named), "")
            inside[inner].add(key is not None)  # whether it can be offloaded
        around = tuple(f"{path}." for path in recomputed)
        for row in manager.rows or ():
            own = {path for path, one in named.items() if one is row}
            is_unit = row.recompute and row.site in UNITS
            is_known = not own.isdisjoint(self.called) or (is_unit and not own)
            if not is_known or (row.recompute and row.site in saved | self._unseen):
                continue
            called = stats.by_name.get(row.site)  # that may run again
            if is_unit or (row.recompute and own <= self._leaves):
                what = f"nothing saves what {min(own, default='a function of this kind')} returns "
                what += "but what is recomputed as well"
                if not is_unit:
                    outer = row.site.rpartition(".")[0].strip("*.") or "layer"
                    raise ConfigError(f"row {row}: {what}; name what is around it: {outer!r}")
                yield row, what
            elif row.recompute:
                if not (called.recomputed_bytes if called else any(inside[path] for path in own)):
                    yield row, "nothing is saved inside, but by what is recomputed around it"
            elif not any(True in inside[path] for path in own) and (
                not stats.num_hidden_groups or all(path.startswith(around) for path in own)
            ):
                yield row, "nothing is saved inside that could be offloaded, or it is recomputed"

    def choose(self, largest: Mapping[str, LargestTensors]) -> Mapping[str, str]:
        """Choose which of the tensors that rows name are offloaded; return what drops outputs.

        That is, by module, the site that it saves an output of. Of a row for all that a site saves
        some may be others' too, which is kept from here on.

        Raises:
            ConfigError: a row would free nothing, because others save what it names as well.
        """
        rows, others = self._rows, defaultdict[int, set[str]](set)
        keys_of: defaultdict[_Call, set[int]] = defaultdict(set)
        for calls, key in self.saves:
            # By the calls, not by names: a layer may call a part that another's name is first of.
            around = next((x for x in reversed(calls) if x.path in rows.offloaded), None)
            if key is not None and around is not None:
                keys_of[around].add(key)
            elif key is not None:
                others[key].add(calls[-1].path)
        with_made = set[str]()
        for call, keys in keys_of.items():
            row = rows.offloaded[call.path]
            if not keys.isdisjoint(self.made):
                with_made.add(call.path)
            in_order = (key for key in self.sizes if key in keys - self.made.keys())
            # Of one size the first ones.
            named = sorted(in_order, key=lambda key: -self.sizes[key])[: row.most]
            shared = [key for key in named if key in others]
            if shared and (row.most is not None or len(shared) == len(named)):
                savers = (saver or "the model" for saver in others[shared[0]])
                raise ConfigError(
                    f"row {row}: {', '.join(sorted(savers))} also save "
                    f"{format_bytes(self.sizes[shared[0]], 1)} of what {call.path} would offload, "
                    "which would not be freed; let rows offload those too, or one row what is "
                    "around them all"
                )
        dropped = {
            path: self.made[made]
            for made in others
            if made in self.made
            for path in others[made] - rows.recomputed.keys()
        }
        # Hooks inside others see a tensor first, and those around don't.
        hooked = rows.offloaded.keys() | dropped.keys()
        counts: Counter[_Call] = Counter()
        numbers: defaultdict[str, dict[bool, set[int]]] = defaultdict(lambda: defaultdict(set))
        for calls, key in self.saves:
            inner = next((x for x in reversed(calls) if x.path in hooked), None)
            if inner is not None:  # what is recomputed is dropped only where all who save it do so
                is_taken = key is None or key in self.made or key not in others
                numbers[inner.path][is_taken].add(counts[inner])
                counts[inner] += 1
        for path, row in rows.offloaded.items():
            if row.most is None:
                left_out = numbers[path][False] - numbers[path][True]
                num_saved = max((n for call, n in counts.items() if call.path == path), default=0)
                largest[path].num_saved = num_saved
                largest[path].chosen = frozenset(range(num_saved)) - left_out if left_out else None
            elif path in with_made:  # the next call chooses: these are recomputed from here on
                largest[path].chosen = None
        return dropped


class RowWatch:
    """Watches the first forward of a model that is recorded, and refuses rows that free nothing.

    Its hooks are kept until another step begins: a function that is compiled with them has another
    graph than without, which may save in another order, and a rerun has to have the same.
    Behind it hooks stand where outputs are saved that rows recompute.

    Attributes:
        largest: by module that rows offload, which of its tensors that is.
    """

    def __init__(self, root: nn.Module, rows: FoundRows, find_manager: FindManager) -> None:
        self._root, self._rows, self._find_manager = ref(root), rows, find_manager
        self._seen: SavedMemory | None = None
        self._thread = self._watched_in = 0  # the latter is a step's number, while hooks are kept
        self._savers: Mapping[str, str] | None = None  # as a forward has shown
        self.largest = {path: LargestTensors(row.most) for path, row in rows.offloaded.items()}
        if root in _watched:
            rows_then, parts, largest, savers = _watched[root]
            has_same = [part() for part in parts] == [*self._modules().values()]
            if has_same and rows_then == rows.what:
                self.largest, self._savers = largest, savers

    def _hook_savers(self, savers: Mapping[str, str]) -> None:
        """Hook what saves outputs that rows recompute."""
        modules, rows = self._modules(), self._rows
        for path, name in savers.items():
            tokens = (row.min_tokens for row in rows.recomputed.values() if row.site == name)
            site = SaverSite(name, self._find_manager, min_tokens=min(tokens, default=0))
            hook_calls(modules[path], site.begin, site.end, owner=OffloadSite)

    def hook(self, *, is_called: bool) -> None:
        """Hook what a forward has shown; if none was watched, the model, where a call of it is one.

        Those of another watch were taken off.
        """
        if self._savers is not None:
            self._hook_savers(self._savers)
        elif is_called:
            hook_calls(
                self._modules()[""],
                lambda *_: self.begin(),  # behind what begins a chunk
                lambda *given: self.end(has_failed=given[-1] is None),
                owner=RowWatch,
                ends_graph=True,
            )

    def _modules(self) -> dict[str, nn.Module]:
        root = self._root()
        return {} if root is None else named_modules(root)

    def begin(self) -> None:
        """Begin to watch a forward, if it is the first."""
        manager = self._find_manager()
        if manager is not None and self._watched_in not in (0, manager.step_number):
            self._watched_in = 0
            owners = {SavedMemory} if self._savers is None else {SavedMemory, RowWatch}
            unhook(owners, self._modules().values())
        if self._savers is not None or manager is None or not manager.records():
            return
        if self._seen is not None:
            if self._thread != get_ident():
                return
            self._stop()  # an interrupt has ended it
        chunk = manager.cur_forward_chunk()
        if chunk is None:
            return
        self._thread = get_ident()
        self._seen = SavedMemory(chunk.may_move, manager, self._rows)
        manager.observers.append(self._seen)
        self._seen.watch(self._modules(), SavedMemory)

    def _stop(self) -> SavedMemory:
        seen, self._seen = self._seen, None
        assert seen is not None
        assert seen.manager is not None
        seen.manager.observers.remove(seen)
        seen.stop()
        self._watched_in = seen.manager.step_number
        return seen

    def end(self, *, has_failed: bool) -> None:
        """End what `begin` has begun; the next shows all if that has failed, or come by no site.

        Raises:
            ConfigError: as `SavedMemory.choose`.
        """
        if self._seen is None or self._thread != get_ident():
            return
        seen, modules = self._stop(), self._modules()
        manager = seen.manager
        savers: Mapping[str, str] = {}
        sites = self._rows.offloaded.keys() | self._rows.recomputed.keys()
        is_of_sites = not sites or not sites.isdisjoint(seen.called)
        if manager is not None and seen.saves and is_of_sites and not has_failed:
            try:
                idle = [*seen.idle_rows(manager)]
                savers = seen.choose(self.largest)
                if not manager.rows_are_own:
                    manager.idle_rows = [row for row, _ in idle]
                    for one in idle:
                        _logger.warning("row %s does nothing: %s", *one)
            except ConfigError as error:
                if not manager.rows_are_own:
                    raise
                manager.refused_rows = str(error)
            self._savers = savers
            parts = [*map(ref, modules.values())]
            _watched[modules[""]] = self._rows.what, parts, self.largest, savers
            self._hook_savers(savers)


_Shown = tuple[object, list[ref[nn.Module]], dict[str, LargestTensors], Mapping[str, str]]
_watched = WeakKeyDictionary[nn.Module, _Shown]()
"""What a watched forward of a model has shown: under which rows, in which modules, which tensors
are offloaded, and who saves what rows recompute."""

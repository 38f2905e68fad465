"""One forward of a model, watched: which call saves which memory, and whether rows are whole.

A tensor that several calls save is freed only where all of them are offloaded: q, k and v read one
norm's output, and to offload two of three frees nothing. Such rows are refused. What a norm or an
activation returns can only be dropped where it is saved, so that behind the forward hooks stand
there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.core.row_config import RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.hooks import put_on, take_off
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.module_hooks import ModuleHook, hooks_of, named_modules
from megatron_offload.engine.observer import Observer
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import ConfigError
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.model_map.offload_site import (
    FindManager,
    LargestTensors,
    OffloadSite,
    outputs,
)
from megatron_offload.model_map.rows import FoundRows
from megatron_offload.model_map.structure import layers_of

MayMove = Callable[[torch.Tensor], bool]


@dataclass(slots=True)
class Memory:
    """A piece of memory that a forward has saved.

    Attributes:
        storage: keeps its identity.
        num_bytes: the largest tensor in it that was saved.
        savers: which calls have saved it, by module, and their how manieth tensor it was.
    """

    storage: StorageRef
    num_bytes: int = 0
    savers: list[tuple[str, int]] = field(default_factory=list)


class SavedMemory(Observer):
    """What a forward saves, by module, while its hooks are on modules.

    Attributes:
        found: by the identity of storages, in the order of saving.
        made: by module, the storages that its calls have returned.
        num_saved: by module, how many tensors its last call has saved.
    """

    needs_groups = False

    def __init__(self, may_move: MayMove, rows: FoundRows) -> None:
        self.found: dict[int, Memory] = {}
        self.made: dict[str, list[StorageRef]] = {}
        self.num_saved: dict[str, int] = {}
        self._may_move, self._rows = may_move, rows
        self._calls: list[tuple[str, list[int]]] = []

    def watch(self, modules: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Hook modules, by their dotted names; return the handles."""
        handles: list[RemovableHandle] = []
        for path, module in modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                enter = ModuleHook(lambda *_, path=path: self.enter(path))
                leave = ModuleHook(lambda *given, path=path: self.leave(path, given[-1]))
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
        return handles

    def enter(self, path: str) -> None:
        """Begin a call of a module."""
        self._calls.append((path, [0]))

    def leave(self, path: str, output: Any) -> None:
        """End it."""
        while self._calls:  # more than one where another hook has raised
            last, (num_saved,) = self._calls.pop()
            if last == path:
                self.num_saved[path] = num_saved
                break
        if self._rows.drops_output(path):
            tensors = [x for x in outputs((), output) if isinstance(x, torch.Tensor)]
            with suppress(NotImplementedError):  # it has no storage
                self.made[path] = [StorageRef(x.untyped_storage()) for x in tensors]

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Note a tensor that no row is about; the pack hook."""
        self.tensor_saved(tensor)
        return SavedTensor(tensor, "kept")

    def tensor_saved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that is saved now."""
        if not self._calls:
            return
        path, (number,) = self._calls[-1]
        for around, count in reversed(self._calls):
            count[0] += 1
            if around in self._rows.offloaded:
                break  # from here on no hook of another sees it
        if self._may_move(tensor):
            key = tensor.untyped_storage()._cdata
            memory = self.found.get(key)
            if memory is None:
                memory = self.found[key] = Memory(StorageRef(tensor.untyped_storage()))
            memory.num_bytes = max(memory.num_bytes, tensor.nbytes)
            memory.savers.append((path, number))

    def check(self, layers: Mapping[str, int]) -> None:
        """Raise a `ConfigError` where rows would free nothing, because others save it as well."""
        rows = self._rows
        of_path: dict[str, list[Memory]] = {}
        for memory in self.found.values():
            for path in {rows.place_of(saver) for saver, _ in memory.savers} - {""}:
                of_path.setdefault(path, []).append(memory)
        for path, row in rows.offloaded.items():
            largest = sorted(of_path.get(path, ()), key=lambda one: -one.num_bytes)
            for memory in largest[: row.most]:
                others = [saver for saver, _ in memory.savers if not rows.place_of(saver)]
                if others:
                    raise ConfigError(self._refusal(path, row, memory, others, layers))

    def _refusal(
        self,
        path: str,
        row: RowConfig,
        memory: Memory,
        others: list[str],
        layers: Mapping[str, int],
    ) -> str:
        layer = next((one for one in layers if f"{path}.".startswith(f"{one}.")), "")
        names = {one.removeprefix(f"{layer}.") if one != layer else "layer" for one in others}
        said = ", ".join(sorted(names))
        return (
            f"row {row}: {said} in {layer} also save {format_bytes(memory.num_bytes, 1)} of what "
            "it would offload, so nothing would be freed; let rows offload those too, or one row "
            "what is around them all"
        )


def _savers_of(seen: SavedMemory, rows: FoundRows) -> dict[str, tuple[str, LargestTensors]]:
    """Return, by module, the site that it saves an output of, and which of its tensors that is."""
    found: dict[str, tuple[str, set[int]]] = {}
    for path, made in seen.made.items():
        for storage in made:
            memory = seen.found.get(storage.cdata)
            for saver, number in memory.savers if memory else ():
                if saver not in rows.recomputed and not rows.place_of(saver):
                    found.setdefault(saver, (rows.recomputed[path], set()))[1].add(number)
    return {
        saver: (name, LargestTensors(0, frozenset(numbers), seen.num_saved[saver]))
        for saver, (name, numbers) in found.items()
    }


class RowWatch:
    """Watches the first forward of a model that is recorded, and refuses rows that free nothing.

    Behind it hooks stand where outputs are saved that rows recompute.
    """

    def __init__(self, root: nn.Module, rows: FoundRows, find_manager: FindManager) -> None:
        self._root, self._rows, self._find_manager = ref(root), rows, find_manager
        self._seen: SavedMemory | None = None
        self._manager: PipelineOffloadManager | None = None
        self._inner: list[RemovableHandle] = []

    def hook(self) -> list[RemovableHandle]:
        """Hook the model; the hooks of another watch go."""
        root = self._modules()[""]
        known, handles = _watched.get(root), hooks_of(RowWatch, root)
        if known is not None and known[0] == self._rows:
            return self._hook_savers(known[1])
        _watched.pop(root, None)
        begin, end = ModuleHook(self._begin), ModuleHook(self._end)
        handles.append(root.register_forward_pre_hook(begin))  # behind what begins a chunk
        handles.append(root.register_forward_hook(end, always_call=True))
        return handles

    def _modules(self) -> dict[str, nn.Module]:
        root = self._root()
        assert root is not None
        return named_modules(root)

    def _hook_savers(self, savers: Mapping[str, tuple[str, LargestTensors]]) -> list[Any]:
        modules, handles = self._modules(), list[RemovableHandle]()
        for path, (name, tensors) in savers.items():
            own = hooks_of(OffloadSite, modules[path])
            own += OffloadSite(name, self._find_manager, tensors).hook(modules[path])
            handles += own
        return handles

    def _begin(self, module: nn.Module, args: Any) -> None:
        manager = self._find_manager()
        if self._seen is not None or manager is None or not manager.records():
            return
        chunk = manager.cur_forward_chunk()
        if chunk is None:
            return
        self._manager, self._seen = manager, SavedMemory(chunk.may_move, self._rows)
        inner = {path: part for path, part in self._modules().items() if path}
        self._inner = self._seen.watch(inner)
        self._seen.enter("")
        manager.observers.append(self._seen)
        put_on(self._seen.pack, SavedTensor.unpack)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        seen, manager, self._seen = self._seen, self._manager, None
        if seen is None or manager is None:
            return
        take_off(partial(eq, seen.pack))
        manager.observers.remove(seen)
        for handle in self._inner:
            handle.remove()
        self._inner.clear()
        if output is None:
            return  # it has raised: the next forward shows all
        seen.leave("", output)
        modules = self._modules()
        seen.check(layers_of(modules))
        savers = _savers_of(seen, self._rows)
        _watched[modules[""]] = self._rows, savers
        hooks_of(RowWatch, modules[""])
        self._hook_savers(savers)


_watched: WeakKeyDictionary[nn.Module, tuple[FoundRows, dict[str, tuple[str, LargestTensors]]]]
_watched = WeakKeyDictionary()
"""By model, the rows that were found whole, and where what they recompute is saved."""

"""Hooks of modules whose calls are groups: where a row stands, and where a name was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import nn

from megatron_offload.engine.boundary import chunk_of, commit_group, start_group, tick
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import OffloadGroup, Recipe, Record
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.model_map.module_hooks import has_tokens

FindManager = Callable[[], PipelineOffloadManager | None]
"""Returns whose forward it is; None where it is no manager's."""

Take = Callable[[Any, Any], Sequence[Any]]
"""Takes tensors out of what a hook is given."""


def inputs(args: Any, kwargs: Any) -> Sequence[Any]:
    """Return what a module was given, of what its pre-hook was."""
    return *args, *kwargs.values()


def outputs(args: Any, output: Any) -> Sequence[Any]:
    """Return what a module has returned, of what its hook was given."""
    if isinstance(output, dict):
        return tuple(dict.values(output))
    return output if isinstance(output, (tuple, list)) else (output,)


_MOST_OTHERS = 4
"""Behind so many calls that save another number of tensors, each is recorded whole."""


class LargestTensors:
    """Which of the tensors that calls of one module save are the largest, as the first has shown.

    The first call is recorded whole. Of those that follow only what was chosen then, as long as
    they save as many; calls that differ by turns, or in which something is recomputed, are each
    recorded whole. Where ``most`` is None, all are offloaded that others don't save too.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.chosen: frozenset[int] | None = None
        self.num_saved = self.num_others = 0

    def begin(self) -> _Call:
        """Return the `Pick` of a call that begins."""
        return _Call(self)


class _Call:
    def __init__(self, site: LargestTensors) -> None:
        self._site, self._chosen, self._num_saved = site, site.chosen, 0
        self._records: list[tuple[int, ref[Record]]] = []

    def takes(self) -> bool:
        number = self._num_saved
        self._num_saved = number + 1
        return self._chosen is None or number in self._chosen

    def note(self, record: Record) -> None:
        if self._chosen is None:
            self._records.append((self._num_saved - 1, ref(record)))

    def choose(self, group: OffloadGroup) -> None:
        site = self._site
        if self._chosen is not None and self._num_saved != site.num_saved:
            site.chosen = None  # it is another call
            site.num_others += 1
        if self._chosen is not None or site.most is None:
            return
        own = [block for block in group.blocks() if block.group is group]
        copied = [block for block in own if block.recipe is None]  # else it is recomputed
        largest = sorted(copied, key=lambda block: -block.num_bytes)[: site.most]
        for block in own:
            block.is_kept = block not in largest
        if len(copied) < len(own):
            return  # what is recomputed, and what from, has to be recorded
        saved = [(number, found()) for number, found in self._records]
        if site.num_others < _MOST_OTHERS:
            chosen = (number for number, record in saved if record and record.block in largest)
            site.chosen, site.num_saved = frozenset(chosen), self._num_saved


class OffloadSite:
    """Makes a group of what runs between two hooks.

    Args:
        name: the group's.
        find_manager: as there.
        largest: which of its tensors are offloaded; None for all.
        takes: what begins and ends the group in backward: its first and its last tensors.
        min_tokens: of a call that is a group; one with less is none, unless rows are on trial.
    """

    def __init__(
        self,
        name: str,
        find_manager: FindManager,
        largest: LargestTensors | None = None,
        takes: tuple[Take, Take] = (inputs, outputs),
        min_tokens: int = 0,
    ) -> None:
        self.name, self.largest, self._min_tokens = name, largest, min_tokens
        self._find_manager, (self._first, self._last) = find_manager, takes
        self._open: list[PipelineOffloadManager | None] = []

    def begin(self, module: nn.Module, args: Any, passed: Any) -> None:
        """Begin a group."""
        manager = self._find_manager()
        if manager is None:
            return
        is_long = manager.rows_are_on_trial or has_tokens(self._min_tokens, args, passed)
        self._open.append(manager if is_long else None)
        if is_long:
            self._begin(manager, self._first(args, passed))

    def _begin(self, manager: PipelineOffloadManager, tensors: Sequence[Any]) -> None:
        pick = None if self.largest is None else self.largest.begin()
        start_group(manager, tensors, self.name, pick)
        manager.__enter__()

    def end(self, module: nn.Module, args: Any, passed: Any) -> None:
        """End the group that was begun last; there is none where another hook raised before.

        A thread that isn't in the manager's forward ends none.
        """
        if self._open and self._find_manager() is not None:
            manager = self._open.pop()
            if manager is not None:
                self._end(manager, self._last(args, passed))

    def _end(self, manager: PipelineOffloadManager, tensors: Sequence[Any]) -> None:
        manager.__exit__()
        commit_group(manager, tensors, self.name)

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        """End all that are open: the forward ended without calling the last module, or raised."""
        for _ in self._open.copy():
            self.end(module, (), {})


class SaverSite(OffloadSite):
    """Drops what a module saves of outputs that are recomputed, without a group."""

    def __init__(self, name: str, find_manager: FindManager, min_tokens: int) -> None:
        super().__init__(name, find_manager, min_tokens=min_tokens)
        self._saved: list[tuple[ChunkOffloadHandler | None, list[tuple[Recipe, Any]]]] = []

    def _begin(self, manager: PipelineOffloadManager, tensors: Sequence[Any]) -> None:
        chunk = chunk_of(manager, self.name) if manager.starts(self.name, is_marked=False) else None
        outputs: list[tuple[Recipe, Any]] = []
        self._saved.append((chunk, outputs))
        manager.put_on(None if chunk is None else partial(chunk.pack_output, outputs))

    def _end(self, manager: PipelineOffloadManager, tensors: Sequence[Any]) -> None:
        manager.__exit__()  # of another site of this module, perhaps: they end as they began
        chunk, outputs = self._saved.pop()
        if chunk is not None:
            for recipe, record in outputs:
                manager.decisions.last_call = ref(record)
                recipe.drop(record, drops=chunk.rules.recomputes)


class LayerClock:
    """Lets the step's clock go by layers in which no row offloads anything.

    Sources are released and reloads begin by that clock. Such a layer counts as the last one that
    has groups, in this chunk or in another.
    """

    def __init__(self, find_manager: FindManager) -> None:
        self._find_manager = find_manager
        self._begun_at: list[int] = []

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note where the clock is before a layer's call."""
        manager = self._find_manager()
        self._begun_at.append(-1 if manager is None else manager.window.step_bytes)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let it go by behind the call, where nothing in there did."""
        begun_at, manager = self._begun_at.pop() if self._begun_at else -1, self._find_manager()
        if manager is None or begun_at < 0 or output is None or not manager.records():
            return  # perhaps it has raised
        window = manager.window
        passed_bytes = window.step_bytes - begun_at
        if passed_bytes > 0:
            window.layer_bytes = passed_bytes
        elif window.layer_bytes:
            tick(manager, outputs((), output), window.layer_bytes)

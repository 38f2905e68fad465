"""The measured search where a model is given: the rows that free most for what they may cost.

docs/rows.md says in which steps. Exactness depends on nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import exc_info
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.autotune.followed import ADVICE
from megatron_offload.autotune.search_steps import SearchSteps, StepKind
from megatron_offload.core.row_config import RowConfig
from megatron_offload.engine.hooks import is_recording
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.model_map.module_hooks import ModuleHook

_MOST_UNCALLED = 16  # steps without a forward of the layers that are looked at


class RowSearch(SearchSteps):
    """Finds rows by a model's own steps: a manager's ``tuner`` where the model is given."""

    def is_of(self, model: nn.Module) -> bool:
        """Whether it looks for rows of this model."""
        return any(one is model for one in self._models.values())

    @property
    def is_orphan(self) -> bool:
        """Whether none of its models is left."""
        return not self._models

    def add(self, model: nn.Module) -> None:
        """Look for rows of another chunk too; begin anew where the first steps were without."""
        self._models = WeakValueDictionary(enumerate([*self._models.values(), model]))
        if self._clock is not None or self.is_converged:
            self.close()
            self._begin_anew()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._kind: StepKind = "open"
        self._mark: Any = None
        self._looked: set[nn.Module | None] = set()
        """Whose forward was looked at in this step."""
        self._takes_part = self._has_begun = False
        self._num_uncalled = 0

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at the manager's step, where that is the program's: else do nothing."""
        if self._has_groups or not self._has_begun:
            return
        self._has_begun = False
        if self.is_converged:
            self._see_memory()
        elif not self._is_graph():
            self._step_is_over()

    # Steps as they come

    def step_begins(self) -> None:
        """A forward is about to begin that no other surrounds."""
        manager, groups, clock = self.manager, self._groups(), self._clock
        self._takes_part = groups is not None and is_recording() and manager.do_offload
        if not self._takes_part or groups is None:
            return
        if self._is_outgrown:
            self._begin_anew()
        elif self.is_converged:
            self._see_memory()
        elif not self._is_graph() and (clock is None or clock.is_over()):
            groups.end_step_if_over()
            self._step_is_over()
            self._mark = self._now()[0]

    def _is_graph(self) -> bool:
        if self.manager.backend.is_capturing() and not self.is_converged:
            self.is_converged = True  # the graph has what the last eager step had
            self._say("a step was captured before a plan was found")
        return self.is_converged

    def _step_is_over(self) -> None:
        clock = self._clock
        if clock is not None:
            ended = clock.ended[0] if clock.ended else None
            self._span = self._mark, self._now()[0] if ended is None else ended
            if tokens := list(filter(None, clock.tokens)):
                self._times.add(self._span, tokens, self._kind)
                if self._kind == "rows":
                    self._has_moved |= self.manager.last_step.offloaded_bytes > 0
        if clock is None or tokens:  # else it was no forward of this model, or of nothing
            self._take_next()
            self._num_uncalled = 0
        else:
            self._num_uncalled += 1
            if self._num_uncalled > _MOST_UNCALLED:
                why = "the layers that it has aren't called, are in a graph, or others look at them"
                self._stop(why, ADVICE)
        if self._clock is not None:
            self._clock.restart()
        self._looked.clear()

    def _take_next(self) -> None:
        """Go on with the search, and follow what the next step is for."""
        kind = next(self._search, None)
        if self.is_converged:
            if not self._is_alone:
                self.close()  # a longer step changes nothing
            return
        if kind is None:
            self._stop("an interrupt has ended the search", "")
            return
        self._kind = kind
        if kind != "open":
            has_rows = kind in ("trying", "warming", "rows")
            rows = self.plan.rows() if has_rows and self.plan else self._rows
            on_trial = kind == "trying" and not self._is_tight
            self.manager.follow_rows(rows, is_own=True, on_trial=on_trial)
            self._follow_in_library(rows)

    def _follow_in_library(self, rows: Sequence[RowConfig]) -> None:
        """Let a library do in this step what rows leave to it."""

    def forward_begins(self, model: nn.Module | None = None) -> None:
        """A forward of the model has begun, or of a chunk of it."""
        if not self._has_groups:
            self._takes_part = is_recording() and self.manager.do_offload
            if self._takes_part and not self._has_begun:
                self._has_begun, self._mark = True, self._now()[0]
        if self._takes_part:
            self._trained.add(id(model))
        if self._takes_part and self._clock is not None:
            self._clock.enter()
            if self._looks is not None and model not in self._looked:
                self._looked.add(model)
                self._looks.begin()

    def forward_ends(self, *, has_failed: bool) -> None:
        """It is about to end."""
        if self._clock is not None:
            self._clock.leave()
        if self.is_converged:
            self._trim_when_full()
        if self._looks is not None:
            self._looks.end()
        self._has_failed |= has_failed

    def hook_end(self, model: nn.Module) -> RemovableHandle:
        """Let the end of a module's call be that of the forward."""
        # Hooks of a module that raises are called while its exception is handled.
        end = ModuleHook(
            lambda *given: self.forward_ends(has_failed=given[-1] is None and any(exc_info()))
        )
        return model.register_forward_hook(end, always_call=True)

    def close(self) -> None:
        """Look at no more forwards."""
        if self._clock is not None:
            self._clock.close()

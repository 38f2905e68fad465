"""What a person reads with nothing set: as a run begins, once it is known, and as it ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections import Counter
from typing import Any
from weakref import WeakSet

from megatron_offload import __version__
from megatron_offload.backends.base import Backend
from megatron_offload.core.policy import ModulesPolicy
from megatron_offload.core.policy_config import MemoryTargetConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.recording import Recording
from megatron_offload.engine.stats import StepStats
from megatron_offload.machine.job_ranks import rank_in

_logger = logging.getLogger(__name__)

_MOST_ALIKE = 2  # managers of one plan that speak: there may be one for each layer
_NUM_FIRST = 4  # steps, of which the first show what budgets follow

_UNFINISHED = (
    "the program has ended before rows were found, for which some 20 to 50 steps are looked at: "
    "only what the device had no room for was offloaded. 'rows' and 'policy: modules' look at none"
)


class Verdicts(Recording):
    """The part of a manager that says what it does, and what that has won."""

    backend: Backend
    tuner: Any
    step_number: int
    _last_step: StepStats | None
    _speaks = False
    """Whether this is the first rank, and one of the first managers with its plan."""

    @property
    def last_step(self) -> StepStats:
        """Counters of the last finished step; until one is finished, of the one that runs."""
        step = StepStats() if self.rests else self._last_step or self.transfers.counted()
        step.why = self._why_nothing
        return step

    @property
    def is_searching(self) -> bool:
        """Whether steps are still looked at, to find what is offloaded."""
        return self.tuner is not None and not self.tuner.is_converged

    @property
    def _found(self) -> str:
        """What was found by the first steps, if anything was."""
        return "" if self.tuner is None else self.tuner.said.removeprefix("megatron-offload: ")

    @property
    def _why_nothing(self) -> str:
        if not self.do_offload:
            return "nothing is offloaded: it is switched off"
        if self.is_searching:
            return "nothing is offloaded yet: the first steps are looked at"
        return self._found or ("nothing is offloaded: no row says so" if self.rests else "")

    @property
    def plan(self) -> str:
        """In one line what is done by which version, and when that is decided."""
        config, device = self.config, "" if self.backend.name == "cuda" else " without a GPU"
        is_open = self.learner.is_open or self.is_searching
        if config.policy is None and self.learner.policy != ModulesPolicy():
            is_open = False  # the model's own settings say what is kept
        policy = config.tuned_policy if is_open else None
        if self._found or not self.do_offload:
            what = self._found or self._why_nothing
        elif config.has_rows:
            what = f"rows: [{', '.join(map(str, config.rows or ()))}]"
        elif policy is None:
            what = "what is marked, or saved in a context, is offloaded from the first step on"
        else:
            if isinstance(policy, MemoryTargetConfig):
                target = policy.memory_target  # which may have too few ranks; others refuse that
                sizes = map(format_bytes, [target] if isinstance(target, int) else target)
                limit = f"let at most {', '.join(sizes)} be reserved"
            else:
                limit = f"cost at most {policy.most_slowdown_percent:g} % of a step"
            what = f"policy {policy.kind}: some 20 to 50 steps are looked at, then rows {limit}"
        return f"megatron-offload {__version__}{device}: {what}"

    def describe(self) -> str:
        """Return in words what it does and has found, and what its last step was."""
        return f"{self.plan}\n{self.last_step}"

    def _say_plan(self) -> None:
        plan = self.plan
        _plans[plan] += 1
        # At the end there may be no group of ranks any more.
        self._speaks = rank_in() == 0 and _plans[plan] <= _MOST_ALIKE
        _begun.add(self)
        if _plans[plan] == 1:
            self._say(plan)

    def _say(self, text: str) -> None:
        if self._speaks:
            with contextlib.suppress(Exception):  # a line that can't be written ends no program
                _logger.warning("%s", text)

    def _say_first(self) -> None:
        """Say once what steps win that follow the settings alone; a search says its own."""
        if self.step_number == _NUM_FIRST and self.tuner is None:
            self._say(f"megatron-offload: of what a step saves, {self.last_step.verdict}")

    def say_last(self) -> None:
        """Say at the end of the program what the last step has won, or that it was too short."""
        step = self.last_step
        if self.is_searching:
            self._say(f"megatron-offload: {_UNFINISHED}")
        elif self.step_number > _NUM_FIRST and (step.offloaded_bytes or step.recomputed_bytes):
            self._say(f"megatron-offload: of what the last step has saved, {step.verdict}")


_begun: WeakSet[Verdicts] = WeakSet()
_plans = Counter[str]()
"""How many managers of the process have begun with each plan."""


@atexit.register
def _end() -> None:
    for manager in _begun:
        manager.say_last()

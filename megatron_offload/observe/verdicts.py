"""What a person reads with nothing set: as a run begins, once it is known, and as it ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections import Counter
from weakref import WeakKeyDictionary

from megatron_offload.config import OffloadConfig
from megatron_offload.core.policy_config import SolvedConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.stats import StepStats
from megatron_offload.machine.job_ranks import rank_in

_logger = logging.getLogger(__name__)

_MOST_ALIKE = 2  # managers of one plan that speak: there may be one for each layer
_NUM_FIRST = 4  # steps, of which the first show what budgets follow

NO_CLOCK = (
    "there is no GPU here, so that nothing can be won. 'policy: modules', in Python "
    "OffloadConfig(policy='modules'), offloads everything all the same"
)
"""Why a search finds nothing where steps take no time."""

_UNFINISHED = (
    "the program has ended before it was found what to offload, for which some 20 to 80 steps are "
    "looked at: only what the device had no room for was. 'rows' and 'policy: modules' look at none"
)
_NO_TUNER = (
    "policy %r looks for rows in a model, and this manager was given none, so that all that is "
    "marked is offloaded: offload_modules() and get_act_offloading_ctx_manager() take a model"
)

_begun = WeakKeyDictionary[PipelineOffloadManager, tuple[OffloadConfig, bool]]()
"""The configuration under which each manager has begun, and whether it speaks: on the first rank,
as one of the first with its plan."""
_trained = WeakKeyDictionary[PipelineOffloadManager, StepStats]()
"""The last step of each that had groups: a program may end with an evaluation."""
_plans = Counter[str]()
"""How many managers of the process have begun with each plan."""


def _say(manager: PipelineOffloadManager, text: str) -> None:
    if _begun.get(manager, (None, False))[1]:
        with contextlib.suppress(Exception):  # a line that can't be written ends no program
            _logger.warning("%s", text)


def _chunk_begins(manager: PipelineOffloadManager) -> None:
    """Say what is planned, once for a plan."""
    if _begun.get(manager, (None, False))[0] is not manager.config:
        plan = manager.plan
        _plans[plan] += 1
        # At the end there may be no group of ranks any more.
        _begun[manager] = manager.config, rank_in() == 0 and _plans[plan] <= _MOST_ALIKE
        is_open = manager.is_searching or manager.learner.is_open
        if _plans[plan] == 1 and (_has_clock(manager) or not is_open):
            _say(manager, plan)  # else that there is no GPU is all that will be found


def _step_ended(manager: PipelineOffloadManager) -> None:
    """Say once what steps win that follow the settings alone; a search says its own."""
    if manager.last_step.num_groups:
        _trained[manager] = manager.last_step
    if manager.tuner is not None:
        return
    if manager.step_number == _NUM_FIRST + 1:  # that of the step that begins
        _say(manager, f"megatron-offload: in step {_NUM_FIRST} {manager.last_step.verdict}")
    policy, needs_none = manager.config.policy, manager.learner.is_open or manager.rests
    if isinstance(policy, SolvedConfig) and manager.config.enabled and not needs_none:
        manager.transfers.warn_once(_NO_TUNER, policy.kind)


PipelineOffloadManager.at_chunk.append(_chunk_begins)
PipelineOffloadManager.at_reset.append(_step_ended)


def say_last(manager: PipelineOffloadManager, *, has_table: bool = False) -> None:
    """Say once, as a program ends, what the last step has won, or that there were too few steps.

    A run that ``has_table`` of its steps has said there what was won.
    """
    step = manager.last_step if manager.rows == () else _trained.get(manager, manager.last_step)
    is_known = has_table or manager.step_number == _NUM_FIRST + 1
    if manager.is_searching:
        _say(manager, f"megatron-offload: {_UNFINISHED if _has_clock(manager) else NO_CLOCK}")
    elif not is_known and (step.offloaded_bytes or step.recomputed_bytes):
        _say(manager, f"megatron-offload: in the last step {step.verdict}")
    _begun.pop(manager, None)


def _has_clock(manager: PipelineOffloadManager) -> bool:
    return manager.backend.name == "cuda" or manager.config.simulated.host_time


@atexit.register
def _end() -> None:
    for manager in [*_begun]:
        say_last(manager)

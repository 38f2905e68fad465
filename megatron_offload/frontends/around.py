"""What the front doors have in common: a context around forwards, and what they can't follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.config import LOSS, OffloadConfig
from megatron_offload.core.row_config import MODEL
from megatron_offload.engine.automatic import AutomaticGroups, unpack
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.stats import StepStats
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.observe.run_report import save_report
from megatron_offload.observe.unseen import done_nowhere, watch_unseen

_Init = TypeVar("_Init", bound=Callable[..., None])

_MOST_UNCALLED = 3  # forwards without a call of any site, behind which it is said
_ALL_MOVES = "it takes what autograd saves, whatever module that is; offload_modules() goes by name"
_RATIO = "offload_ratio says what is offloaded; give that, or use OffloadActivations"
_NO_MODEL = "it isn't given the model; get_act_offloading_ctx_manager(model) is"
_BY_RANK = {
    "delta_bytes_across_pp_ranks": "it knows no pipeline ranks; give each rank its own fraction"
}
_UNFOLLOWED: dict[str, dict[str, str]] = {
    "OffloadActivations": {"modules": _ALL_MOVES, "rows": _NO_MODEL, **_BY_RANK},
    "get_act_offloading_ctx_manager": {"modules": _ALL_MOVES, **_BY_RANK},
    "CPUOffload": {
        "modules": _ALL_MOVES,
        "rows": _NO_MODEL,
        **dict.fromkeys(("policy", "fraction", *_BY_RANK), _RATIO),
    },
    "offload_pipeline": {"modules": _ALL_MOVES, "rows": "it knows no numbers over all stages"},
    "operation_groups": {
        "modules": "set_activation_offloading() says which modules are offloaded",
        "recompute": "its operations are fused as they run; leave it out or give ()",
        "rows": "its operations are fused as they run",
        **_BY_RANK,
    },
}
"""By door the settings that it can't follow, and what says the same there; all others take effect.
A manager by hand, `offload_modules`, megatron-core's call sites and the trainer follow all."""

_KNOW_LOSS = ("get_act_offloading_ctx_manager", "megatron_core.install()")
"""Doors that can recompute a model's loss."""
_KNOW_MODULES = (*_KNOW_LOSS, "offload_modules", "offload_pipeline")
"""Doors that can recompute its modules."""


def followed(
    door: str, config: OffloadConfig | None, manager: Any
) -> tuple[PipelineOffloadManager | None, OffloadConfig]:
    """Return the manager that a front door was given, if any, and the settings to follow.

    Raises:
        ValueError: both a config and a manager are given.
        ConfigError: something is set that this door can't follow, or the config is something else.
    """
    if manager is not None and config is not None:
        raise ValueError("give a config or a manager, not both")
    if config is not None and not isinstance(config, OffloadConfig):
        raise ConfigError(
            f"{door} takes its config as an OffloadConfig, not as a {type(config).__name__}; "
            "OffloadConfig(**settings) makes one of a dict"
        )
    manager = getattr(manager, "engine", manager)  # of Megatron's documented one
    config = manager.config if manager is not None else config or OffloadConfig()
    for key, instead in _UNFOLLOWED[door].items():
        is_all = key == "rows" and {row.site for row in config.rows or ()} == {MODEL}
        if key in config.model_fields_set and getattr(config, key) not in (None, ()) and not is_all:
            raise ConfigError(f"{door} can't follow OffloadConfig.{key}: {instead}")
    refuse_unserved(door, config)
    takes_all = _UNFOLLOWED[door].get("modules") is _ALL_MOVES
    return manager, config.without_offload() if takes_all else config


def with_policy(
    config: OffloadConfig | None,
    policy: str | Mapping[str, Any] | None,
    most: float | None,
    target: int | str | None,
) -> OffloadConfig:
    """Return a configuration with the policy that the arguments mean together."""
    given = {} if config is None else config.model_dump(exclude_unset=True)
    for key in ("policy", "rows"):
        if given.get(key) is not None:
            raise ConfigError(f"the config's {key} and the arguments both say what is offloaded")
    kind = "auto" if target is None else "memory_target"
    found: dict[str, Any] = {"kind": policy or kind}
    if isinstance(policy, Mapping):
        found = {"kind": kind, **policy}
    for key, value in (("most_slowdown_percent", most), ("memory_target", target)):
        if value is not None and found.setdefault(key, value) is not value:
            raise ConfigError(f"{key} is {value!r}, and policy={found!r} says it too")
    return OffloadConfig(**{**given, "policy": found})


def refuse_unserved(door: str, config: OffloadConfig) -> None:
    """Refuse with a `ConfigError` what is to be recomputed and this front door can't."""
    if any(row.by_rows for row in config.rows or ()) and door not in _KNOW_LOSS:
        raise ConfigError(f"{door} knows no loss, so that no row can be about it")
    for name in config.recompute if "recompute" in config.model_fields_set else ():
        served = _KNOW_LOSS if name == LOSS else _KNOW_MODULES
        if door not in served:
            raise ConfigError(f"{door} can't recompute {name!r}; {' and '.join(served)} can")


def with_nearest(init: _Init) -> _Init:
    """Let a constructor's error about an argument that it hasn't name the nearest that it has."""

    @wraps(init)
    def checked(self: object, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except TypeError as error:
            known = inspect.signature(init).parameters
            for name in options.keys() - known.keys():
                nearest = did_you_mean(name, (x for x in known if x != "self" and x[0] != "_"))
                raise TypeError(f"{error}{nearest}") from None
            raise

    return cast(_Init, checked)


def leave_search(manager: PipelineOffloadManager) -> None:
    """Look for no more rows, and follow what is configured."""
    if isinstance(manager.tuner, RowSearch):
        manager.tuner.close()
        manager.tuner = None
        manager.learner.follow_rules()
    manager.follow_rows(manager.config.rows)


def begin_anew(manager: PipelineOffloadManager) -> None:
    """Forget what was found for another model; keep all that there is room for until one comes."""
    leave_search(manager)
    if manager.config.tuned_policy is not None:
        manager.learner.follow_rules(is_open=True)


class AroundForwards(saved_tensors_hooks):
    """A context for any number of forwards, one after the other or one inside the other.

    Its ``pack_hook`` and ``unpack_hook`` are those of saved tensors; packed outside of the context
    a tensor is kept on the device. Where rows are looked for, the outermost counts.

    Args:
        groups: record what is saved.
        model: the part of a model whose forwards these are, where there are several.
        where: arguments of `AutomaticGroups.begin`.
    """

    def __init__(
        self, groups: AutomaticGroups, model: nn.Module | None = None, **where: Any
    ) -> None:
        super().__init__(groups.pack, unpack)
        self._groups, self._model, self._where = groups, model, where
        self._of_others: tuple[StepStats | None, ...] = ()
        self._depth = self._num_uncalled = 0

    @property
    def _search(self) -> RowSearch | None:
        """What looks for rows, outside of all forwards, until `close`."""
        tuner, pool = self._groups.manager.tuner, self._groups.manager.host_pool
        is_over = self._depth or pool.is_closed
        return tuner if isinstance(tuner, RowSearch) and not is_over else None

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns nothing
        search = self._search
        if search is not None:
            search.step_begins()
        self._groups.begin(**self._where)
        watch_unseen(self._groups)
        if search is not None:
            search.forward_begins(self._model)
        self._depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._depth = max(0, self._depth - 1)
        has_failed = any(isinstance(part, BaseException) for part in exception)
        try:
            search = self._search
            if search is not None:
                search.forward_ends(has_failed=has_failed)
        finally:
            try:
                if not (has_failed or self._depth) and (text := done_nowhere(self._groups)):
                    self._num_uncalled += 1
                    if self._num_uncalled > _MOST_UNCALLED:
                        self._groups.manager.transfers.warn_once(text)
                self._groups.end(has_failed=has_failed)
            finally:
                watch_unseen(self._groups)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')}: {self._groups.manager.plan}>"

    def describe(self) -> str:
        """Return in words what it does and has found, and what the last step was."""
        return f"{self._groups.manager.plan}\n{self.last_step}"

    @property
    def last_step(self) -> StepStats:
        """Counters of the last step that is over, or else of the one that runs.

        Steps that were over before an `OffloadActivations` was made were another context's.
        """
        manager = self._groups.manager
        step = manager.last_step
        for read in (manager.transfers.counted, StepStats):
            if any(step is other for other in self._of_others):
                step = read()
        step.why = manager.why_nothing
        return step

    def save_report(self, folder: str | Path) -> None:
        """Leave in a folder what ``megatron-offload report FOLDER`` shows; each rank calls it."""
        self.end_step()
        save_report(self._groups.manager, folder, step=self.last_step)

    def end_step(self) -> bool:
        """End the step now if nothing that it saved is left, and return whether there was one."""
        return self._groups.end_step_if_over()

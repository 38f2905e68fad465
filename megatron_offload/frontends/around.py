"""What the front doors have in common: a context around forwards, and what they can't follow."""

from __future__ import annotations

from typing import Any, Self

from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.config import OffloadConfig
from megatron_offload.engine.automatic import AutomaticGroups, unpack
from megatron_offload.engine.stats import StepStats
from megatron_offload.errors import ConfigError

_ALL_MOVES = "it takes what autograd saves, whatever module that is; offload_modules() goes by name"
_RATIO = "offload_ratio says what moves; give that, or use OffloadActivations"
_BY_RANK = dict.fromkeys(
    ("delta_bytes_across_pp_ranks", "resident_delta_bytes_across_pp_ranks"),
    "it knows no pipeline ranks; give each rank its own resident_bytes",
)
_UNFOLLOWED: dict[str, dict[str, str]] = {
    "OffloadActivations": {"modules": _ALL_MOVES, **_BY_RANK},
    "CPUOffload": {
        "modules": _ALL_MOVES,
        **dict.fromkeys(
            ("policy", "fraction", *_BY_RANK, "resident_bytes", "device_target_bytes"), _RATIO
        ),
    },
    "offload_pipeline": {"modules": _ALL_MOVES},
    "operation_groups": {
        "modules": "set_activation_offloading() says which modules move",
        **_BY_RANK,
    },
}
"""By door the settings that it can't follow, and what says the same there; all others take effect.
A manager by hand, `offload_modules`, megatron-core's call sites and the trainer follow all."""


def engine_of(manager: Any) -> Any:
    """Return the engine's manager, where Megatron's documented one is given too."""
    return getattr(manager, "engine", manager)


def refuse_unfollowed(door: str, config: OffloadConfig) -> None:
    """Refuse with a `ConfigError` what was set and this front door can't follow."""
    for key, instead in _UNFOLLOWED[door].items():
        if key in config.model_fields_set and getattr(config, key) is not None:
            raise ConfigError(f"{door} can't follow OffloadConfig.{key}: {instead}")


class AroundForwards(saved_tensors_hooks):
    """A context for any number of forwards, one after the other or one inside the other.

    Its ``pack_hook`` and ``unpack_hook`` are those of saved tensors; packed outside of the context
    a tensor stays on the device.
    """

    def __init__(self, groups: AutomaticGroups) -> None:
        super().__init__(groups.pack, unpack)
        self._groups = groups

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns nothing
        self._groups.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self._groups.end(has_failed=any(part is not None for part in exception))

    @property
    def last_step(self) -> StepStats:
        """Counters of the last step that is over."""
        return self._groups.manager.last_step

    def end_step(self) -> bool:
        """End the step now if nothing that it saved is left, and return whether there was one."""
        return self._groups.end_step_if_over()

"""Which settings a front door can't follow, and what says the same there.

What is not in the table takes effect; a manager by hand, `offload_modules`, megatron-core's call
sites and the trainer follow all.
"""

from __future__ import annotations

from typing import Any

from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError

_ALL_MOVES = "it takes what autograd saves, whatever module that is; offload_modules() goes by name"
_NO_RANK = "it knows no pipeline ranks; give each rank its own resident_bytes"
_RATIO = "offload_ratio says what moves; give that, or use OffloadActivations"

_UNFOLLOWED: dict[str, dict[str, str]] = {
    "OffloadActivations": {
        "modules": _ALL_MOVES,
        "delta_bytes_across_pp_ranks": _NO_RANK,
        "resident_delta_bytes_across_pp_ranks": _NO_RANK,
    },
    "CPUOffload": {
        "modules": _ALL_MOVES,
        **dict.fromkeys(
            (
                "policy",
                "fraction",
                "delta_bytes_across_pp_ranks",
                "resident_bytes",
                "resident_delta_bytes_across_pp_ranks",
                "device_target_bytes",
            ),
            _RATIO,
        ),
    },
    "offload_pipeline": {"modules": _ALL_MOVES},
    "operation_groups": {
        "modules": "set_activation_offloading() says which modules move",
        "delta_bytes_across_pp_ranks": _NO_RANK,
        "resident_delta_bytes_across_pp_ranks": _NO_RANK,
    },
}


def engine_of(manager: Any) -> Any:
    """Return the engine's manager, where Megatron's documented one is given too."""
    return getattr(manager, "engine", manager)


def refuse_unfollowed(door: str, config: OffloadConfig) -> None:
    """Refuse what was set and can't be followed.

    Args:
        door: the front door's name.
        config: what it was given, in a manager or by itself.

    Raises:
        ConfigError: the first such key, with what to use instead.
    """
    for key, instead in _UNFOLLOWED[door].items():
        if key in config.model_fields_set and getattr(config, key) is not None:
            raise ConfigError(f"{door} can't follow OffloadConfig.{key}: {instead}")


def settle(
    argument: str,
    value: Any,
    default: Any,
    key: str,
    config: OffloadConfig,
    *,
    is_fixed: bool = False,
) -> Any:
    """Return what counts where a front door's argument and a key mean the same.

    Args:
        argument: the argument's name.
        value: what was given for it, or its default.
        default: that.
        key: the key's name.
        config: where it may be set.
        is_fixed: whether the configuration counts also where the key wasn't set.

    Raises:
        ConfigError: both were given, and differ.
    """
    if not is_fixed and key not in config.model_fields_set:
        return value
    found = getattr(config, key)
    if value not in (default, found):
        raise ConfigError(
            f"{argument} is {value!r}, and OffloadConfig.{key} is {found!r}, which means the same; "
            "give one of them"
        )
    return found

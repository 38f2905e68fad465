"""The launcher's flags, in its own parser and in Megatron's, and the configuration they stand for.

Parsed values are plain: Megatron keeps its arguments in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_offload.config import OffloadConfig, apply_overrides, load_yaml
from megatron_offload.files.strict_model import validate

_FLAGS: dict[str, tuple[str, Any, str]] = {
    "policy": ("KIND", str, "auto, memory_target, modules, ratio; auto unless something is set"),
    "memory-target": ("SIZE[,SIZE]", str, "most a rank reserves, such as 60GiB; or one for each"),
    "most-slowdown-percent": ("P", float, "of the step's time, which auto may cost; 3 unless set"),
    "recompute": ("KIND[,KIND]", str, "recomputed, or none; unless set norm,mlp_act"),
    "config": ("FILE", str, "YAML with any keys of OffloadConfig; flags win"),
    "set": ("KEY=VALUE", str, "one more of these keys; may be given again"),
    "report": ("FOLDER", str, "for frontier.json, and trace_RANK.json of a step"),
}
"""By name without the prefix: what stands for the value in the help, its type, and the help."""


def add_flags(place: Any, defaults: Mapping[str, Any] | None = None) -> None:
    """Add the flags to a parser or to a group of one."""
    for name, (metavar, kind, text) in _FLAGS.items():
        how: Any = {"metavar": metavar, "type": kind, "help": text}
        how["default"] = (defaults or {}).get(f"offload_{name.replace('-', '_')}")
        how["action"] = "append" if name == "set" else "store"
        place.add_argument(f"--offload-{name}", **how)


def read_flags(given: Mapping[str, Any], setting: str = "--offload-set") -> OffloadConfig:
    """Return the configuration that parsed flags stand for; `ConfigError` says what is wrong.

    ``setting`` is what gave ``offload_set``.
    """
    values = (given.get(f"offload_{name.replace('-', '_')}") for name in _FLAGS)
    kind, target, slowdown, units, path, pairs, _ = values
    kind = kind or ("memory_target" if target else "auto" if slowdown is not None else None)
    data = load_yaml(path) if path else {}
    policy = data.get("policy")
    if kind and not (isinstance(policy, dict) and policy.get("kind") == kind):
        data = {**data, "policy": {"kind": kind}}
    pairs = list(pairs or ())
    typed = {key: f"{setting} {key}" for key, _, _ in (pair.partition("=") for pair in pairs)}
    typed |= {"policy.kind": "--offload-policy"} if kind else {}
    for key, value in {
        "policy.memory_target": target and (f"[{target}]" if "," in target else target),
        "policy.most_slowdown_percent": slowdown,
        "recompute": units and f"[{'' if units == 'none' else units}]",
    }.items():
        if value is not None:
            pairs.append(f"{key}={value}")
        if value is not None or (kind and not path and key not in typed):
            typed[key] = f"--offload-{key.removeprefix('policy.').replace('_', '-')}"
    source = f"offload ({path})" if path else setting
    return validate(OffloadConfig, apply_overrides(data, pairs), source, typed)

"""What is known of GPUs by their names: the data sheets in configs/machines/gpus.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_offload.config import config_folder, load_yaml
from megatron_offload.errors import ConfigError, did_you_mean


def with_gpu(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a description with what ``machine.gpu`` implies; what it says itself wins.

    Raises:
        ConfigError: a GPU of that name isn't known.
    """
    machine = data.get("machine")
    name = machine.get("gpu") if isinstance(machine, Mapping) else None
    if name is None:
        return data
    sheets = load_yaml(config_folder("machines") / "gpus.yaml")
    known = sheets["gpus"]
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"machine.gpu: no GPU {str(name)!r} is known{did_you_mean(name, known)}")
    gpu, model = known[name], data.get("model")
    found = {**data, "machine": sheets["links"][gpu["link"]] | gpu["machine"] | machine}
    return found | ({"model": gpu["model"] | model} if isinstance(model, dict) else {})

"""Descriptions from what other programs read: a config.json of transformers, Megatron's arguments.

Which name is which key stands in configs/formats/; what they don't say has a value to be edited.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from megatron_offload.config import config_folder, load_yaml
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.strict_yaml import parse_yaml

_MOST_TOKENS = 4096  # of a sequence, unless it is said


def describe(make: Callable[[Any], dict[str, Any]], given: Any, source: str) -> dict[str, Any]:
    """Return what a function below makes of a source; `ConfigError` says what is amiss in that."""
    try:
        return make(given)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} can't be read: {type(error).__name__}: {error}") from error


def from_hugging_face(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a model from its config.json."""
    form = load_yaml(config_folder("formats") / "hugging_face.yaml")
    if not isinstance(given, Mapping) or "model_type" not in given:
        raise ConfigError("it says no model_type, as a config.json of transformers does")
    kind, families = str(given["model_type"]), form["families"]
    if kind not in families:
        raise ConfigError(f"model_type {kind!r} can't be described{did_you_mean(kind, families)}")
    model = form["job"] | families[kind] | _named(form, given)
    if given.get("mlp_only_layers") or given.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("experts in some layers alone, but for the first, can't be described")
    if shared := given.get("n_shared_experts"):
        model["shared_expert_ffn"] = shared * model["expert_ffn"]
    if model.get("kv_lora_rank"):
        model.pop("kv_channels", None)
    kinds = [name == "full_attention" for name in given.get("layer_types") or ()]
    if not given.get("use_sliding_window", True) or (kinds and all(kinds)):
        model.pop("window_size", None)
    elif any(kinds):
        model["window_attn_skip_freq"] = skip = kinds.index(True) + 1
        if any(is_full != (place % skip == 0) for place, is_full in enumerate(kinds, 1)):
            raise ConfigError("windows in layers at uneven distances can't be described")
    model["sequence"] = min(_MOST_TOKENS, given.get("max_position_embeddings") or _MOST_TOKENS)
    return {"model": model, "machine": form["machine"]}


def from_megatron(text: str) -> dict[str, Any]:
    """Return the description of a job from Megatron-LM's arguments; those it can't say count not.

    A job has one replica, as arguments don't say how many GPUs there are.
    """
    form = load_yaml(config_folder("formats") / "megatron.yaml")
    given = _arguments(shlex.split(text, comments=True))
    model = form["job"] | _named(form, given)
    for flag, implied in form["flags"].items():
        model |= implied if flag in given else {}
    hidden, is_gated = int(model.get("hidden", 0)), model.get("gated_mlp", False)
    model.setdefault("ffn", hidden * 8 // 3 // 64 * 64 if is_gated else 4 * hidden)
    if window := re.match(r"\W*(\d+)", str(given.get("window-size"))):
        model["window_size"] = 1 + int(window[1])  # those before a token
    if dense := re.fullmatch(r"\W*0\W*(\d+)\W*1\W*\d+\W*", str(given.get("moe-layer-freq"))):
        model["dense_layers"] = int(dense[1])  # ([0]*3+[1]*58)
    if given.get("recompute-granularity") == "full":
        model["recompute"] = "full"
    if per_stage := given.get("num-layers-per-virtual-pipeline-stage"):
        slots = model["layers"] // model.get("pipeline_parallel", 1)
        model["virtual_stages"] = slots // int(per_stage)
    size = model.get("microbatch", 1)
    model["num_microbatches"] = int(given.get("global-batch-size", size)) // size
    return {"model": model, "machine": form["machine"]}


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the first value of each argument, of one without a value that it is there."""
    found: dict[str, Any] = {}
    for word, after in pairwise((*words, "--")):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            value = value if equals else "true" if after.startswith("--") else after
            found[name[2:]] = parse_yaml(value)
    return found


def _named(form: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given, each under its key's name."""
    found: dict[str, Any] = {}
    for key, names in form["names"].items():
        values = [given[name] for name in names if given.get(name) is not None]
        found |= {key: values[0]} if values else {}
    return found

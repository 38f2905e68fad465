"""Descriptions from what other programs read: a config.json of transformers, Megatron's arguments.

Which name is which key stands in configs/formats/; what they don't say has a value to be edited.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from megatron_offload.config import config_folder, load_yaml
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_yaml import parse_yaml

_logger = logging.getLogger(__name__)

_MOST_TOKENS = 4096  # of a sequence, unless it is said
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")
"""Of a shell, with a default."""


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
        raise ConfigError(
            f"model_type {kind!r} can't be described, but {', '.join(families)} can: edit the "
            "description of one that is like it, which --print prints"
        )
    model = form["job"] | families[kind] | _named(form, given)
    if given.get("mlp_only_layers") or given.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("experts in some layers alone, but for the first, can't be described")
    if (shared := given.get("n_shared_experts")) and "expert_ffn" in model:
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


def from_megatron(text: str, replicas: object = None) -> dict[str, Any]:
    """Return the description of a job from Megatron-LM's arguments; those it can't say count not.

    They may be a script. ``replicas`` share the batch: unless given, as many as torchrun's own
    arguments make, or one.
    """
    form = load_yaml(config_folder("formats") / "megatron.yaml")
    given = _arguments(_words(text))
    _check_known(form, given)
    model = form["job"] | _named(form, given)
    for flag, implied in form["flags"].items():
        model |= implied if flag in given else {}
    hidden, is_gated = int(model.get("hidden", 64)), model.get("gated_mlp", False)
    model.setdefault("ffn", hidden * 8 // 3 // 64 * 64 if is_gated else 4 * hidden)
    if window := re.match(r"\W*(\d+)", str(given.get("window-size"))):
        model["window_size"] = 1 + int(window[1])  # those before a token
    if dense := re.fullmatch(r"\W*0\W*(\d+)\W*1\W*\d+\W*", str(given.get("moe-layer-freq"))):
        model["dense_layers"] = int(dense[1])  # ([0]*3+[1]*58)
    if given.get("recompute-granularity") == "full" and given.get("recompute-method") != "block":
        model["recompute"] = "full"
    uncounted = [name for name in form["not_counted"] if given.get(name, False) is not False]
    if uncounted:
        said = ", ".join(f"--{name} {given[name]}".removesuffix(" True") for name in uncounted)
        _logger.warning("megatron-offload: not counted: %s", said)
    if per_stage := given.get("num-layers-per-virtual-pipeline-stage"):
        slots = model["layers"] // model.get("pipeline_parallel", 1)
        model["virtual_stages"] = slots // int(per_stage)
    layout = prod(model.get(f"{what}_parallel", 1) for what in ("tensor", "context", "pipeline"))
    nodes = [given.get("nproc-per-node"), given.get("nnodes", 1)]
    if replicas is None and all(isinstance(number, int) for number in nodes):
        model["data_parallel"] = replicas = max(1, prod(nodes) // layout)
    size = model.get("microbatch", 1) * (replicas if isinstance(replicas, int) else 1)
    model["num_microbatches"] = max(1, int(given.get("global-batch-size", size)) // size)
    return {"model": model, "machine": form["machine"]}


def names_in(form: str, source: str, before: str = "") -> dict[str, str]:
    """Return what a source calls keys of the section ``model``, for errors."""
    names = load_yaml(config_folder("formats") / f"{form}.yaml")["names"].items()
    return {
        f"model.{key}": f"{source}: {before}{f' or {before}'.join(own)} (--model.{key})"
        for key, own in names
    }


def _words(text: str) -> list[str]:
    """Return the words of a command line, or of a script, in which the variables it sets count."""
    known, found = dict[str, str](), list[str]()
    for word in shlex.split(text, comments=True):
        setting = re.match(r"([A-Za-z_]\w*)=", word)
        value = word[setting.end() :].rstrip(";") if setting else word
        filled = _VARIABLE.sub(lambda x: known.get(x[1], x[2] or x[0]), value)
        if setting:
            known[setting[1]] = filled
        own = filled.split() if re.search(r"(^|\s)--.*\s", filled) else [filled]
        is_value = not (setting or "[@]" in word or word in "()")
        found += own if is_value else ["--", *own, "--"]  # of no argument before or in it
    return found


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the first value of each argument, of one without a value that it is there."""
    found: dict[str, Any] = {}
    for word, after in pairwise((*words, "--")):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            value = value if equals else "true" if after.startswith("--") else after
            found[name[2:].replace("_", "-")] = parse_yaml(value)
    return found


def _check_known(form: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse what a script computes, where it says sizes of the job."""
    names = {*form["sizes"], *(name for own in form["names"].values() for name in own)}
    for name in names & given.keys():
        if "$" in str(given[name]):
            raise ConfigError(
                f"--{name} is {given[name]!r}: of a script's variables those count that it sets "
                "plainly, or gives a default"
            )


def _named(form: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given, each under its key's name."""
    found: dict[str, Any] = {}
    for key, names in form["names"].items():
        values = [given[name] for name in names if given.get(name) is not None]
        found |= {key: values[0]} if values else {}
    return found

"""The models that `zoo.py` tries, and what it does with each in a process of its own."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import random
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import library, nn
from torch.utils._pytree import tree_leaves

from megatron_offload import OffloadActivations, OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.config import RECOMPUTE_SITES
from megatron_offload.errors import OffloadError
from megatron_offload.model_map.module_hooks import named_modules
from megatron_offload.model_map.structure import layers_of
from megatron_offload.recompute.sites import sites_of

MODES = ("default", "moved", *RECOMPUTE_SITES, "rows")
STEPS = 3
MOST_PARAMETERS = 32_000_000
MOST_BYTES = 8 << 30
NUM_TOKENS = 90

FIXED = {"mrope_section": [2, 3, 3], "use_cache": False}
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

Inputs = dict[str, Any]
Form = tuple[Callable[[], nn.Module], Sequence[Callable[[Any], Inputs]]]
"""What makes a model, and what makes inputs that it may take."""


class Model(NamedTuple):
    module: nn.Module
    inputs: Inputs

    def loss(self) -> torch.Tensor:
        """Return the sum of the mean squares of all outputs that have a gradient."""
        positional, named = self.inputs.get("", ()), {k: v for k, v in self.inputs.items() if k}
        leaves = tree_leaves(self.module(*positional, **named))
        found = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad and x.numel()]
        if not found:
            raise TypeError("no output has a gradient")
        return torch.stack([x.abs().float().square().mean() for x in found]).sum()


# transformers


def transformers_names() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    return sorted(auto.MODEL_MAPPING_NAMES | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def transformers_forms(name: str) -> Iterator[Form]:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TABLE["tasks"]]
    found = next(t[name] for t in (*tables, auto.MODEL_MAPPING_NAMES) if name in t)
    kind = getattr(transformers, found if isinstance(found, str) else found[0])
    config_class = transformers.CONFIG_MAPPING[name]
    takes = inspect.signature(kind.forward).parameters
    needs = {k for k, v in takes.items() if v.default is v.empty and v.kind != v.VAR_KEYWORD}
    main = kind.main_input_name
    needs = needs - {"self"} | {*([main] if isinstance(main, str) else main)}
    more = ("decoder_input_ids", "", "input_ids", "pixel_values", "input_features", "bbox")
    sets = [needs | {one} - {""} for one in more if not one or one in takes]
    inputs = [
        functools.partial(transformers_inputs, names=names, has_labels="labels" in takes, form=form)
        for names in sets
        for form in range(1 if all(x.endswith("_ids") for x in names) else 3)
    ]

    def make(rules: Mapping[str, float]) -> nn.Module:
        before = config_class().to_dict()
        small = shrink("", before, rules)
        changed = {k: v for k, v in small.items() if v != before[k] and not k.endswith("2label")}
        return kind(config_class(**changed))

    few, small = TABLE["layers"], TABLE["layers"] | TABLE["sizes"]
    for rules in (TABLE["dropout"] | small, small, few):
        yield functools.partial(make, rules), inputs


def shrink(key: str, value: Any, rules: Mapping[str, float], num_layers: int = 0) -> Any:
    """Return a configuration's value made small."""
    if isinstance(value, dict):
        num_layers = value.get("num_hidden_layers") or 0
        if "rope_type" in value:
            value = {"mrope_section": None} | value
        return {k: shrink(str(k), v, rules, num_layers) for k, v in value.items()}
    if key in FIXED:
        return FIXED[key]
    if isinstance(value, (list, tuple)):
        if len(value) == num_layers:  # one of each kind
            value = [value[0], next((x for x in value if x != value[0]), value[0])]
        return [shrink(key, one, rules) for one in value]
    if value is None and re.search("experts|vocab_size", key):
        value = 128 if "vocab" in key else 4
    most = next((most for pattern, most in rules.items() if re.search(pattern, key)), None)
    if isinstance(value, bool) or most is None or not isinstance(value, (int, float)):
        return value
    if isinstance(most, float):  # of dropout, so that there is some
        return most
    return min(value, most) if isinstance(value, int) else value


def transformers_inputs(module: Any, names: Iterable[str], has_labels: bool, form: int) -> Inputs:
    """Return inputs by their names, in the first, second or third form that there is of them."""
    config = module.config
    parts = [config, *(getattr(config, f"{x}_config", None) for x in ("vision", "audio", "text"))]

    def find(default: int, *keys: str) -> int:
        values = (getattr(part, key, None) for part in parts for key in keys)
        value = next((x for x in values if x), default)
        return value if isinstance(value, int) else max(value)

    size, channels = find(64, "image_size"), find(3, "num_channels", "in_chans")
    features = find(80, "num_mel_bins", "feature_size", "input_dim")
    frames, length = find(2, "num_frames"), 2 * find(64, "max_source_positions")
    width = find(64, "hidden_size", "d_model")
    shapes = {
        "pixel_values": (
            (channels, size, size),
            (frames, channels, size, size),
            (channels, 64, 64),
        ),
        "input_features": ((features, length), (length, features), (1, length, features)),
        "input_values": ((4000,), (find(128, "max_length"), features), (1, 4000)),
    }
    inputs: Inputs = {}
    for name in sorted(names):
        if name.endswith("input_ids"):
            inputs[name] = torch.randint(3, NUM_TOKENS, (2, 12))
        elif name == "bbox":
            inputs[name] = torch.tensor([[[1, 2, 30, 40]] * 12] * 2)
        else:
            inputs[name] = torch.randn(2, *shapes.get(name, ((12, width),) * 3)[form])
    if has_labels and "CausalLM" in type(module).__name__:
        inputs["labels"] = inputs["input_ids"]
    return inputs


# timm, peft, diffusers


def timm_names() -> list[str]:
    """Return of each module the model that is the smallest by its name."""
    import timm

    def size(name: str) -> tuple[int, list[int], str]:
        places = (i for i, word in enumerate(TABLE["small"]) if word in name)
        return next(places, len(TABLE["small"])), [*map(int, re.findall(r"\d+", name))], name

    models = map(timm.list_models, [""] * len(timm.list_modules()), timm.list_modules())
    return sorted({min(found, key=size) for found in models if found})


def timm_forms(name: str) -> Iterator[Form]:
    import timm

    def pictures(module: Any, size: int = 0) -> Inputs:
        size = size or module.default_cfg["input_size"][-1]
        return {"": (torch.randn(2, 3, size, size),)}

    make = functools.partial(timm.create_model, name, pretrained=False, num_classes=10)
    small = functools.partial(pictures, size=64)
    for drops in ({"drop_rate": 0.1, "drop_path_rate": 0.1}, {"drop_rate": 0.1}, {}):
        yield functools.partial(make, **drops), [small]
        yield functools.partial(make, img_size=64, **drops), [small]
        yield functools.partial(make, **drops), [pictures]


def peft_names() -> list[str]:
    first, *others = TABLE["bases"]
    names = [f"{adapter}-{first}" for adapter in TABLE["adapters"]]
    return names + [f"{adapter}-{base}" for base in others for adapter in TABLE["of_all_bases"]]


def peft_forms(name: str) -> Iterator[Form]:
    import peft

    adapter, base = name.split("-")
    settings = dict(TABLE["adapters"][adapter])
    of = peft.PeftType[settings.pop("form", adapter).upper()]
    config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING[of]

    def adapted(make: Callable[[], nn.Module], **more: str) -> nn.Module:
        module: Any = make()
        return peft.get_peft_model(module, config_class(**settings, **more))

    for make, inputs in transformers_forms(base):
        for more in ({}, {"target_modules": "all-linear"}, {"task_type": "CAUSAL_LM"}):
            yield functools.partial(adapted, make, **more), inputs


def diffusers_names() -> list[str]:
    return list(TABLE["diffusers"])


def diffusers_forms(name: str) -> Iterator[Form]:
    import diffusers

    settings, shapes = TABLE["diffusers"][name]

    def inputs(module: Any) -> Inputs:
        return {k: torch.randn(x) if x else torch.tensor([1, 2]) for k, x in shapes.items()}

    yield functools.partial(getattr(diffusers, name), **settings), [inputs]


FAMILIES = {
    "diffusers": (diffusers_names, diffusers_forms),
    "peft": (peft_names, peft_forms),
    "timm": (timm_names, timm_forms),
    "transformers": (transformers_names, transformers_forms),
}


def import_families(families: Iterable[str]) -> None:
    """Import what all models of these need, once, before the first process is forked."""
    try:
        if importlib.util.find_spec("torchvision"):
            importlib.import_module("torchvision")
    except RuntimeError:  # a build for CUDA beside a torch for CPUs has no kernels; none is called
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(f"torchvision::{name}", boxes)
    for family in families:
        importlib.import_module({"transformers": "transformers.modeling_utils"}.get(family, family))
    for name in FAMILIES:
        logging.getLogger(name).setLevel(logging.ERROR)


# One model


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def train(
    model: Model, context: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Train a copy of a model; yield all that is compared, by name."""
    model = copy.deepcopy(model)
    module = model.module.train()
    entered = context(module) if context else nullcontext()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for step in range(STEPS):
        seed(step)
        with entered:
            loss = model.loss()
        yield f"loss of step {step}", loss.detach()
        loss.backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield f"gradient of {name} in step {step}", parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        for name, x in itertools.chain(module.named_parameters(), module.named_buffers()):
            yield f"{name} after step {step}", x.detach()


def first_difference(
    expected: Iterable[tuple[str, torch.Tensor]], actual: Iterable[tuple[str, torch.Tensor]]
) -> str:
    """Return the name of the first that has other bits, or nothing."""
    none = "", torch.empty(0)
    for (name, x), (other, y) in itertools.zip_longest(expected, actual, fillvalue=none):
        flat = [one.contiguous().view(-1).view(torch.uint8) for one in (x, y) if one.numel()]
        if name != other or x.shape != y.shape or (flat and not torch.equal(*flat)):
            return name or other
    return ""


def built(family: str, name: str) -> tuple[Model, list[tuple[str, torch.Tensor]]]:
    """Return the first form of a model that can be trained, and what that gives.

    Raises:
        LookupError: none can; the text is the reason of the first.
    """
    reasons: list[str] = []

    def attempt(function: Callable[[], Any]) -> Any:
        try:
            seed(0)
            return function()
        except Exception as error:  # noqa: BLE001 - other people's
            reasons.append(shown(error))
            return None

    def small(make: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            sketch = attempt(make)
        size = sum(x.numel() for x in sketch.parameters()) if sketch is not None else 0
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size} parameters are too many")
        seed(0)
        return make()

    def record(model: Model) -> list[tuple[str, torch.Tensor]]:
        return [(name, x.clone()) for name, x in train(model)]

    for make, all_inputs in attempt(lambda: [*FAMILIES[family][1](name)]) or ():
        module = attempt(functools.partial(small, make))
        for inputs in all_inputs if module is not None else ():
            given = attempt(functools.partial(inputs, module))
            model = Model(module, given)
            found = given and attempt(functools.partial(record, model))
            if found:
                return model, found
    raise LookupError(reasons[0])


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def rows_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return rows that offload what layers save, but for MLPs of all but the first."""
    sites = sites_of(named_modules(module), ["layer", "mlp"])
    rows: list[dict[str, Any]] = []
    if "layer" in sites.values():
        rows.append({"site": "layer", "offload": "all"})
    numbers = layers_of(named_modules(module))
    if any(kind == "mlp" and numbers[path.rpartition(".")[0]] for path, kind in sites.items()):
        last = max(numbers.values())
        rows.append({"site": "mlp", "layers": f"1-{last}", "recompute": True})
    return rows


def tried(mode: str, model: Model, expected: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Train with the package in one mode; return what became of it."""
    contexts: list[OffloadActivations] = []
    found: dict[str, Any] = {"said": []}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found["said"].append(record.getMessage())

    def enter(module: nn.Module) -> OffloadActivations:
        if mode == "default":
            contexts.append(OffloadActivations())
        elif mode == "rows":
            config = OffloadConfig(rows=rows_of(module), min_tensor_bytes=0)
            options = {"config": config, "warn_if_no_head": False}
            contexts.append(get_act_offloading_ctx_manager(module, **options))  # type: ignore[arg-type]
        else:
            kinds = ["norm", "mlp_act"] if mode == "moved" else [mode]
            config = OffloadConfig(policy="modules", min_tensor_bytes=0, recompute=kinds)
            options: dict[str, Any] = {"config": config, "warn_if_no_head": False}
            contexts.append(get_act_offloading_ctx_manager(module, **options))  # type: ignore[arg-type]
        return contexts[0]

    logger, handler = logging.getLogger("megatron_offload"), Handler()
    logger.addHandler(handler)
    try:
        reason = first_difference(expected, train(model, enter))
        found |= {"status": "differs" if reason else "equal", "reason": reason}
    except OffloadError as error:
        found |= {"status": "refused", "reason": shown(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it isn't there without the package
        found |= {"status": "failed", "reason": shown(error)}
    logger.removeHandler(handler)
    for context in contexts:
        context.end_step()
        moved, again = context.last_step.offloaded_bytes, context.last_step.recomputed_bytes
        found |= {"offloaded_bytes": moved, "recomputed_bytes": again}
        found["did something"] = again > 0 or (mode not in RECOMPUTE_SITES and moved > 0)
        context.close()
    return found


def examine(family: str, name: str, connection: Connection, only: Sequence[str] = MODES) -> None:
    """Try one model in all modes; send what became of it, so far as it is known."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    warnings.simplefilter("ignore")
    try:
        model, expected = built(family, name)
    except LookupError as error:
        connection.send({"status": "not buildable", "reason": str(error.args[0])})
        return
    modes: dict[str, dict[str, Any]] = {}
    size = sum(x.numel() for x in model.module.parameters())
    row = {"class": type(model.module).__name__, "parameters": size, "modes": modes}
    reason = first_difference(expected, train(model))
    if reason:
        connection.send({**row, "status": "not deterministic", "reason": reason})
        return
    for mode in only:
        connection.send({**row, "status": "failed", "reason": f"{mode}: the process ended"})
        modes[mode] = tried(mode, model, expected)
    connection.send(row | verdict(modes))


def verdict(modes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the worst that became of a model."""
    for status in ("differs", "failed", "refused"):
        for mode, found in modes.items():
            if found["status"] == status:
                return {"status": status, "reason": f"{mode}: {found['reason']}"}
    return {"status": "equal", "reason": ""}

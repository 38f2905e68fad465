"""Offload in a `Trainer` of transformers, TRL's trainers too, by a class before the original."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_offload.config import OffloadConfig
from megatron_offload.engine.hooks import is_recording
from megatron_offload.errors import ConfigError, IntegrationError, did_you_mean, shorten
from megatron_offload.frontends.whole_model import get_act_offloading_ctx_manager
from megatron_offload.model_map.mapping import ModelMap, map_model
from megatron_offload.model_map.module_hooks import hook_calls
from megatron_offload.recompute.patches import Call, PatchStack


class OffloadMixin:
    """Offloads what the model saves for backward: ``class OffloadTrainer(OffloadMixin, Trainer)``.

    What a step offloaded stands beside the loss in what the trainer logs. No callback can do this:
    its methods run before and after a forward and its backward together. Whichever class has them,
    ``compute_loss`` runs inside the context, and so does a model that ``training_step`` calls.
    """

    offload_config: OffloadConfig | None = None
    """Set it on the class or the trainer, before training."""

    offload_options: Mapping[str, Any] = MappingProxyType({})
    """Likewise: more arguments of `OffloadActivations`, such as ``most_slowdown_percent``."""

    offload_all_counters = False
    """Likewise: whether all counters are logged, as by `StepStats.metrics`."""

    offload_report: str | Path | None = None
    """Likewise: a folder for what ``megatron-offload report`` shows, once training has ended."""

    model: Any
    is_in_offload = False
    _context: Any = None

    def __getattribute__(self, name: str) -> Any:
        """Return three methods wrapped, whichever class has them: it may call none behind it."""
        found, run = super().__getattribute__(name), _RUNS.get(name)
        return found if run is None else wraps(found)(partial(run, self, found))

    @property
    def offload(self) -> Any:
        """The context around each forward of `model`, with its ``last_step``.

        While another model is trained that is another.
        """
        is_other = getattr(self, "is_in_train", False) and self._context is not None
        if self._context is None or (is_other and not self._context.is_of(self.model)):
            self._context, more = None, self.offload_options  # the next frees what this has
            self._context = get_act_offloading_ctx_manager(
                self.model, config=self.offload_config, warn_if_no_head=False, **more
            )
        return self._context


def _compute_loss(trainer: OffloadMixin, call: Call, *args: Any, **kwargs: Any) -> Any:
    with PatchStack() as patches, nullcontext() if trainer.is_in_offload else trainer.offload:
        patches.replace(trainer, "is_in_offload", True)
        return call(*args, **kwargs)


def _training_step(
    trainer: OffloadMixin, call: Call, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    entered, offload, thread = list[Any](), trainer.offload, get_ident()

    def begin(*_: Any) -> None:
        is_step = is_recording() and not trainer.is_in_offload  # else it generates, or transforms
        if is_step and thread == get_ident():
            offload.__enter__()
            entered.append(offload)

    def end(module: nn.Module, given: Any, output: Any) -> None:
        if entered and thread == get_ident():
            error = sys.exc_info() if output is None else (None, None, None)
            entered.pop().__exit__(*error)

    def compiled(original: Call, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return _compute_loss(trainer, original, *args, **kwargs)

    with PatchStack() as patches:
        if model._compiled_call_impl is None:
            own = hook_calls(model, begin, end, is_outer=True, ends_graph=True)
            patches.remove_later(own)
        else:  # hooks would be part of its graph
            patches.wrap(model, "_compiled_call_impl", compiled)
        return call(model, *args, **kwargs)


def _log(trainer: OffloadMixin, call: Call, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if "loss" in logs:
        trainer.offload.end_step()
        step = trainer.offload.last_step
        logs = {**logs, **step.metrics(all_counters=trainer.offload_all_counters)}
    if "train_runtime" in logs and trainer.offload_report is not None:  # training has ended
        trainer.offload.save_report(trainer.offload_report)
    return call(logs, *args, **kwargs)


_RUNS = {"compute_loss": _compute_loss, "training_step": _training_step, "log": _log}
"""What a trainer's methods are called by."""


def map_config(data: Mapping[str, Any], shape: tuple[int, int], dtype: str) -> ModelMap:
    """Return the map of a causal language model, from what its ``config.json`` holds.

    Forwards run with fake tensors: nothing is computed, and no weights are made. Those of half and
    of a quarter of the length show by how much memory grows.

    Args:
        data: the configuration; code that it refers to is not loaded.
        shape: sequences, and tokens of each.
        dtype: name of the type of weights and activations.

    Raises:
        ConfigError: transformers doesn't know such a model, or can't build or run it.
        IntegrationError: there is no transformers.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise IntegrationError(f"{error}; run: pip install transformers") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"a config.json holds a mapping, not a {type(data).__name__}")
    if "model_type" not in data:
        raise ConfigError("the config.json says no model_type, as those of transformers do")
    known = [str(name) for name in transformers.CONFIG_MAPPING]
    kind = str(data["model_type"])
    if kind not in known:
        said = shorten(repr(kind))
        raise ConfigError(f"transformers has no model_type {said}{did_you_mean(kind, known)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # see the error
    advice = "in Python map_model() takes any model, with any batch"
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(data))
        most = getattr(config, "max_position_embeddings", None) or shape[1]
        with FakeTensorMode(), PatchStack() as patches:
            make = transformers.AutoModelForCausalLM.from_config
            model = make(config, dtype=getattr(torch, dtype)).train()
            sizes = [x.num_embeddings for x in model.modules() if isinstance(x, nn.Embedding)]
            if most < shape[1] and any(most <= size <= most + 2 for size in sizes):
                advice = "give fewer tokens"  # it learns them, and has two more at most
                raise ConfigError(f"it has {most} positions, and not {shape[1]}")
            # Else a mask is made: positions of fake tensors may be those of several sequences.
            if masks := sys.modules.get("transformers.masking_utils"):
                patches.replace(masks, "find_packed_sequence_indices", lambda _: None)

            def seen(length: int) -> ModelMap:
                tokens = torch.zeros((shape[0], length), dtype=torch.long)
                return map_model(model, input_ids=tokens, labels=tokens, use_cache=False)

            own, shorter = seen(shape[1]), {shape[1] // 2, shape[1] // 4} - {0}
            return own.fit(*map(seen, shorter)) if len(shorter) > 1 else own
    except Exception as error:
        text = re.sub(r":\s*\n\s*", ": ", str(error).strip())  # what a first line announces
        what = shorten(text.split("\n")[0].rstrip("."), 200)
        raise ConfigError(f"no map of this {kind} can be made: {what}; {advice}") from error

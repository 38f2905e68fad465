"""Offload for any PyTorch model, with one ``with`` and no marks, by torchtune's and TRL's names."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import warnings
from collections.abc import Mapping
from functools import partial
from sys import exc_info
from typing import Any, Self
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.backends import current_device
from megatron_offload.config import OffloadConfig
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.hooks import graph_break
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.engine.stats import StepStats
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.frontends.adopt import HEADS, adopt_model, is_adopted_by, keep_head, leave_all
from megatron_offload.frontends.around import (
    AroundForwards,
    begin_anew,
    followed,
    with_nearest,
    with_policy,
)
from megatron_offload.model_map.module_hooks import EagerHook, check_model
from megatron_offload.recompute.model_loss import (
    causal_loss,
    is_by_rows,
    large_causal_loss,
    owners_of_loss,
    patch_loss,
)
from megatron_offload.recompute.patches import PatchStack

_logger = logging.getLogger(__name__)

_NO_MODULE = (
    "megatron-offload: nothing is offloaded: no module was called inside the context, or in graphs "
    "alone, so that no rows can be found. 'policy: modules' offloads all that is saved"
)


class OffloadActivations(AroundForwards):
    """While it is entered, what autograd saves goes to host memory; backward gets it back in time.

    Enter it around every forward, the same or a new one: a new one goes on with the memory and the
    learning of the last of its settings, thread and device. Two that exist at a time share nothing.

    Parameters and buffers are kept (plain buffers where `get_act_offloading_ctx_manager` was given
    them), and so do small tensors and those that are not on the accelerator. Distributed and
    quantised tensors are offloaded part by part.

    Args:
        use_pin_memory: page-lock the host memory. Without, copies are slow and block the host.
        use_streams: copy on streams of their own, beside the compute stream.
        max_fwd_stash_size: most tensors whose device memory is held in forward until their copies
            are done. More of them hide slower copies.
        min_offload_size: smallest tensor that is offloaded, in bytes.
        policy: what decides, as in `OffloadConfig`: its name, or a mapping of its keys.
        most_slowdown_percent: what a step may take longer, under the policy ``auto``.
        memory_target: the most device memory to reserve, as in ``"22GiB"``, in its place.
        config: everything else, such as ``host_memory_bytes`` and ``prefetch_bytes``. What it sets
            of ``pin_memory``, ``copy_streams`` and ``min_tensor_bytes`` counts where the argument
            above is left at its default.
        manager: a manager of one's own, which nothing else uses, in place of ``config``.

    Raises:
        ValueError: ``max_fwd_stash_size`` is less than 1, ``min_offload_size`` is negative, or both
            ``config`` and ``manager`` are given.
        ConfigError: an argument and ``config`` disagree, ``config`` sets what it can't follow, or
            something is of another type.
    """

    _door = "OffloadActivations"

    @with_nearest
    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        max_fwd_stash_size: int = 5,
        min_offload_size: int = 1024,
        *,
        policy: str | Mapping[str, Any] | None = None,
        most_slowdown_percent: float | None = None,
        memory_target: int | str | None = None,
        config: OffloadConfig | None = None,
        manager: PipelineOffloadManager | None = None,
        _model: nn.Module | None = None,
    ) -> None:
        _check_switch("use_pin_memory", use_pin_memory)
        _check_switch("use_streams", use_streams)
        if max_fwd_stash_size < 1:
            raise ValueError(f"max_fwd_stash_size must be at least 1, got {max_fwd_stash_size}")
        if min_offload_size < 0:
            raise ValueError(f"min_offload_size can't be negative, got {min_offload_size}")
        if (policy, most_slowdown_percent, memory_target) != (None, None, None):
            if manager is not None:
                raise ConfigError("a manager is given, whose config says what is offloaded")
            config = with_policy(config, policy, most_slowdown_percent, memory_target)
        manager, settings = followed(self._door, config, manager)

        def choose(argument: str, value: Any, default: Any, key: str) -> Any:
            is_fixed = manager is not None and key != "min_tensor_bytes"
            if not is_fixed and key not in settings.model_fields_set:
                return value
            found = getattr(settings, key)
            if value not in (default, found):
                raise ConfigError(
                    f"{argument} is {value!r}, and OffloadConfig.{key} is {found!r}, which means "
                    "the same; give one of them"
                )
            return found

        self.use_pin_memory = choose("use_pin_memory", use_pin_memory, True, "pin_memory")
        self.use_streams = choose("use_streams", use_streams, True, "copy_streams")
        self.max_fwd_stash_size = max_fwd_stash_size
        least = choose("min_offload_size", min_offload_size, 1024, "min_tensor_bytes")
        self.min_tensor_size_bytes = int(least)
        # On the compute stream a copy is done before what comes next, so that nothing need be held.
        sizes = self.min_tensor_size_bytes, max_fwd_stash_size if self.use_streams else 0
        if manager is not None:
            groups = _make(manager, *sizes)
        else:
            given = {"pin_memory": self.use_pin_memory, "copy_streams": self.use_streams}
            given = {key: x for key, x in given.items() if x != getattr(settings, key)}
            groups = _allocate(self, _model, settings.model_copy(update=given), *sizes)
        self.manager, tuner = groups.manager, groups.manager.tuner
        is_others = isinstance(tuner, RowSearch) and (
            tuner.is_orphan if manager is None else _model is None or not tuner.is_of(_model)
        )
        if is_others or (tuner is None and not self.manager.rests):
            begin_anew(self.manager)
        super().__init__(groups)
        step = self.manager.decisions
        is_over = step.committed and step.is_idle()  # and ends as the next begins
        self._of_others = step.last, self.manager.transfers.stats if is_over else None
        is_open = self.manager.tuner is None and self.manager.config.tuned_policy is not None
        self._seeks_model = _model is None and is_open
        self._seeking: RemovableHandle | None = None
        self._owners, self._patched = list[ref[nn.Module]](), list[PatchStack]()
        self._of_model = None if _model is None else ref(_model)
        self._handled: BaseException | None = None  # where it was entered
        if _model is not None:
            self._take_up(_model)

    def _take_up(self, model: nn.Module) -> None:
        """Let its modules note how they made their outputs, and look for rows in it."""
        manager, config = self.manager, self.manager.config
        self._owners = owners_of_loss(model) if config.has_loss_by_rows else []
        if config.enabled and config.names_loss and not self._owners:
            _logger.warning("the loss isn't by rows: it is no causal model of transformers")
        try:
            _hook(ref(model), ref(self._groups))
        except ConfigError:
            if not manager.rows_are_own:
                raise
            begin_anew(manager)  # the model has changed since
            _hook(ref(model), ref(self._groups))
        _search_rows(model, self._groups)
        if self._search is not None and self._owners:
            self._search.loss_is_by_rows = is_by_rows

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, of a module that has one or out of a file, has memory of its own and no marks.
        make = partial(type(self), config=self.manager.config)
        sizes = self.max_fwd_stash_size, self.min_tensor_size_bytes
        return make, (self.use_pin_memory, self.use_streams, *sizes)

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns nothing
        model = None if self._of_model is None else self._of_model()
        if model is not None and not is_adopted_by(model, self.manager):
            _hook(ref(model), ref(self._groups))  # another context has been made for it since
        super().__enter__()
        self._handled = exc_info()[1]
        try:
            loss = causal_loss if self.manager.config.names_loss else large_causal_loss
            self._patched.append(patch_loss(self._owners, loss))
            if self._seeks_model and self._depth == 1:
                self._seek_model()
        except BaseException:
            super().__exit__(*exc_info())
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._patched:
                self._patched.pop().undo()
        finally:
            super().__exit__(*exception)
        if self._seeking is not None:
            self._seeking.remove()
            self._seeking = None
            has_saved = len(self.manager.decisions.committed) > self._num_committed
            if self._seeks_model and has_saved and exception[:1] == (None,):
                self._seeks_model = False
                self.manager.follow_rows((), is_own=True)
                _logger.warning("%s", _NO_MODULE)

    def _seek_model(self) -> None:
        """Look for rows in the model whose forward comes first: it is the first module called."""
        if self.manager.tuner is not None or not torch.is_grad_enabled():
            return

        def found(module: nn.Module, args: Any) -> None:
            if self._groups.is_inside:
                self._seeks_model = False
                handle.remove()
                if self.manager.rests:
                    begin_anew(self.manager)
                _search_rows(module, self._groups)

        self._num_committed = len(self.manager.decisions.committed)
        hook = EagerHook(found)  # what is compiled meanwhile has it in its graph
        handle = self._seeking = nn.modules.module.register_module_forward_pre_hook(hook)

    def is_of(self, model: nn.Module) -> bool:
        """Whether it was made for this model."""
        return self._of_model is not None and self._of_model() is model

    def close(self) -> None:
        """Free all memory and take off all hooks, once; inside of the context a `StateError`."""
        if self._depth and exc_info()[1] is self._handled:
            why = "close() inside of the context would lose what backward of this forward needs"
            raise StateError(f"{why}; leave the context, call backward, and close it at the end")
        self._of_model, self._seeks_model = None, False
        self.manager.close()
        leave_all(self.manager)
        if isinstance(self.manager.tuner, RowSearch):
            self.manager.tuner.close()


class _OffloadModel(OffloadActivations):
    """The context of a known model, or a copy of one, which can follow rows."""

    _door = "get_act_offloading_ctx_manager"


def _make(
    manager: PipelineOffloadManager, min_tensor_bytes: int, most_tensors: int
) -> AutomaticGroups:
    return AutomaticGroups(
        manager, "activations", min_tensor_bytes=min_tensor_bytes, max_inflight_tensors=most_tensors
    )


_allocated: dict[ref[object], AutomaticGroups] = {}
"""What each context has while it lives, and what contexts that are gone have left."""
_idle: dict[tuple[Any, ...], list[ref[object]]] = {}
"""The latter by settings, for the next of the same: the process's, because the documented form
makes a context for each step, and pins and learns once all the same."""


def _allocate(
    context: object, model: nn.Module | None, config: OffloadConfig, *sizes: int
) -> AutomaticGroups:
    """Return what offloads the tensors of a context, for as long as that exists."""
    of_model = None if model is None else ref(model)
    settings = (config.model_dump_json(), frozenset(config.model_fields_set))
    key = threading.get_ident(), current_device(config), settings, sizes, of_model
    for gone in [one for one in _idle if one[-1] is not None and one[-1]() is None]:
        for one in _idle.pop(gone):
            _allocated.pop(one).manager.close()
    left = _idle.setdefault(key, [])
    groups: AutomaticGroups | None = None
    while left and groups is None:
        found = _allocated.pop(left.pop())
        if found.manager.config == config and not found.manager.host_pool.is_closed:
            groups = found  # else it was configured anew
    if groups is None:
        # The settings may have changed, so that what the others have pinned is of no use.
        unused = [one for idle in list(_idle.values()) for one in idle]
        for other in filter(None, map(_allocated.get, unused)):
            other.manager.trim()
        groups = _make(PipelineOffloadManager(config), *sizes)
    groups.manager.enable_offload()
    _allocated[ref(context, left.append)] = groups  # a call in C, in which no interrupt is lost
    return groups


class NoOpManager(saved_tensors_hooks):
    """While it is entered, saved tensors are kept as they are, whatever hooks surround it."""

    def __init__(self) -> None:
        super().__init__(_keep, SavedTensor.unpack)


class NoOffload(contextlib.nullcontext[None]):
    """Does nothing, and has what a program asks `OffloadActivations` for."""

    last_step = StepStats(why="nothing is offloaded: it is switched off")
    """Counters of nothing."""

    def end_step(self) -> bool:
        """Return that there was no step."""
        return False

    def describe(self) -> str:
        """Return that it is switched off."""
        return self.last_step.verdict

    def is_of(self, model: object) -> bool:
        """Return that it does for any model."""
        return True

    def save_report(self, folder: object) -> None:
        """Leave nothing."""

    def close(self) -> None:
        """Free nothing."""


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, (bool, int)):
        raise ConfigError(
            f"{name} is True or False, not of type {type(value).__name__}; settings go by name, as "
            "in config=OffloadConfig(...)"
        )


def get_act_offloading_ctx_manager(
    model: nn.Module,
    enable_activation_offloading: bool = True,
    *,
    warn_if_no_head: bool = True,
    **options: Any,
) -> OffloadActivations | NoOffload:
    """Return what to enter around a model's forward.

    The output head is kept on the device, since backward needs its logits first, and so do the
    model's parameters and buffers.

    Args:
        model: a model, wrapped or not. Its head is ``output``, ``lm_head``, ``output_layer``,
            ``embed_out``, ``score``, ``classifier`` or ``head``.
        enable_activation_offloading: False for a context that does nothing, and counts nothing.
        warn_if_no_head: False where a model without a head is nothing to wonder at.
        **options: arguments of `OffloadActivations`.
    """
    check_model(model)
    _check_switch("enable_activation_offloading", enable_activation_offloading)
    if not enable_activation_offloading:
        inspect.signature(OffloadActivations).bind(**options)  # else a wrong one would show later
        return NoOffload()
    context = _OffloadModel(**options, _model=model)
    if not keep_head(model) and warn_if_no_head:
        warnings.warn(
            "no output head was found in the model, so what it saves is offloaded too, and is "
            f"reloaded at once; heads are called {', '.join(HEADS)}. Run the layer that makes "
            "the model's output inside NoOpManager(), or say warn_if_no_head=False",
            stacklevel=2,
        )
    return context


def _search_rows(model: nn.Module, groups: AutomaticGroups) -> None:
    """Let the manager's steps find rows, if the model has layers."""
    tuner, hook = groups.manager.tuner, partial(_hook, ref(model), ref(groups))
    if isinstance(tuner, RowSearch) and tuner.is_of(model):
        tuner.serve(hook, groups)
    elif groups.manager.config.tuned_policy is not None:
        groups.manager.tuner = RowSearch([model], groups.manager, hook, groups)


def _hook(model: ref[nn.Module], groups: ref[AutomaticGroups]) -> None:
    one, other = model(), groups()
    if one is not None and other is not None:
        adopt_model(one, other.manager, partial(_entered, groups), groups=other)


def _entered(groups: ref[AutomaticGroups]) -> PipelineOffloadManager | None:
    found = groups()
    return found.manager if found is not None and found.forward and found.is_inside else None


@graph_break
def _keep(tensor: torch.Tensor) -> SavedTensor:
    # Not the tensor itself: one that its own node saves would never be freed.
    return SavedTensor(tensor, "kept")

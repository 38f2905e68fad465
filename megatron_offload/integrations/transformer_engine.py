"""Which operation's saved activations are offloaded, and which kept: one decision per operation.

The innermost setting wins; what is recomputed is left to the checkpoint. TransformerEngine's fuser
saves the tensors of all operations of a run in one list; each one's context says its place there.
"""

from __future__ import annotations

import importlib
import sys
import threading
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import nn

from megatron_offload.config import OffloadConfig
from megatron_offload.engine.automatic import AutomaticGroups, unpack
from megatron_offload.engine.chunk import READY_MARK, ChunkOffloadHandler
from megatron_offload.engine.hooks import (
    graph_break,
    is_recording,
    owner_of,
    owner_of_hooks,
    put_on,
)
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import unmark
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import IntegrationError
from megatron_offload.frontends.around import AroundForwards, followed
from megatron_offload.frontends.whole_model import NoOpManager
from megatron_offload.memory.nested import inner_tensors
from megatron_offload.recompute.patches import Call, PatchStack
from megatron_offload.recompute.transformer_engine import mark_not_offload

_FUSER = "transformer_engine.pytorch.ops.fuser"
_OPERATION = "transformer_engine.pytorch.ops.op"
_SETTING = "_activation_offloading"
_OUTER_SETTING = "_activation_offloading_of_whole"

_groups: AutomaticGroups | None = None
_patches = PatchStack()


def operation_groups(
    config: OffloadConfig | None = None, *, manager: PipelineOffloadManager | None = None
) -> AutomaticGroups:
    """Return what moves the tensors of operations that go where nothing around them is offloaded.

    One for the process, made at the first call.

    Args:
        config: how they are offloaded; by default tensors of 1 KiB and more.
        manager: a manager that nothing else uses, in place of ``config``.

    Raises:
        ValueError: it exists, and a ``config`` or ``manager`` is given.
        ConfigError: it sets what can't be followed here.
    """
    global _groups
    if _groups is None:
        if config is None and manager is None:
            config = OffloadConfig(min_tensor_bytes=1024)
        manager, settings = followed("operation_groups", config, manager)
        _groups = AutomaticGroups(manager or PipelineOffloadManager(settings), "operations")
    elif config is not None or manager is not None:
        raise ValueError("the operations' groups exist: configure them before the first forward")
    return _groups


def reset_operation_groups() -> None:
    """Give the memory of `operation_groups` back; the next forward makes them anew."""
    global _groups
    if _groups is not None:
        _groups.manager.close()
        _groups = None


def set_activation_offloading(module_or_op: nn.Module, enabled: bool | None) -> None:
    """Decide about what autograd saves while a module runs.

    Args:
        module_or_op: a module, or an operation that is called as one.
        enabled: True: it is offloaded, even where nothing around it does. False: it is kept. None
            leaves it to what surrounds it, as without a setting.

    Raises:
        TypeError: ``module_or_op`` is no module, or ``enabled`` no bool.
    """
    if not isinstance(module_or_op, nn.Module):
        raise TypeError(f"expected a module or an operation, got a {type(module_or_op).__name__}")
    if enabled is not None and not isinstance(enabled, bool):
        raise TypeError(f"enabled is True, False or None, got {enabled!r}")
    if _SETTING not in vars(module_or_op):
        module_or_op.register_forward_pre_hook(_enter)
        module_or_op.register_forward_hook(_leave, always_call=True)
    fusible = getattr(sys.modules.get(_OPERATION), "FusibleOperation", None)
    if fusible is not None and isinstance(module_or_op, fusible):
        install()
        # The fuser looks through an operation that is made of others, such as `te.ops.Linear`.
        for operation in getattr(module_or_op, "basic_ops", ()):
            setattr(operation, _OUTER_SETTING, enabled)
    setattr(module_or_op, _SETTING, enabled)


def activation_offloading(module_or_op: nn.Module) -> bool | None:
    """Return what was set for a module: True, False, or None."""
    return getattr(module_or_op, _SETTING, None)


def install() -> None:
    """Give TransformerEngine's fusible operations these two names, as a method and an attribute.

    ``operation.set_activation_offloading(True)``, and ``operation.activation_offloading`` to read
    and to set. The first setting of such an operation does it too; a second call changes nothing.

    Raises:
        IntegrationError: TransformerEngine is absent, or its fuser not the one that is known.
    """
    if _patches:
        return
    try:
        fuser = importlib.import_module(_FUSER)
        operation = importlib.import_module(_OPERATION).FusibleOperation
    except ImportError as error:
        raise IntegrationError(f"{error}; pip install 'transformer-engine[pytorch]'") from error
    names = ("OperationContext", "prepare_for_saving", "OperationFuser")
    missing = [name for name in names if not hasattr(fuser, name)]
    if missing:
        raise IntegrationError(
            f"{_FUSER} has no {', '.join(missing)}: settings of fused operations are known to work "
            "with TransformerEngine 2.20"
        )

    def noted_context(original: Call, *args: Any, **kwargs: Any) -> Any:
        context, run = original(*args, **kwargs), owner_of_hooks()
        if isinstance(run, _FusedRun):
            run.contexts.append(context)
        return context

    def decided_prepare(original: Call, *tensors: Any) -> Any:
        run = owner_of_hooks()
        return run.prepare(original, tensors) if isinstance(run, _FusedRun) else original(*tensors)

    def resolved_run(original: Call, self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = []
        for one in self._basic_ops:
            own = activation_offloading(one)
            settings.append(getattr(one, _OUTER_SETTING, None) if own is None else own)
        # A run without settings inside another: nothing of it is that one's.
        context: Any = NoOpManager() if isinstance(owner_of_hooks(), _FusedRun) else nullcontext()
        if is_recording() and {True, False} & set(settings):
            context = _FusedRun(settings)
        with context:
            return original(self, *args, **kwargs)

    _patches.wrap(fuser, "OperationContext", noted_context)
    _patches.wrap(fuser, "prepare_for_saving", decided_prepare)
    _patches.wrap(fuser.OperationFuser, "__call__", resolved_run)
    members = {
        "set_activation_offloading": set_activation_offloading,
        "activation_offloading": property(activation_offloading, set_activation_offloading),
    }
    for name in members.keys() - set(dir(operation)):
        _patches.replace(operation, name, members[name])


uninstall = _patches.undo
"""Puts back what `install` found; does nothing where it was not called."""


def mark_activation_offload(*tensors: torch.Tensor | None) -> None:
    """Let tensors go where what surrounds them goes; frees `mark_not_offload`."""
    for part in (*(tensor for tensor in tensors if tensor is not None), *inner_tensors(tensors)):
        unmark(part)


def maybe_mark_activation_offload(module_or_op: nn.Module, *tensors: torch.Tensor | None) -> None:
    """Mark tensors as their operation's setting says; for operations that save for each other.

    To be called before they are saved, by code that runs several operations as one.
    """
    if activation_offloading(module_or_op) is False:
        mark_not_offload(*tensors)
    else:
        mark_activation_offload(*tensors)


@graph_break
def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """Say that tensors are complete: their copies need wait for nothing that comes later.

    To be called when their last writer was queued, before they are saved; it holds for the next
    save alone, and not if they are changed in place before it. Does nothing where nothing around it
    moves.

    Args:
        *tensors: on the compute stream; None is skipped.
        offload_base_tensor: accepted for TransformerEngine's sake. Views of one storage
            are offloaded as one here in any case.
    """
    owner = owner_of_hooks()
    if isinstance(owner, _FusedRun):
        owner = owner_of(owner.moves)
    if not isinstance(owner, (AutomaticGroups, ChunkOffloadHandler)):
        return
    backend = (owner.manager if isinstance(owner, AutomaticGroups) else owner.transfers).backend
    parts = [part for part in inner_tensors(tensors) if backend.owns(part)]
    for part in parts:
        backend.note_produced(part, "start_offload")
    event = backend.record(backend.compute_stream()) if parts else None
    for part in parts:
        setattr(part, READY_MARK, (part._version, event))


def _moves_all() -> bool:
    """Whether what surrounds this offloads all that is saved anyway."""
    owner = owner_of_hooks()
    return isinstance(owner, ChunkOffloadHandler) or (
        isinstance(owner, AutomaticGroups) and owner.should_offload is None
    )


_entered = threading.local()
"""Its ``stack``: which settings are in force in this thread, each a module and what leaves it."""


class _FusedRun:
    """Saved-tensor hooks for one fused run, in which each operation has its own setting."""

    def __init__(self, settings: list[bool | None]) -> None:
        self._settings = settings
        self._surrounding = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._own = operation_groups() if True in settings and not _moves_all() else None
        self.moves: Any = self._own.pack if self._own else (self._surrounding or [None])[0]
        self.contexts: list[Any] = []
        self._decisions: list[tuple[torch.Tensor, bool | None]] = []

    def __enter__(self) -> Self:
        if self._own is not None:
            self._own.begin()
        put_on(self._pack, unpack)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self.contexts.clear()
        self._decisions.clear()
        if self._own is not None:
            self._own.end(has_failed=kind is not None)

    def prepare(self, original: Call, tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        """Do what the fuser's ``prepare_for_saving`` does, and decide about each part."""
        if len(self.contexts) != len(self._settings):
            raise IntegrationError(
                f"the fuser made {len(self.contexts)} contexts for {len(self._settings)} "
                "operations; this version of TransformerEngine is not known"
            )
        settings: list[bool | None] = [None] * len(tensors)
        for context, setting in zip(self.contexts, self._settings, strict=True):
            begin, end = context._saved_tensors_range
            settings[begin:end] = [setting] * (end - begin)
        parts: list[Any] = []
        objects: list[Any] = []
        for tensor, setting in zip(tensors, settings, strict=True):
            of_tensor, of_object = original(tensor)
            parts += of_tensor
            objects += of_object
            self._decisions += [(part, setting) for part in of_tensor if part is not None]
        return parts, objects

    def _pack(self, tensor: torch.Tensor) -> Any:
        index = next((i for i, (part, _) in enumerate(self._decisions) if part is tensor), None)
        setting = None if index is None else self._decisions.pop(index)[1]
        if setting is True:
            return self.moves(tensor)
        if setting is None and self._surrounding is not None:
            pack, unpack = self._surrounding
            return SimpleNamespace(unpack=partial(unpack, pack(tensor)))
        return SavedTensor(tensor, "kept")


# The hooks are plain functions, so that a module with a setting can be copied and pickled.
@graph_break
def _enter(module: nn.Module, args: Any) -> None:
    setting = activation_offloading(module) if is_recording() else None
    left = ExitStack()
    if setting is False:
        left.enter_context(NoOpManager())
    elif setting is True and not _moves_all():
        left.enter_context(AroundForwards(operation_groups()))
    vars(_entered).setdefault("stack", []).append((module, left))


@graph_break
def _leave(module: nn.Module, args: Any, output: Any) -> None:
    stack = vars(_entered).get("stack")
    if stack and stack[-1][0] is module:  # else another hook raised before ours ran
        stack.pop()[1].close()

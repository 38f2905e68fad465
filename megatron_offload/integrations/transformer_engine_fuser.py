"""TransformerEngine's operation fuser: operations that run as one still save each for itself.

A fused run saves the tensors of all its operations at its end, in one list. No hook can tell whose
they are, but the fuser knows: each operation has a context with its place in that list.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.engine.automatic import unpack
from megatron_offload.engine.exchanges import Exchanges
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.engine.subclasses import Packed
from megatron_offload.errors import IntegrationError

_FUSER = "transformer_engine.pytorch.ops.fuser"
_OPERATION = "transformer_engine.pytorch.ops.op"


class _Foreign:
    """What the hooks that surround a fused run have made of a tensor."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed = packed
        self._unpack = unpack

    def unpack(self) -> torch.Tensor:
        return self._unpack(self._packed)


class FusedSettings:
    """Saved-tensor hooks for one fused run, in which each operation has its own setting.

    Args:
        settings: of each operation: True to move, False to stay, None for what surrounds the run.
        moves: the pack hook of what moves.
    """

    def __init__(
        self, settings: list[bool | None], moves: Callable[[torch.Tensor], Packed]
    ) -> None:
        self._settings = settings
        self.moves = moves
        self._surrounding = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._contexts: list[Any] = []
        self._decisions: list[tuple[torch.Tensor, bool | None]] = []

    def __enter__(self) -> Self:
        saved_tensors_hooks(self._pack, unpack).__enter__()  # to keep it would be a cycle
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._contexts.clear()
        self._decisions.clear()

    def add_context(self, context: Any) -> None:
        """Take note of the next operation's context."""
        self._contexts.append(context)

    def prepare(self, original: Callable[..., Any], tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        """Do what the fuser's ``prepare_for_saving`` does, and decide about each part.

        Raises:
            IntegrationError: the fuser is not the one that this was written for.
        """
        if len(self._contexts) != len(self._settings):
            raise IntegrationError(
                f"the fuser made {len(self._contexts)} contexts for {len(self._settings)} "
                "operations; this version of TransformerEngine is not known"
            )
        settings: list[bool | None] = [None] * len(tensors)
        for context, setting in zip(self._contexts, self._settings, strict=True):
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

    def _pack(self, tensor: torch.Tensor) -> Packed:
        setting = None
        for index, (part, decided) in enumerate(self._decisions):
            if part is tensor:
                setting = decided
                del self._decisions[index]
                break
        if setting is True:
            return self.moves(tensor)
        if setting is None and self._surrounding is not None:
            pack, unpack = self._surrounding
            return _Foreign(pack(tensor), unpack)
        return SavedTensor(tensor, None, "kept")


class _Runs(threading.local):
    """The fused runs that this thread is in; None for one without settings."""

    def __init__(self) -> None:
        self.stack: list[FusedSettings | None] = []


_runs = _Runs()
_exchanged = Exchanges()


def is_fusible(module: nn.Module) -> bool:
    """Whether a module is one of TransformerEngine's fusible operations."""
    operations = sys.modules.get(_OPERATION)
    kind = getattr(operations, "FusibleOperation", None)
    return kind is not None and isinstance(module, kind)


def install(
    settings_of: Callable[[list[nn.Module]], FusedSettings | None], members: Mapping[str, Any]
) -> None:
    """Ask for the settings of every fused run of operations; a second call changes nothing.

    Args:
        settings_of: gets the operations of a run and returns a context for it, or None where none
            of them has a setting.
        members: what operations get by these names, where they have nothing of the name.

    Raises:
        IntegrationError: TransformerEngine's fuser is not the one that this was written for.
    """
    if _exchanged:
        return
    try:
        fuser = importlib.import_module(_FUSER)
        operation = importlib.import_module(_OPERATION).FusibleOperation
    except ImportError as error:
        raise IntegrationError(f"TransformerEngine has no fusible operations: {error}") from error
    names = ("OperationContext", "prepare_for_saving", "OperationFuser")
    missing = [name for name in names if not hasattr(fuser, name)]
    if missing:
        raise IntegrationError(
            f"{_FUSER} has no {', '.join(missing)}: settings of fused operations are known to work "
            "with TransformerEngine 2.20"
        )
    new_context, prepare = fuser.OperationContext, fuser.prepare_for_saving
    run = fuser.OperationFuser.__call__

    def noted_context(*args: Any, **kwargs: Any) -> Any:
        context = new_context(*args, **kwargs)
        if _runs.stack and _runs.stack[-1] is not None:
            _runs.stack[-1].add_context(context)
        return context

    def decided_prepare(*tensors: Any) -> Any:
        if _runs.stack and _runs.stack[-1] is not None:
            return _runs.stack[-1].prepare(prepare, tensors)
        return prepare(*tensors)

    def settled_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(list(self._basic_ops))
        _runs.stack.append(settings)
        try:
            if settings is None:
                return run(self, *args, **kwargs)
            with settings:
                return run(self, *args, **kwargs)
        finally:
            _runs.stack.pop()

    _exchanged.replace(fuser, "OperationContext", noted_context)
    _exchanged.replace(fuser, "prepare_for_saving", decided_prepare)
    _exchanged.replace(fuser.OperationFuser, "__call__", settled_run)
    for name, member in members.items():
        if not hasattr(operation, name):
            _exchanged.replace(operation, name, member)


def uninstall() -> None:
    """Put back what `install` found; does nothing where it was not called."""
    _exchanged.undo()

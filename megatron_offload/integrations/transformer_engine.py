"""Which operation's saved activations go to the host, and which stay: one decision per operation.

An operation is any ``nn.Module`` that is called, fused or not. Its setting holds for what autograd
saves while its forward runs; the innermost wins. What is recomputed is left to the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from megatron_offload.backends.base import Backend
from megatron_offload.config import OffloadConfig
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.chunk import READY_MARK, ChunkOffloadHandler
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.hooks import is_recording, owner_of, owner_of_hooks
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import take_back
from megatron_offload.engine.quantised_weights import mark_not_offload, plain_parts
from megatron_offload.frontends.around import engine_of, refuse_unfollowed
from megatron_offload.frontends.whole_model import NoOpManager
from megatron_offload.integrations import transformer_engine_fuser
from megatron_offload.integrations.transformer_engine_fuser import FusedSettings

_SETTING = "_activation_offloading"
_OUTER_SETTING = "_activation_offloading_of_whole"

_groups: AutomaticGroups | None = None


def operation_groups(
    config: OffloadConfig | None = None, *, manager: PipelineOffloadManager | None = None
) -> AutomaticGroups:
    """Return what moves the tensors of operations that go where nothing around them is moved.

    One for the process, made at the first call.

    Args:
        config: how they move; by default tensors of 1 KiB and more.
        manager: a manager that nothing else uses, in place of ``config``.

    Raises:
        ValueError: it exists, and a ``config`` or ``manager`` is given.
        ConfigError: it sets what can't be followed here.
    """
    global _groups
    if _groups is None:
        manager = engine_of(manager) or PipelineOffloadManager(
            config or OffloadConfig(min_tensor_bytes=1024)
        )
        refuse_unfollowed("operation_groups", manager.config)
        _groups = AutomaticGroups(manager, "operations")
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
        enabled: True: it goes to the host, even where nothing around it does. False: it stays. None
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
    if transformer_engine_fuser.is_fusible(module_or_op):
        install()
        # The fuser looks through an operation that is made of others, such as `te.ops.Linear`.
        for operation in getattr(module_or_op, "basic_ops", ()):
            setattr(operation, _OUTER_SETTING, enabled)
    setattr(module_or_op, _SETTING, enabled)


def activation_offloading(module_or_op: nn.Module) -> bool | None:
    """Return what was set for a module: True, False, or None."""
    setting: bool | None = getattr(module_or_op, _SETTING, None)
    return setting


def install() -> None:
    """Give TransformerEngine's fusible operations these two names, as a method and an attribute.

    ``operation.set_activation_offloading(True)``, and ``operation.activation_offloading`` to read
    and to set. The first setting of such an operation does it too;
    `megatron_offload.integrations.transformer_engine_fuser.uninstall` takes it back.

    Raises:
        IntegrationError: TransformerEngine is absent, or its fuser not the one that is known.
    """
    attribute = property(activation_offloading, set_activation_offloading)
    transformer_engine_fuser.install(
        _settings_of,
        {
            "set_activation_offloading": set_activation_offloading,
            "activation_offloading": attribute,
        },
    )


def mark_activation_offload(*tensors: torch.Tensor | None) -> None:
    """Let tensors go where what surrounds them goes; takes back `mark_not_offload`."""
    for part in (*(tensor for tensor in tensors if tensor is not None), *plain_parts(tensors)):
        take_back(part)


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
        offload_base_tensor: accepted for TransformerEngine's sake. Views of one storage move as one
            here in any case.
    """
    backend = _surrounding_backend()
    if backend is None:
        return
    parts = [part for part in plain_parts(tensors) if backend.owns(part)]
    if not parts:
        return
    for part in parts:
        if backend.observes:
            backend.note_produced(part, "start_offload")
    event = backend.record(backend.compute_stream())
    for part in parts:
        setattr(part, READY_MARK, (part._version, event))


def _surrounding_backend() -> Backend | None:
    owner = owner_of_hooks()
    if isinstance(owner, FusedSettings):
        owner = owner_of(owner.moves)
    if isinstance(owner, AutomaticGroups):
        return owner.manager.backend
    return owner.transfers.backend if isinstance(owner, ChunkOffloadHandler) else None


def _moves_all() -> bool:
    """Whether what surrounds this moves all that is saved anyway."""
    owner = owner_of_hooks()
    return isinstance(owner, ChunkOffloadHandler) or (
        isinstance(owner, AutomaticGroups) and owner.should_offload is None
    )


# The hooks are plain functions, so that a module with a setting can be copied and pickled.


class _Entered(threading.local):
    """Which settings are in force in this thread: the module, and how to leave it."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Callable[[], None] | None]] = []


_entered = _Entered()


class _OwnSettings(FusedSettings):
    """A fused run, some of whose operations go where nothing around the run moves."""

    def __init__(self, settings: list[bool | None]) -> None:
        self._groups = operation_groups()
        super().__init__(settings, self._groups.pack)

    def __enter__(self) -> Self:
        self._groups.begin()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        super().__exit__()
        self._groups.end(has_failed=kind is not None)


def _settings_of(operations: list[nn.Module]) -> FusedSettings | None:
    """Return the context of a fused run; None where no operation has a setting."""
    settings = [
        own if own is not None else getattr(operation, _OUTER_SETTING, None)
        for operation in operations
        for own in (activation_offloading(operation),)
    ]
    if not is_recording() or all(setting is None for setting in settings):
        return None
    if True not in settings:
        return FusedSettings(settings, _never)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return FusedSettings(settings, hooks[0]) if _moves_all() else _OwnSettings(settings)


def _never(tensor: torch.Tensor) -> Any:
    raise AssertionError("no operation of this run moves")


@graph_break
def _enter(module: nn.Module, args: Any) -> None:
    setting = activation_offloading(module)
    left: Callable[[], None] | None = None
    records = is_recording()
    if setting is False and records:
        hooks = NoOpManager()
        hooks.__enter__()
        left = hooks.__exit__
    elif setting is True and records and not _moves_all():
        groups = operation_groups()
        groups.begin()
        left = groups.end
    _entered.stack.append((module, left))


@graph_break
def _leave(module: nn.Module, args: Any, output: Any) -> None:
    stack = _entered.stack
    if stack and stack[-1][0] is module:  # else another hook raised before ours ran
        _, left = stack.pop()
        if left is not None:
            left()

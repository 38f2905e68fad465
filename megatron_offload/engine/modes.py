"""The modes of dispatch and of functions that a program has entered, and how they are left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_excluded,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


def device_context() -> DeviceContext | None:
    """Return the mode behind ``torch.set_default_device``, which lies below all others."""
    mode = torch._C._get_function_stack_at(0) if _len_torch_function_stack() else None
    return mode if isinstance(mode, DeviceContext) else None


def is_traced() -> bool:
    """Whether what runs is traced into a graph, of which the engine's own work is no part."""
    return _len_torch_dispatch_stack() > 0 and get_proxy_mode() is not None


def has_modes() -> bool:
    """Whether a mode is entered that may change what a function computes, and how."""
    if _len_torch_dispatch_stack():
        return not is_traced()  # else all of it belongs to the graph
    num_functions = _len_torch_function_stack()
    return num_functions > 0 and (num_functions > 1 or device_context() is None)


def must_be_apart() -> bool:
    """Whether a mode is entered, or what runs is below autograd, where aliases count no changes."""
    return has_modes() or _dispatch_tls_is_dispatch_key_excluded(DispatchKey.ADInplaceOrView)


def leave_modes(undo: ExitStack) -> None:
    """Leave all modes that are entered, until ``undo`` enters them again; aliases count changes."""
    undo.enter_context(torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False))
    if _len_torch_dispatch_stack():
        undo.enter_context(_disable_current_modes())
    for _ in range(_len_torch_function_stack()):
        undo.callback(_push_mode, _pop_mode())


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call what a mode of the program must not see, as it is no part of that."""
    with ExitStack() as undo:
        leave_modes(undo)
        return function(*args)

"""What is in force in this thread: a backward, hooks of saved tensors, and a program's modes.

Also how what the program is traced or compiled into is kept apart from the engine: that keeps books
about memory, which no graph can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import is_grad_enabled
from torch._C import (
    DispatchKey,
    _current_graph_task_id,
    _dispatch_tls_is_dispatch_key_excluded,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import (  # type: ignore[attr-defined]  # its stub has not all
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)
from torch._C._dynamo import eval_frame
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])

CHECKPOINT = "torch.utils.checkpoint"
"""The owner of hooks of checkpoints that aren't reentrant; others' show in their rerun alone."""
RECOMPUTE = "megatron_offload.recompute"
"""The owner of hooks under which nothing is recorded, since it is recomputed as a whole."""


def is_in_backward() -> bool:
    """Whether this thread runs a backward; a forward in there is a recompute."""
    return _current_graph_task_id() != -1


def others_hooks() -> str:
    """Return whose hooks of saved tensors are in force, module and class, if not of groups.

    A checkpoint counts what is saved inside it in forward and again in its rerun, another may
    compress; what they rely on isn't known, so nothing is taken from under them.
    """
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is None:
        return ""
    pack = hooks[0]
    pack = pack.func if isinstance(pack, partial) else pack
    owner = getattr(pack, "__module__", None) or "something"
    owner += "." + getattr(pack, "__qualname__", type(pack).__name__).partition(".")[0]
    is_ours = owner.startswith("megatron_offload.") and not owner.startswith(RECOMPUTE)
    return "" if is_ours else owner


def is_recording(*, needs_grad: bool = True) -> bool:
    """Whether what is saved here and now is saved for a backward, and by this package's rules.

    An autograd function saves with grad switched off; ``needs_grad`` says that this isn't one.
    Nothing is where torch refuses all hooks, as ``torch.func.grad`` lets it.
    """
    if _current_graph_task_id() != -1 or (needs_grad and not is_grad_enabled()):
        return False
    return not others_hooks() and _saved_tensors_hooks_is_enabled()


def owner_of_hooks() -> Any:
    """Return the object whose method is the pack hook in force; None where it is no method."""
    hooks = _top_saved_tensors_default_hooks(True)
    return owner_of(hooks[0]) if hooks else None


def owner_of(pack: Callable[..., Any]) -> Any:
    """Return the object whose method a pack hook is; None where it is no method."""
    return getattr(pack.func if isinstance(pack, partial) else pack, "__self__", None)


def take_off(is_one: Callable[[Any], bool], *, all_of_them: bool = False) -> list[Any]:
    """Take hooks of saved tensors off, wherever they lie by now: the last, or all; return them.

    Others are kept as they are, and in their order. ``is_one`` is asked with pack hooks.
    """
    found, others = list[Any](), list[Any]()
    while (hooks := _top_saved_tensors_default_hooks(True)) is not None:
        _pop_saved_tensors_default_hooks()
        (found if is_one(hooks[0]) else others).insert(0, hooks)
        if found and not all_of_them:
            break
    for both in others:
        put_on(*both)
    return found


put_on = _push_saved_tensors_default_hooks
"""Put a pack and an unpack hook in force."""


def take_off_all(transfers: object) -> None:
    """Take off all hooks whose owners have these ``transfers``: of one manager."""
    take_off(lambda pack: getattr(owner_of(pack), "transfers", None) is transfers, all_of_them=True)


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


def graph_break(function: F) -> F:
    """Keep the compiler out of a function and of all that it calls; use as a decorator.

    Called from code that is being compiled it ends the graph; the next begins after it.
    ``torch.compiler.disable`` does so too, but it imports the whole compiler (seconds), and puts a
    second call around each one. So the marks that it sets are set here.
    """
    assert isinstance(function, FunctionType)
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    vars(function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="activation offload runs between graphs, see docs/compile.md",
    )
    return function

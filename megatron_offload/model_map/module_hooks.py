"""Hooks of modules, and modules by their dotted names and by patterns over these."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Set
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.engine.hooks import graph_break
from megatron_offload.errors import ConfigError
from megatron_offload.memory.nested import first_tensor

_GLOBS = {".**": r"(?:\.[^.]+)*", "**.": r"(?:[^.]+\.)*", "**": ".*", "*": "[^.]*", "?": "[^.]"}
"""What stands for something else in a pattern over dotted names."""


class ModuleHook:
    """A forward ``hook`` of one module; its copies, and what is loaded from a file, do nothing."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[..., object]) -> None:
        self.hook = hook

    @graph_break
    def __call__(self, *args: Any) -> None:
        """Run the hook."""
        self.hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A call that takes anything, does nothing and returns None, and that every Python has.
        return getattr, (nullcontext(), "__exit__")


def is_own_hook(hook: object) -> bool:
    """Whether a hook is this package's, or what a copied or loaded module has in its place."""
    return isinstance(hook, ModuleHook) or isinstance(getattr(hook, "__self__", 0), nullcontext)


class EagerHook(ModuleHook):
    """A hook that does nothing inside a compiled graph, and doesn't end it.

    A graph is compiled anew where a module has gained or lost a hook. So one that has never run, as
    in a graph, remains on its module when it is taken off, and serves the next of its ``tag``.
    """

    __slots__ = ("handle", "has_run", "tag")
    handle: RemovableHandle

    def __init__(self, hook: Callable[..., object], tag: Hashable = None) -> None:
        super().__init__(hook)
        self.has_run, self.tag = False, tag

    def __call__(self, *args: Any) -> None:
        """Run the hook."""
        if not torch.compiler.is_compiling():
            self.has_run = True
            self.hook(*args)

    def take_off(self, *_: Any) -> None:
        """Take it off its module, as it would run for the first time after `remove`."""
        self.handle.remove()

    def serves(self, tag: Hashable) -> bool:
        """Whether it may become another hook: it was taken off, and is still there."""
        return self.tag == tag and self.hook == self.take_off


_NUMBERS = [RemovableHandle(OrderedDict()).id for _ in range(8)]
"""Of hooks: on each module of the first that is free."""

_owned: WeakKeyDictionary[nn.Module, dict[Hashable, list[RemovableHandle]]] = WeakKeyDictionary()


def hooks_of(owner: Hashable, module: nn.Module) -> list[RemovableHandle]:
    """Return the list for an owner's hooks on a module; those of an earlier call are taken off."""
    handles = _owned.setdefault(_inner(module), {}).setdefault(owner, [])
    remove(handles)
    return handles


def remove(handles: list[RemovableHandle]) -> None:
    """Take hooks off; of an `EagerHook` as that says."""
    while handles:
        handle = handles.pop()
        hook = (handle.hooks_dict_ref() or {}).get(handle.id)
        if isinstance(hook, EagerHook) and not hook.has_run:
            hook.hook = hook.take_off
        else:
            handle.remove()
            handle.id = -1  # a second owner removes nothing else by its number


def unhook(owners: Set[Hashable], modules: Iterable[nn.Module]) -> None:
    """Take off all hooks that these owners have."""
    for module in modules:
        for owner in owners & _owned.get(_inner(module), {}).keys():
            hooks_of(owner, module)


def sweep(modules: Iterable[nn.Module]) -> None:
    """Take off every `EagerHook` that remains, though it was taken off."""
    for module in modules:
        for hook in [hook for hooks in _tables_of(module) for hook in hooks.values()]:
            if isinstance(hook, EagerHook) and hook.hook == hook.take_off:
                hook.take_off()


def _inner(module: nn.Module) -> nn.Module:
    if "_orig_mod" not in module._modules:
        return module
    found = module._modules["_orig_mod"]
    assert found is not None
    return found


def hook_calls(
    module: nn.Module,
    begin: Callable[..., object],
    end: Callable[..., object],
    *,
    owner: Hashable = None,
    is_outer: bool = False,
    ends_graph: bool = False,
) -> list[RemovableHandle]:
    """Call ``begin(module, args, kwargs)`` before each call of a module, behind it ``end``.

    That is given the module, its arguments by position and its output, None where it has raised.
    What ``is_outer`` begins before all hooks that there are. An ``owner`` has them by `hooks_of`.
    Inside a compiled graph they do nothing, or each ``ends_graph``, which ``fullgraph`` refuses.
    """
    handles = [] if owner is None else hooks_of(owner, module)
    tag, calls, both = (owner, is_outer), (begin, end), _tables_of(module)
    for one in [] if ends_graph else [x for x in both[0] if x in both[1]]:
        found = [hooks[one] for hooks in both]
        free = [x for x in found if isinstance(x, EagerHook) and x.serves(tag)]
        if len(free) == len(both):
            for spare, call in zip(free, calls, strict=True):
                spare.hook = call
            handles += [spare.handle for spare in free]
            return handles
    own = [ModuleHook(call) if ends_graph else EagerHook(call, tag) for call in calls]
    added = [
        module.register_forward_pre_hook(own[0], prepend=is_outer, with_kwargs=True),
        module.register_forward_hook(own[1], always_call=True),
    ]
    unused = (x for x in _NUMBERS if not (ends_graph or x in both[0] or x in both[1]))
    if (number := next(unused, None)) is not None:
        renumber(added[0], number, last=not is_outer)
        renumber(added[1], number, last=True)
    for hook, handle in zip(own, added, strict=True):
        if isinstance(hook, EagerHook):
            hook.handle = handle
    handles += added
    return handles


def _tables_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks


def renumber(handle: RemovableHandle, number: int, *, last: bool) -> None:
    """Give a hook a number that those of other modules have: a compiler compiles each one anew."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
            hooks.move_to_end(number, last=last)
    handle.id = number


def tokens_of(args: Any, kwargs: Any) -> float:
    """Return the elements of the first tensor that a module is given, but for its last dimension.

    Infinity where it is given none.
    """
    tensor = first_tensor((*args, *kwargs.values()))
    if tensor is None:
        return math.inf
    return tensor.shape[:-1].numel() if tensor.dim() > 1 else tensor.numel()


def has_tokens(least: int, args: Any, kwargs: Any) -> bool:
    """Whether a module is given at least so many tokens."""
    return least == 0 or tokens_of(args, kwargs) >= least


def check_model(model: object) -> None:
    """Refuse with a `ConfigError` what a front door was given and is no model."""
    if not isinstance(model, nn.Module):
        given = "the class" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"the model is an nn.Module, and was given as {given} {model!r:.60}")


def named_modules(chunk: nn.Module, *, all_names: bool = False) -> dict[str, nn.Module]:
    """Return all modules by their dotted names, to which ``torch.compile`` adds no part.

    Of a module that it has wrapped this is the wrapper: its hooks run outside the graph. One that
    is registered twice has its first name, or ``all_names``. What is no model is a `ConfigError`.
    """
    check_model(chunk)
    modules, left = dict[str, nn.Module](), [("", chunk, set[nn.Module]())]
    while left:  # torch's own takes five times as long, and searches walk often
        path, module, seen = left.pop()
        if module in seen:
            continue
        seen = {*seen} if all_names else seen  # then it is what the module lies in
        seen.add(module)
        modules.setdefault(path, module)
        for name, part in reversed(module._modules.items()):
            if part is not None:
                own = path if name == "_orig_mod" else f"{path}.{name}" if path else name
                left.append((own, part, seen))
    return modules


def compiled_parts(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return which modules run inside a compiled graph, of which their hooks would be a part."""
    compiled = (
        module if module._compiled_call_impl is not None else module._modules["_orig_mod"]
        for module in modules
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
    )
    return {part for module in compiled if module is not None for part in module.modules()}


def expression_of(pattern: str) -> re.Pattern[str]:
    """Return a pattern over dotted names as a regular expression; ``0-13`` is 14 numbers."""
    regex = re.sub(r"(?<![^.])(\d+)\\-(\d+)(?![^\\])", _numbers, re.escape(pattern))
    for glob, meaning in _GLOBS.items():
        regex = regex.replace(re.escape(glob), meaning)
    return re.compile(regex)


def _numbers(found: re.Match[str]) -> str:
    first, last = map(int, found.groups())
    return f"(?:{'|'.join(map(str, range(first, min(last + 1, first + 10_000))))})"

"""Recompute of what modules return, by their class and by name.

Hooks note from what and how a module made its output; the rest is the engine's.
Classes are known by their exact names, under which no user's code is; others count where a pattern
names the module. Hooks leave copies of modules alone.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from megatron_offload.config import RECOMPUTE_SITES, recompute_patterns
from megatron_offload.core.profile import kind_of
from megatron_offload.engine.hooks import is_in_backward
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.modes import has_modes
from megatron_offload.engine.module_hooks import (
    EagerHook,
    ModuleHook,
    expression_of,
    hooks_of,
    named_modules,
)
from megatron_offload.engine.patches import Call
from megatron_offload.recompute.call_state import MODES
from megatron_offload.recompute.random_states import RandomStates, are_captured
from megatron_offload.recompute.recipe import lasting
from megatron_offload.recompute.recipes import add_recipe
from megatron_offload.recompute.sites import recompute_sites

_logger = logging.getLogger(__name__)

_KNOWN = {
    "norm": """
        torch.nn.modules.normalization.LayerNorm torch.nn.modules.normalization.RMSNorm
        megatron.core.fusions.fused_layer_norm.FusedLayerNorm
        megatron.core.transformer.torch_norm.L2Norm
        transformer_engine.pytorch.module.layernorm.LayerNorm
        transformer_engine.pytorch.module.rmsnorm.RMSNorm""",
    "mlp_act": """
        torch.nn.modules.activation.GELU torch.nn.modules.activation.SiLU
        torch.nn.modules.activation.Mish torch.nn.modules.activation.Softplus
        torch.nn.modules.activation.Hardswish torch.nn.modules.activation.LeakyReLU""",
    "mlp_fc1": """
        megatron.core.tensor_parallel.layers.ColumnParallelLinear
        megatron.core.extensions.transformer_engine.TEColumnParallelLinear
        megatron.core.extensions.transformer_engine.TELayerNormColumnParallelLinear""",
}
"""Classes that do nothing but compute, of what they are given and have, by the unit that they are.

Of activations those whose backward saves their input: one that saves its output would need more."""

_UNIT_OF = {name: unit for unit, names in _KNOWN.items() for name in names.split()}

_SHARED_ID = RemovableHandle(OrderedDict()).id

FindManager = Callable[[], PipelineOffloadManager | None]


def unit_of(path: str, module: nn.Module) -> str | None:
    """Return the unit of a module of a known class: ``norm``, ``mlp_act``, one of ``mlp_fc1``."""
    kind = type(module)
    unit = _UNIT_OF.get(f"{kind.__module__}.{kind.__qualname__}")
    if unit == "mlp_fc1":
        return f"{unit}:{path}" if _is_plain_fc1(path, module) else None
    return unit


def adopt_model(
    model: nn.Module,
    manager: PipelineOffloadManager,
    find_manager: FindManager | None = None,
    find_for_sites: FindManager | None = None,
) -> list[RemovableHandle]:
    """Keep a model's parameters and buffers, and let its modules be recomputed.

    ``find_for_sites`` is asked by sites in place of ``find_manager``.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        manager.mark_not_offload(tensor)
    find_manager = find_manager or (lambda: manager)
    units = manager.recompute
    return recompute_modules(named_modules(model), units, find_manager, find_for_sites)


def recompute_modules(
    modules: Mapping[str, nn.Module],
    units: Collection[str],
    find_manager: FindManager,
    find_for_sites: FindManager | None = None,
) -> list[RemovableHandle]:
    """Let what these modules return be recomputed, where ``units`` name them or their kind.

    The hooks of an earlier call on the same modules go. ``find_manager`` returns whose forward it
    is when one of them has run; None where it is no manager's.
    """
    patterns = {pattern: expression_of(pattern) for pattern in recompute_patterns(units)}
    for pattern, expression in patterns.items():
        if not any(expression.fullmatch(path) for path in modules):
            _logger.warning("recompute: no module here matches %r", pattern)
    handles = []
    for path, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # no hook of it runs
        own = hooks_of(_Source, module)
        named = next((name for name, e in patterns.items() if e.fullmatch(path)), "")
        unit = named or unit_of(path, module) or ""
        if kind_of(unit) not in units:
            continue
        source = _Source(unit, find_manager, type(module), is_known=not named)
        if named:
            own.append(module.register_forward_pre_hook(source.pre_hook, with_kwargs=True))
            _share_id(own[0], last=True)
        own.append(module.register_forward_hook(source.hook, with_kwargs=True, always_call=True))
        _share_id(own[-1], last=False)
        handles += own
    sites = [kind for kind in RECOMPUTE_SITES if kind in units]
    return handles + recompute_sites(modules, sites, find_for_sites or find_manager)


def _is_plain_fc1(path: str, module: nn.Module) -> bool:
    """Whether this is the first matrix product of Megatron's dense MLP, and nothing besides.

    Not where its weight is sharded, and so may have no memory when its output is recomputed.
    """
    config, weight = getattr(module, "config", None), module._parameters.get("weight")
    has_more = (getattr(config, key, None) for key in ("fp8", "fp4", "sequence_parallel"))
    is_whole = type(weight) is nn.Parameter and weight.dim() == 2
    return path.endswith("mlp.linear_fc1") and is_whole and not any(has_more)


def _share_id(handle: RemovableHandle, *, last: bool) -> None:
    """Give the hooks of all modules one number: a compiler compiles each number anew."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            hooks[_SHARED_ID] = hooks.pop(handle.id)
            hooks.move_to_end(_SHARED_ID, last=last)
    handle.id = _SHARED_ID


class _Begun(NamedTuple):
    """A forward under way of a module that a pattern names."""

    refusal: str
    twin: nn.Module | None
    reads: Sequence[torch.Tensor]
    versions: Sequence[tuple[torch.Tensor, int]]
    """Of what it has and is given."""
    states: RandomStates | None


class _Source:
    """The hooks of one module that note how its output was made.

    One that is known draws no random numbers, changes nothing, and never asks for the grad mode. Of
    others the state is noted when their forward begins, and what they change is seen at its end.
    """

    def __init__(
        self, unit: str, find_manager: FindManager, kind: type[nn.Module], *, is_known: bool
    ) -> None:
        self.unit = unit
        self.find_manager = find_manager
        self.hook, self.pre_hook = EagerHook(self.end), EagerHook(self.begin)
        self._kind, self._forward = kind, kind.forward
        self._is_known = is_known
        self._begun: list[_Begun | None] = []

    def _manager(self) -> PipelineOffloadManager | None:
        manager = self.find_manager()
        if manager is None or kind_of(self.unit) not in manager.recompute:
            return None
        return manager if manager.records() and manager.may_recompute(self.unit) else None

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a forward begins with, and may change."""
        if is_in_backward():
            return  # a rerun, which may end without `end`
        begun = None
        if self._manager() is not None:
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if not all(map(_is_plain, (*args, *kwargs.values()))):
                begun = _Begun("it is given an object that may change", None, (), (), None)
            elif not any(map(is_functorch_wrapped_tensor, given)):
                begun = self._note(module, given)
        self._begun.append(begun)

    def _note(self, module: nn.Module, given: Sequence[torch.Tensor]) -> _Begun:
        has = *given, *module.parameters(), *module.buffers()
        devices = {x.device.type for x in has} - {"meta"}
        refusal = self._refusal(module)
        if next(reversed(module._forward_pre_hooks.values())) is not self.pre_hook:
            refusal = refusal or "another forward pre-hook comes later, and may change its module"
        if are_captured(devices):
            refusal = refusal or "its module may draw random numbers, whose state can't be read"
        if refusal:
            return _Begun(refusal, None, (), (), None)
        reads: list[torch.Tensor] = []
        twin = _twin_of(module, reads)
        versions = [(x, x._version) for x in has if not x.is_inference()]
        return _Begun("", twin, reads, versions, RandomStates(devices))

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note how the output was made."""
        if is_in_backward():
            return
        begun = self._begun.pop() if self._begun else None
        is_one = isinstance(output, torch.Tensor)
        made = output if is_one or not isinstance(output, (tuple, list)) else output[0]
        if type(made) is not torch.Tensor or is_functorch_wrapped_tensor(made):
            return  # or it has raised
        manager = self._manager()
        if manager is None or (begun is None and not self._is_known):
            return
        if begun is None:
            reads: list[torch.Tensor] = []
            refusal = self._refusal(module)
            begun = _Begun(refusal, None if refusal else _twin_of(module, reads), reads, (), None)
        refusal, states = begun.refusal or self._hooked(module), begun.states
        if any(tensor._version != version for tensor, version in begun.versions):
            refusal = refusal or "its module changes its buffers, or in place what it is given"
        if states is not None and states.are_current():
            states = None
        add_recipe(
            manager,
            made,
            partial(_call_twin, begun.twin, type(module).forward, not is_one),
            args,
            kwargs,
            unit=self.unit,
            reads=begun.reads,
            random_states=states,
            keeps_grad=not self._is_known,
            refusal=refusal,
        )

    def _hooked(self, module: nn.Module) -> str:
        """Return why an output may not be what the forward has returned, or nothing."""
        if next(iter(module._forward_hooks.values())) is not self.hook:
            return "another forward hook comes first, and may have replaced it"
        return "a global forward hook may have replaced it" if any(_GLOBAL_HOOKS) else ""

    def _refusal(self, module: nn.Module) -> str:
        """Return why a module's output can't be recomputed by its forward, or nothing."""
        if has_modes():
            return MODES
        is_own = type(module) is self._kind and self._kind.forward is self._forward
        if not is_own or "forward" in vars(module) or (self._is_known and _is_patched(self._kind)):
            return "its module's forward was replaced"
        if self._is_known:
            own = (x for x in vars(module).values() if isinstance(x, torch.Tensor))
            return _READS_MORE if any(x.requires_grad for x in own) else ""
        _, *parts = module.modules()
        return next(filter(None, (_hidden_state(module), *map(_hidden_part, parts))), "")


_READS_MORE = "its module reads a tensor that is an attribute of it"
_GLOBAL_HOOKS = _global_forward_hooks, _global_forward_pre_hooks
_INNER = set(vars(nn.Module()))
"""What each module has, besides what its class gives it."""


def _is_patched(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class of torch's is code of another file; others may be wrapped."""
    if not kind.__module__.startswith("torch.nn."):
        return False
    code = getattr(kind.forward, "__code__", None)
    return getattr(code, "co_filename", "") != sys.modules[kind.__module__].__file__


def _is_plain(argument: Any) -> bool:
    """Whether a call can change nothing of an argument but tensors, which count versions."""
    if type(argument) in (list, tuple):
        return all(map(_is_plain, argument))
    if type(argument) is dict:
        return all(map(_is_plain, argument.values()))
    kinds = torch.Tensor, bool, int, float, complex, str, torch.dtype, torch.device, torch.Size
    if isinstance(argument, nn.Module):
        return False
    return argument is None or isinstance(argument, kinds) or callable(argument)


def _hidden_part(module: nn.Module) -> str:
    """Return what of a part of a module can't run again, or nothing."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    if not all(isinstance(hook, ModuleHook) for hook in hooks):
        return "a part of its module has forward hooks"
    return _hidden_state(module)


def _hidden_state(module: nn.Module) -> str:
    """Return what of a module's attributes is no state that a twin of it has, or nothing."""
    if isinstance(module, torch.jit.ScriptModule):
        return "its module has a part in TorchScript"
    if hasattr(type(module), "__del__") or any(
        vars(k).get("__slots__") for k in type(module).__mro__
    ):
        return "its module has a finalizer or slots"
    own = vars(module)
    for name in own.keys() - _INNER:
        value = own[name]
        if isinstance(value, (bool, int, float, str)) or value is None:
            continue
        try:
            parts = pytree.tree_leaves(value)
        except RecursionError:
            return "its module has an attribute that holds itself"
        for part in parts:
            if isinstance(part, (dict, list)):
                return "its module has a container of another class as an attribute"
            if isinstance(part, (torch.Tensor, np.ndarray)):
                return _READS_MORE
            if isinstance(part, (nn.Module, torch.Generator)):
                return "its module has a module or a generator as a plain attribute"
            is_bound = isinstance(part, MethodType) and isinstance(part.__self__, nn.Module)
            if is_bound or isinstance(part, partial) or getattr(part, "__closure__", None):
                return "its module has a function as an attribute that may know it"
    return ""


def _twin_of(
    module: nn.Module, reads: list[torch.Tensor], twins: dict[int, nn.Module] | None = None
) -> nn.Module:
    """Return a module with the attributes that one has now and no hooks.

    Its tensors are added to ``reads``. ``twins`` are those of parts, by `id`: one may have several
    names.
    """
    twins = {} if twins is None else twins
    if id(module) in twins:
        return twins[id(module)]
    twin: nn.Module = object.__new__(type(module))
    twins[id(module)] = twin
    own = vars(twin)
    for name, value in vars(module).items():
        if name in _INNER:
            own[name] = OrderedDict() if name.endswith("_hooks") else value
        else:
            own[name] = pytree.tree_map(_copy_set, value)
    for name in ("_parameters", "_buffers"):
        own[name] = {key: None if t is None else lasting(t) for key, t in own[name].items()}
        reads += (tensor for tensor in own[name].values() if tensor is not None)
    own["_modules"] = {
        name: None if child is None else _twin_of(child, reads, twins)
        for name, child in module._modules.items()
    }
    return twin


def _copy_set(value: Any) -> Any:
    return set(value) if type(value) is set else value


def _call_twin(
    twin: nn.Module | None, forward: Call, picks_first: bool, /, *args: Any, **kwargs: Any
) -> Any:
    result = forward(twin, *args, **kwargs)
    return result[0] if picks_first else result

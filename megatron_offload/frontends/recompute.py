"""What backward makes again: modules by unit and name, functions of plain PyTorch, and by hand.

Each of them tells the manager from what and how it made its output; the rest is the engine's.
Modules are found by their names, and have hooks that leave copies of them alone.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from megatron_offload.config import recompute_patterns
from megatron_offload.core.profile import kind_of
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.exchanges import Call
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.hooks import owner_of_hooks
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.random_states import RandomStates, are_captured
from megatron_offload.engine.recipe import taken_apart

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish, nn.LeakyReLU)
"""Those whose backward saves their input; one that saves its output would need more, not less."""


def functions_of_torch(**names: str) -> dict[Call, str]:
    """Return torch's own functions and methods of the names of each unit, with that unit."""
    units = {name: unit for unit, its_names in names.items() for name in its_names.split()}
    homes = torch, nn.functional, torch._C._nn, *torch.Tensor.__mro__[:2]
    named = [(f, getattr(f, "__name__", "")) for home in homes for f in vars(home).values()]
    return {function: units[name] for function, name in named if name in units}


_FUNCTIONS = functions_of_torch(
    norm="layer_norm rms_norm group_norm",
    mlp_act="gelu silu mish softplus hardswish leaky_relu",
    pointwise="mul add sub __rsub__ div __rdiv__ neg pow square sin cos",
    cast="to float half bfloat16 double type type_as",
    layout="contiguous reshape flatten repeat cat stack",
)
"""None of them draws random numbers or communicates."""

_TRUSTED = ("torch.nn.", "megatron.core.", "transformer_engine.")
"""Where norms and activations come from that are known to do nothing but compute."""

_SHARED_ID = RemovableHandle(OrderedDict()).id
_MOST_COPIED_BYTES = 1 << 20

told_by_integrations: set[str] = set()
"""Units that a library's functions tell of as long as an integration is installed."""

FindManager = Callable[[], PipelineOffloadManager | None]


def unit_of(module: nn.Module) -> str | None:
    """Return the unit of a module by its class: ``norm``, ``mlp_act``, or None."""
    name = type(module).__name__
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or name.endswith(("LayerNorm", "RMSNorm")):
        return "norm"
    is_named = re.search("GELU|SiLU|Mish", name) and next(module.parameters(), None) is None
    return "mlp_act" if is_named or isinstance(module, _ACTIVATIONS) else None


_GLOBS = {".**": r"(?:\.[^.]+)*", "**.": r"(?:[^.]+\.)*", "**": ".*", "*": "[^.]*", "?": "[^.]"}
"""What stands for something else in a pattern over dotted names."""


class ModuleHook:
    """A forward hook of one module; its copies, and what is loaded from a file, do nothing."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[..., object]) -> None:
        self._hook = hook

    @graph_break
    def __call__(self, *args: Any) -> None:
        """Run the hook."""
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A call that takes anything, does nothing and returns None, and that every Python has.
        return getattr, (nullcontext(), "__exit__")


class EagerHook(ModuleHook):
    """A hook that does nothing inside a compiled graph, and doesn't end it."""

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        """Run the hook."""
        if not torch.compiler.is_compiling():
            self._hook(*args)


_owned: WeakKeyDictionary[nn.Module, dict[Hashable, list[RemovableHandle]]] = WeakKeyDictionary()


def hooks_of(owner: Hashable, module: nn.Module) -> list[RemovableHandle]:
    """Return the list for an owner's hooks on a module; those of an earlier call are taken off."""
    handles = _owned.setdefault(getattr(module, "_orig_mod", module), {}).setdefault(owner, [])
    while handles:
        handle = handles.pop()
        handle.remove()
        handle.id = -1  # whoever holds it too takes nothing off later that has its number
    return handles


def named_modules(chunk: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by their dotted names, to which ``torch.compile`` adds no part.

    Of a module that it has wrapped this is the wrapper: its hooks run outside the graph.
    """
    modules: dict[str, nn.Module] = {}
    for path, module in chunk.named_modules():
        modules.setdefault(".".join(p for p in path.split(".") if p != "_orig_mod"), module)
    return modules


def expression_of(pattern: str) -> re.Pattern[str]:
    """Return a pattern over dotted names as a regular expression."""
    regex = re.escape(pattern)
    for glob, meaning in _GLOBS.items():
        regex = regex.replace(re.escape(glob), meaning)
    return re.compile(regex)


def adopt_model(
    model: nn.Module, manager: PipelineOffloadManager, find_manager: FindManager | None = None
) -> list[RemovableHandle]:
    """Keep a model's parameters and buffers, and let what its modules make be made again."""
    for tensor in (*model.parameters(), *model.buffers()):
        manager.mark_not_offload(tensor)
    units = manager.config.recompute
    return recompute_modules(named_modules(model), units, find_manager or (lambda: manager))


def recompute_modules(
    modules: Mapping[str, nn.Module], units: Collection[str], find_manager: FindManager
) -> list[RemovableHandle]:
    """Let what these modules make be made again, where ``units`` name them or their kind.

    The hooks of an earlier call on the same modules go. What isn't known to do nothing but compute
    is watched when it runs for the first time, in training and in evaluation; where it can't be
    made again it is left as it is, and a warning says why. ``find_manager`` returns whose forward
    it is when one of them has run; None: nobody's.
    """
    patterns = {pattern: expression_of(pattern) for pattern in recompute_patterns(units)}
    for pattern, expression in patterns.items():
        if not any(expression.fullmatch(path) for path in modules):
            _logger.warning("recompute: no module here matches %r", pattern)
    handles = []
    for path, module in modules.items():
        own = hooks_of(_Source, module)
        unit = next((name for name, e in patterns.items() if e.fullmatch(path)), None)
        # Not one whose forward somebody has exchanged.
        is_known = type(module).__module__.startswith(_TRUSTED) and "forward" not in vars(module)
        is_known &= unit is None
        unit = unit or unit_of(module)
        if unit is None and _is_plain_fc1(path, module):
            unit, is_known = f"mlp_fc1:{path}", False
        if unit is None or kind_of(unit) not in units:
            continue
        source = _Source(path, unit, find_manager, is_known=is_known)
        if not is_known:
            own.append(module.register_forward_pre_hook(EagerHook(source.begin), with_kwargs=True))
            _share_id(own[0], last=True)
        own.append(module.register_forward_hook(source.hook, with_kwargs=True, always_call=True))
        _share_id(own[-1], last=False)
        handles += own
    return handles


def _is_plain_fc1(path: str, module: nn.Module) -> bool:
    """Whether this is the first matrix product of Megatron's dense MLP, and nothing besides.

    Not where its weight is sharded, and so may be away when its output is made again.
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


class _Source:
    """The hooks of one module that tell how its output was made."""

    def __init__(self, path: str, unit: str, find_manager: FindManager, *, is_known: bool) -> None:
        self.path = path
        self.unit = unit
        self.find_manager = find_manager
        self.hook = EagerHook(self.end)
        self._watch: _Watch | None = None
        self._refusals = {True: "", False: ""} if is_known else {}
        """By what `training` was, why it isn't made again, or nothing."""

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Watch what the module does, if nobody has yet."""
        is_watched = module.training in self._refusals or self._watch is not None
        if is_watched or not torch.is_grad_enabled():
            return
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in (*given, *module.parameters())}
        if not are_captured(devices):
            self._watch = _Watch(module, given, RandomStates(devices))
            self._watch.__enter__()

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Tell the manager how the output was made."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
            if output is None:  # it has raised
                return
            because = watch.because(output, (*args, *kwargs.values()))
            self._refusals[module.training] = because
            if because:
                text = "recompute: %r moves and isn't made again, since its forward %s"
                _logger.warning(text, self.path, because)
        manager = self.find_manager()
        if manager is None or not manager.records() or not manager.may_make_again(self.unit):
            return
        if self._refusals.get(module.training, "nobody has watched it"):
            return
        if next(iter(module._forward_hooks.values())) is not self.hook:
            return  # another that runs before this one may have replaced the output
        is_one = isinstance(output, torch.Tensor)
        made = output if is_one or not isinstance(output, (tuple, list)) else output[0]
        function, reads = _forward_of(module, picks_first=not is_one)
        tell(manager, made, function, args, kwargs, self.unit, reads)


def _forward_of(module: nn.Module, *, picks_first: bool) -> tuple[Call, list[torch.Tensor]]:
    """Return a module's forward with its parameters, buffers and flags of now, and the former."""
    forward = module.forward
    reads: list[torch.Tensor] = []
    state: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        state.append((vars(part), "training", part.training))
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    reads.append(_lasting(tensor))
                    state.append((tensors, name, reads[-1]))

    def run_again(*args: Any, **kwargs: Any) -> Any:
        before = [(owner, name, owner[name]) for owner, name, _ in state]
        try:
            for owner, name, value in state:
                owner[name] = value
            result = forward(*args, **kwargs)
        finally:
            for owner, name, value in before:
                owner[name] = value
        return result[0] if picks_first else result

    return run_again, reads


def _lasting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that holds a parameter's values until backward.

    Where there are several processes a library may take a parameter away after its own layer, and
    bring it back for that layer's backward: too late for what a later layer has saved.
    """
    is_alone = not (dist.is_available() and dist.is_initialized())
    if is_alone or tensor.nbytes > _MOST_COPIED_BYTES:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def tell(
    manager: PipelineOffloadManager,
    output: Any,
    function: Call,
    args: Any,
    kwargs: Any,
    unit: str,
    reads: Sequence[torch.Tensor] = (),
    *,
    holds_constants: bool = False,
) -> None:
    """Tell a manager how an output was made, if it is one plain tensor and grad is on.

    Arguments that hold tensors are taken apart. ``holds_constants`` keeps what needs no gradient
    until backward, as what is shared by layers; otherwise it is made use of where autograd saves
    it, like any other tensor.
    """
    if type(output) is not torch.Tensor or not torch.is_grad_enabled():
        return
    if kind_of(unit) not in manager.config.recompute:
        return
    function, args = taken_apart(function, args, kwargs)
    if holds_constants:
        function = partial(_fill_in, function, tuple(map(_constant, args)))
        args = [x for x in args if _constant(x) is None]
    manager.made_by(output, function, *map(_argument, args), unit=unit, reads=reads)


def _constant(argument: Any) -> Any:
    """Return an argument in a tuple where it is no activation with a gradient."""
    is_input = isinstance(argument, torch.Tensor) and argument.requires_grad
    return None if is_input and not is_parameter(argument) else (_argument(argument),)


def _fill_in(function: Call, constants: Sequence[Any], *inputs: Any) -> Any:
    rest = iter(inputs)
    return function(*(next(rest) if one is None else one[0] for one in constants))


def _argument(argument: Any) -> Any:
    return _lasting(argument) if is_parameter(argument) else argument


class _Watch(TorchDispatchMode):
    """Sees whether a module's forward does what can't be done again."""

    def __init__(
        self, module: nn.Module, given: Sequence[torch.Tensor], random_states: RandomStates
    ) -> None:
        super().__init__()
        self._buffers = _versions(module.buffers())
        self._others = _versions((*given, *module.parameters()))
        self._random_states = random_states
        self._found = ""
        self._known: dict[int, Any] = {}
        """What it is given, has, or has made, by its memory: alive, so that none gets another's."""
        self._know((given, *module.parameters(), *module.buffers()))

    def _know(self, tree: Any) -> None:
        self._known |= {memory: part for part, memory in _memory_in(tree)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled be compiled: else the compiler passes it by for good."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "c10d_functional", "_c10d_functional", "symm_mem"):
            self._found = f"communicates ({func})"
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self._found = f"draws random numbers ({func}); recomputable() restores their state"
        elif func is not torch.ops.aten.lift_fresh.default:  # of a constant that is new
            is_known = all(memory in self._known for _, memory in _memory_in((args, kwargs)))
            if not is_known and not _is_in_engine():
                self._found = f"reads a tensor that is no argument, parameter or buffer ({func})"
        output = func(*args, **(kwargs or {}))
        self._know(output)
        return output

    def because(self, output: Any, inputs: Sequence[Any]) -> str:
        """Return what the forward did that can't be done again; nothing where all is well."""
        if any(buffer._version != version for buffer, version in self._buffers):
            return "changes its buffers"
        if any(tensor._version != version for tensor, version in self._others):
            return "changes in place what it is given, or its parameters"
        if not self._found and not self._random_states.are_current():  # in a fused kernel
            return "draws random numbers; recomputable() restores their state"
        if not self._found and _is_compiled(output, inputs):
            return "is compiled, and without gradients would be compiled anew"
        return self._found


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _is_in_engine() -> bool:
    """Whether a call is the engine's, in a hook or a finalizer, and not that of a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        if frame.f_globals.get("__name__", "").startswith("megatron_offload.engine."):
            return True
        frame = frame.f_back
    return False


def _memory_in(tree: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Return the tensors in a tree, each with what tells whose memory it has."""
    for part in pytree.tree_leaves(tree):
        if type(part) in (torch.Tensor, nn.Parameter) and part.layout is torch.strided:
            yield part, part.untyped_storage()._cdata
        elif isinstance(part, torch.Tensor):
            yield part, id(part)


def _is_compiled(output: Any, inputs: Sequence[Any]) -> bool:
    """Whether a compiled graph lies between a module's inputs and its output."""
    done = {x.grad_fn for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)}
    waiting = [x.grad_fn for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in done:
            continue
        if node.name() == "CompiledFunctionBackward":
            return True
        done.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


class RecomputeFunctions(TorchFunctionMode):
    """While it is entered, torch's functions tell a manager how they made their outputs."""

    def __init__(self, manager: PipelineOffloadManager, units: Mapping[Call, str]) -> None:
        super().__init__()
        self._manager = manager
        self._units = units

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        unit = self._units.get(func)
        if unit is None or type(output) is not torch.Tensor or torch.compiler.is_compiling():
            return output
        is_new = output._base is None and not any(output is x for x in args)
        if is_new and output.requires_grad:
            tell(self._manager, output, func, args, kwargs, unit)
        return output


def recompute_functions(
    manager: PipelineOffloadManager, *, besides_modules: bool
) -> AbstractContextManager[Any]:
    """Return what lets functions be made again while it is entered, where any should be now.

    ``besides_modules`` says that `recompute_modules` serves the kinds of modules.
    """
    wanted = set(manager.config.recompute) - ({"norm", "mlp_act"} if besides_modules else set())
    units = {function: unit for function, unit in _FUNCTIONS.items() if unit in wanted}
    may = bool(units) and manager.notes_recipes
    return RecomputeFunctions(manager, units) if may else nullcontext()


@graph_break
def recomputable(function: Callable[..., T], *inputs: Any, preserve_rng_state: bool = True) -> T:
    """Call a cheap function, and let backward make its output again from its inputs.

    Elsewhere than in a group, `OffloadActivations` and the like it is just called. See
    `PipelineOffloadManager.recomputable`; ``last_step.refused_recipe_bytes`` says which outputs
    were kept or moved all the same, and why.

    Args:
        function: returns one tensor, and does nothing else.
        *inputs: its arguments; activations must be among them, not captured by the function.
        preserve_rng_state: whether it draws random numbers, which are drawn again as they were.

    Returns:
        What the function returns.
    """
    manager = manager_in_force() or PipelineOffloadManager.instance
    if manager is None:
        return function(*inputs)
    return manager.recomputable(function, *inputs, preserve_rng_state=preserve_rng_state)


def manager_in_force() -> PipelineOffloadManager | None:
    """Return the manager of the context that a forward without marks is in, if any."""
    owner = owner_of_hooks()
    return owner.manager if isinstance(owner, AutomaticGroups) else None

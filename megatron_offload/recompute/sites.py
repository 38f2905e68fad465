"""Layers, MLPs and attentions whose inside is dropped in forward and run again in backward.

The graph is the original one: what a site's call saves is replaced by numbers, and the first
that backward asks for runs the call again. A backward inside a backward, as other checkpoints have
it, would sum the gradients of a tensor that is read inside and outside in another order.

What the call is given is saved as the hooks around it save. It runs again under the same
`CallState`, with the random states and the plain attributes that it had. In the first step, and now
and then, checksums of what it returns show whether it computes the same bits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import eq, is_
from typing import Any

import torch
from torch import nn
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from megatron_offload.engine.checking import checksum
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.hooks import is_recording, put_on, take_off
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.modes import has_modes, is_traced
from megatron_offload.engine.module_hooks import EagerHook, ModuleHook, hooks_of
from megatron_offload.engine.saved_tensor import SavedTensor, changed_in_place
from megatron_offload.errors import CorruptionError, StateError
from megatron_offload.recompute.call_state import CallState
from megatron_offload.recompute.random_states import RandomStates, are_captured
from megatron_offload.recompute.transformer_engine import is_quantising

_logger = logging.getLogger(__name__)

_LAYERS = ("TransformerLayer", "GradientCheckpointingLayer")
"""Classes, by their own name or that of a base, whose owners let them be recomputed."""

_PARTS = {
    "mlp": ("mlp", "feed_forward", "ffn", "ff"),
    "attention": ("self_attention", "cross_attention", "self_attn", "attn", "attention"),
}
"""What libraries call the parts of a layer."""

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)

_PROVE_EVERY = 256
"""One step in so many is proven again."""


def find_sites(modules: Mapping[str, nn.Module], kinds: Iterable[str]) -> dict[str, str]:
    """Return the kind of each module that is a site of these kinds, by its dotted name.

    Layers are those of Megatron and Hugging Face, and the members of each list of modules that
    have one class and parts, except within another layer.
    """
    layers = {path for path, module in modules.items() if _is_layer(module)}
    for path, module in modules.items():
        members = [f"{path}.{name}".lstrip(".") for name, _ in module.named_children()]
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(members) < 2:
            continue
        alike = {type(child) for child in module.children()}
        if len(alike) == 1 and all(any(child.children()) for child in module.children()):
            layers.update(members)
    layers = {path for path in layers if not any(path.startswith(f"{one}.") for one in layers)}
    found: dict[str, str] = {}
    for kind in kinds:
        paths = layers
        if kind != "layer":
            paths = {f"{layer}.{name}" for layer in layers for name in _PARTS[kind]}
        found.update((path, kind) for path in modules if path in paths)
    return found


def _is_layer(module: nn.Module) -> bool:
    return any(base.__name__ in _LAYERS for base in type(module).__mro__)


def recompute_sites(
    modules: Mapping[str, nn.Module],
    kinds: Iterable[str],
    find_manager: Callable[[], PipelineOffloadManager | None],
) -> list[RemovableHandle]:
    """Hook the sites among these modules; the hooks of an earlier call on them go.

    ``find_manager`` returns whose forward it is; None where it is no manager's.
    """
    kinds, handles = list(kinds), []
    for module in modules.values() if kinds else ():
        hooks_of(Site, module)
    found, said = find_sites(modules, kinds), set[str]()
    for kind in kinds:
        if kind not in found.values():
            _logger.warning("recompute: no module here is a site of kind %r", kind)
    for path, kind in found.items():
        site, own = (
            Site(path, kind, modules[path], find_manager, said),
            hooks_of(Site, modules[path]),
        )
        own.append(site.module.register_forward_pre_hook(site.pre_hook, with_kwargs=True))
        own.append(site.module.register_forward_hook(site.hook, prepend=True, always_call=True))
        handles += own
    return handles


class Site:
    """One module whose calls are recomputed.

    Attributes:
        path: its dotted name.
        kind: ``layer``, ``mlp`` or ``attention``, under which its bytes are counted.
        proven_in: the step in which it was proven last, by the training flags of its modules.

    Args:
        said: why sites of this model were kept, as far as that was said.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        module: nn.Module,
        find_manager: Callable[[], PipelineOffloadManager | None],
        said: set[str],
    ) -> None:
        self.path, self.kind, self.module = path, kind, module
        self.parts = list(module.modules())
        self.proven_in: dict[tuple[bool, ...], int] = {}
        self.pre_hook, self.hook = EagerHook(self.begin), EagerHook(self.end)
        self._find_manager = find_manager
        self._forward = type(module).forward
        self._calls: list[SiteCall | None] = []
        self._said = said

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Replace by numbers what the call saves that begins now, where it can be run again."""
        call = None
        manager = self._find_manager()
        if manager is not None and manager.do_offload and is_recording() and not is_traced():
            leaves, spec = args, None
            if kwargs or any(isinstance(x, (tuple, list, dict)) for x in args):
                leaves, spec = pytree.tree_flatten((args, kwargs))
            refusal = self._refusal(module, leaves)
            if not refusal:
                call = SiteCall(self, manager, leaves, spec)
            elif refusal not in self._said:
                self._said.add(refusal)
                _logger.warning("recompute: %s, and maybe others, is kept: %s", self.path, refusal)
        self._calls.append(call)
        if call is not None:
            put_on(call.pack, call.unpack)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the call, which may have raised."""
        call = self._calls.pop() if self._calls else None
        if call is not None:
            take_off(partial(eq, call.pack))
            call.close(output)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the forward."""
        return self._forward(self.module, *args, **kwargs)

    def _refusal(self, module: nn.Module, leaves: Sequence[Any]) -> str:
        if has_modes():
            return "a mode of dispatch or of functions was entered"
        if is_quantising():
            return "its quantisers' scales change with every call"
        if module is not self.module or "forward" in vars(module):
            return "its forward was replaced"
        last = next(reversed(module._forward_pre_hooks.values()))
        first = next(iter(module._forward_hooks.values()))
        if last is not self.pre_hook or first is not self.hook:
            return "another hook of it comes in between"
        if _global_forward_hooks or _global_forward_pre_hooks:
            return "there are global hooks of forwards"
        for part in self.parts[1:]:
            hooks = *part._forward_pre_hooks.values(), *part._forward_hooks.values()
            if hooks and not all(isinstance(hook, ModuleHook) for hook in hooks):
                return "a part of it has hooks"
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if is_functorch_wrapped_tensor(leaf) or leaf.is_inference():
                    return "it is given a tensor of a transform, or of inference mode"
            elif not (leaf is None or isinstance(leaf, _CONSTANTS)):
                return f"it is given a {type(leaf).__name__}, which may change (use_cache=False?)"
        return ""


class _Enough(BaseException):
    """All that a call had saved was saved again."""


class SiteCall:
    """One call of a site: what it needs to run again, and what of that backward has not read yet.

    Raises:
        CorruptionError: where it is proven, the call has returned other bits than before.
        StateError: it has saved another number or kind of tensors.
        InPlaceModificationError: something that it takes was changed since.
    """

    def __init__(
        self, site: Site, manager: PipelineOffloadManager, leaves: Sequence[Any], spec: Any
    ) -> None:
        self.site, self._spec = site, spec
        tensors = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
        hooks = _top_saved_tensors_default_hooks(True)
        pack, self._unpack = hooks or (partial(SavedTensor, group_name=site.path), _unpack)
        self._inputs = {key: (pack(x), x.requires_grad) for key, x in tensors.items()}
        self._leaves = [id(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self._is_input = [isinstance(x, torch.Tensor) for x in leaves]
        self._attributes = _Attributes(site.parts)
        self._state = CallState(keeps_grad=True)
        devices = {x.device.type for x in tensors.values()} - {"meta"}
        self._random_states = None if are_captured(devices) else RandomStates(devices)
        key = self._attributes.training
        since = manager.step_number - site.proven_in.get(key, -_PROVE_EVERY)
        self._proves = since >= _PROVE_EVERY or manager.config.checking
        if self._proves:
            site.proven_in[key] = manager.step_number
        self._devices, self._sums = devices, list[torch.Tensor]()
        self._states_after: RandomStates | None = None
        self._num_saved = self._shapes = 0  # the second a hash of them all
        self._made: list[torch.Tensor | None] = []
        self._made_versions: list[int] = []
        self._constants: set[int] = set()
        self._stats = manager.transfers.stats
        self._num_bytes = 0

    def pack(self, tensor: torch.Tensor) -> int | SavedTensor:
        """Return a number in place of a saved tensor; the pack hook."""
        number = self._num_saved
        self._num_saved = number + 1
        self._shapes = hash((self._shapes, tensor.shape, tensor.dtype))
        if _shows_parameter(tensor):
            return SavedTensor(tensor, self.site.path)
        self._num_bytes += tensor.nbytes
        return number

    def unpack(self, packed: int | SavedTensor) -> torch.Tensor:
        """Return a saved tensor; the first of them runs the call again."""
        if isinstance(packed, SavedTensor):
            return packed.unpack()
        if not self._made or self._made[packed] is None:
            self._run_again()
        made, version = self._made[packed], self._made_versions[packed]
        assert made is not None
        if made._version != version:
            what = f"a tensor of shape {list(made.shape)} that {self.site.path} saves,"
            raise changed_in_place(what, made._version, version)
        if packed not in self._constants:
            self._made[packed] = None
        return made

    def close(self, output: Any) -> None:
        """Count what was dropped, and note what the call has made; it is over.

        Raises:
            StateError: it has changed a buffer, and would do so again.
        """
        if self._proves:
            if not self._attributes.are_unchanged():
                raise StateError(
                    f"{self.site.path} changes its parameters or buffers in its forward, and would "
                    f"do so again when it is recomputed; leave {self.site.kind!r} out of recompute"
                )
            self._sums = _sums_of(output)
            if self._random_states is not None:
                self._states_after = RandomStates(self._devices)
        self._stats.by_name[self.site.kind].recomputed_bytes += self._num_bytes

    @graph_break
    def _run_again(self) -> None:
        given = {
            key: self._unpack(packed).detach().requires_grad_(needs_grad)
            for key, (packed, needs_grad) in self._inputs.items()
        }
        pairs = zip(self._leaves, self._is_input, strict=True)
        args: Any = [given[leaf] if is_input else leaf for leaf, is_input in pairs]
        kwargs: dict[str, Any] = {}
        if self._spec is not None:
            args, kwargs = pytree.tree_unflatten(args, self._spec)
        made: list[torch.Tensor | None] = []
        versions: list[int] = []
        shapes = 0

        def keep(tensor: torch.Tensor) -> None:
            nonlocal shapes
            shapes = hash((shapes, tensor.shape, tensor.dtype))
            if tensor.is_leaf and not tensor.requires_grad:
                # What autograd could take as a gradient of its own, if nothing else had it.
                self._constants.add(len(made))
            made.append(None if _shows_parameter(tensor) else tensor.detach())
            versions.append(tensor._version)
            if len(made) == self._num_saved and not self._proves:
                raise _Enough

        def run() -> bool:
            _push_saved_tensors_default_hooks(keep, _unread)
            try:
                output = self.site.run(args, kwargs)
                after = self._states_after
                is_same = after is None or after.are_current()
            except _Enough:
                return True
            finally:
                _pop_saved_tensors_default_hooks()
            return is_same and all(map(torch.equal, _sums_of(output), self._sums))

        states = self._random_states
        with self._attributes.in_force(self.site.path):
            with contextlib.nullcontext() if states is None else states.in_force():
                is_same = self._state.run(run)
        if (len(made), shapes) != (self._num_saved, self._shapes):
            raise StateError(
                f"{self.site.path} saved other tensors when it was recomputed: its forward must do "
                f"the same each time; leave {self.site.kind!r} out of recompute"
            )
        if self._proves and not is_same:
            raise CorruptionError(
                f"{self.site.path} was recomputed with other bits than its forward had, and "
                "gradients would be wrong: it reads what has changed since, or draws random "
                f"numbers of Python or numpy; leave {self.site.kind!r} out of recompute"
            )
        self._proves = False
        self._made, self._made_versions = made, versions


class _Attributes:
    """The attributes, parameters and buffers of modules as they are when this is made."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, table.copy())
            for own in map(vars, parts)
            for table in (own, own["_parameters"], own["_buffers"])
        ]
        self.training = tuple(part.training for part in parts)
        tables = (then for n, (_, then) in enumerate(self._tables) if n % 3)
        self._tensors = [x for then in tables for x in then.values() if x is not None]
        self._versions = [x._version for x in self._tensors]

    def are_unchanged(self) -> bool:
        """Whether the parameters and buffers are as they were."""
        return [x._version for x in self._tensors] == self._versions

    @contextmanager
    def in_force(self, path: str) -> Iterator[None]:
        """Give the modules what they had; behind it all is as it was before.

        Raises:
            InPlaceModificationError: a parameter or a buffer was changed in place since.
        """
        if not self.are_unchanged():
            raise changed_in_place(f"a parameter or buffer of {path}", 1, 0)
        undo = []
        try:
            for table, then in self._tables:
                is_same = table.keys() == then.keys()
                if not (is_same and all(map(is_, table.values(), then.values()))):
                    undo.append((table, table.copy()))
                    _fill(table, then)
            yield
        finally:
            for table, values in undo:
                _fill(table, values)


def _fill(table: dict[str, Any], values: Mapping[str, Any]) -> None:
    table.clear()
    table.update(values)


def _shows_parameter(tensor: torch.Tensor) -> bool:
    base = tensor._base
    return is_parameter(tensor) or (base is not None and is_parameter(base))


def _sums_of(output: Any) -> list[torch.Tensor]:
    """Return checksums of the tensors in what a call has returned, each on its device."""
    sums = []
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            sums.append(checksum(flat.view(torch.uint8)))
    return sums


def _unpack(packed: SavedTensor) -> torch.Tensor:
    return packed.unpack()


def _unread(packed: None) -> torch.Tensor:
    raise StateError("nothing reads the graph of a recomputation")

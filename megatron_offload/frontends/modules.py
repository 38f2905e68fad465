"""Layer groups for any ``nn.Module``, chosen by name, with no change to model code.

A *span* between two modules reaches functions that are no modules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.config import EXTRA_MODULES, MEGATRON_MODULES
from megatron_offload.core.policy_config import SolvedConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.frontends.around import leave_search, refuse_unserved
from megatron_offload.model_map.module_hooks import (
    ModuleHook,
    expression_of,
    hook_calls,
    hooks_of,
    named_modules,
)
from megatron_offload.model_map.offload_site import OffloadSite, inputs, outputs
from megatron_offload.model_map.structure import has_forward
from megatron_offload.recompute.patches import PatchStack

_logger = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """What a name stands for: modules, or in each of them what runs between two of its children."""

    patterns: tuple[str, ...]
    between: tuple[str, str] | None = None


_NAMED = {
    "mlp_fc1": _Kind(("**.mlp.linear_fc1",)),
    "mlp_act": _Kind(("**.mlp",), between=("linear_fc1", "linear_fc2")),
    "mlp_fc2": _Kind(("**.mlp.linear_fc2",)),
    "expert_fc2": _Kind(("**.experts.linear_fc2", "**.local_experts.*.linear_fc2")),
    "shared_experts": _Kind(("**.shared_experts",)),
    "router": _Kind(("**.mlp.router",)),
    "layer": _Kind(("**.layers.*",)),
}


class ModuleOffload(PatchStack):
    """The hooks that `offload_modules` has set; `remove`, or its end as a context, undoes that."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        super().__init__()
        self.manager = manager
        self.groups: dict[str, list[str]] = {}
        """For each requested name, the modules that it marks."""

    remove = PatchStack.undo

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.manager,)  # of a copied model, whose hooks do nothing

    def mark(
        self, chunks: Iterable[nn.Module], names: str | Iterable[str], *, is_part: bool = False
    ) -> None:
        """Make groups of modules, as `offload_modules` does; with an error nothing is marked.

        ``is_part``: what matches no module may be in another part, so that this only warns.
        """
        modules = [named_modules(chunk, all_names=True) for chunk in chunks]
        wanted = dict.fromkeys([names] if isinstance(names, str) else map(str, names or ()))
        kinds = {name: kind for name in wanted if (kind := _kind_of(name, modules, is_part))}
        # Spans last: their ends lie inside the boundaries of the modules beside them.
        for name, kind in sorted(kinds.items(), key=lambda item: item[1].between is not None):
            self.groups[name] = [
                path for found in modules for path in _mark(self, found, name, kind)
            ]


def offload_modules(
    model: nn.Module | Sequence[nn.Module],
    names: str | Iterable[str],
    *,
    manager: PipelineOffloadManager | None = None,
) -> ModuleOffload:
    """Make groups of the chosen modules of a model, or of all chunks of a pipeline rank.

    Every forward of a chunk is one microbatch. Run each training step inside
    `PipelineOffloadManager.step`, or call `PipelineOffloadManager.reset` after it. A module that an
    earlier call has marked under the same name is marked by this call instead.

    Args:
        model: the model, or the rank's virtual pipeline stages in order. Wrappers that hold it as
            ``module`` (data parallelism, mixed precision) are looked through.
        names: one or more of: names of `megatron_offload.config.EXTRA_MODULES`; names of the
            model's own children; patterns over dotted module names, where ``*`` stands for anything
            within one part and ``**`` for any number of parts.
        manager: by default the process's. Its pipeline rank is what
            `PipelineOffloadManager.pipeline_rank` returns.

    Raises:
        ConfigError: a name that only Megatron's call sites serve, or that matches no module with a
            forward, or no name at all.
    """
    given: Sequence[Any] = [model] if isinstance(model, nn.Module) else model or [None]
    chunks = [_unwrap(m) for m in given]
    manager = getattr(manager, "engine", manager) or PipelineOffloadManager.get_instance()
    refuse_unserved("offload_modules", manager.config)
    result = ModuleOffload(manager)
    result.mark(chunks, names)
    if not (result.groups or manager.config.rows is not None):
        raise ConfigError("offload_modules() was given no names, so nothing would be offloaded")
    try:
        for stage, chunk in enumerate(chunks):
            own = getattr(chunk, "vp_stage", None)
            begin = ModuleHook(partial(_begin, manager, stage if own is None else own))
            result.remove_later([chunk.register_forward_pre_hook(begin, prepend=True)])
            result.on_undo(adopt_model(chunk, manager))
        if isinstance(manager.config.policy, SolvedConfig):
            _measure(chunks, result)
    except BaseException:
        result.remove()
        raise
    return result


def _begin(manager: PipelineOffloadManager, stage: int, module: nn.Module, args: Any) -> None:
    manager.begin_chunk(vp_stage=stage)
    if isinstance(manager.tuner, RowSearch):
        manager.tuner.forward_begins(module)


def _measure(chunks: Sequence[nn.Module], result: ModuleOffload) -> None:
    """Offload what is marked only if that keeps what the policy promises."""
    manager = result.manager
    search = manager.tuner
    if type(search) is RowSearch:  # of an earlier call
        for chunk in chunks:
            if not search.is_of(chunk):
                search.add(chunk)
    else:
        search = manager.tuner = RowSearch(chunks, manager, lambda: None, has_layers=False)
        result.on_undo(leave_search, manager)
    result.remove_later(map(search.hook_end, chunks))


def _kind_of(name: str, modules: Sequence[Mapping[str, nn.Module]], is_part: bool) -> _Kind | None:
    """Return what a name stands for in these model chunks; a child's own name counts last."""
    own = _Kind((name,))
    for kind in (_NAMED.get(name, own), own):
        if any(_find(found, kind) for found in modules):
            return kind
    if any(name in found for found in modules):
        raise ConfigError(
            f"{name!r} holds modules and has no forward of its own; {name + '.*'!r} names each"
        )
    if is_part:
        _logger.warning("no module in this part of the model matches %r", name)
        return None
    if name in MEGATRON_MODULES:
        raise ConfigError(
            f"{name!r} is marked by megatron-core's own call sites: list it in "
            "TransformerConfig.offload_modules and call "
            "megatron_offload.integrations.megatron_core.install()"
        )
    known = {x for x in EXTRA_MODULES if any(_find(found, _NAMED[x]) for found in modules)}
    for path in (path for found in modules for path in _find(found, _Kind(("**",)))):
        parts = ("*" if "*" in name and part.isdigit() else part for part in path.split("."))
        known |= {path, ".".join(parts)}
    raise ConfigError(f"no module matches {name!r}{did_you_mean(name, known)}")


def _unwrap(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _find(modules: Mapping[str, nn.Module], kind: _Kind) -> list[str]:
    """Return the names of the modules that are groups, or that groups lie in."""
    expressions = [expression_of(pattern) for pattern in kind.patterns]
    return [
        path
        for path, module in modules.items()
        if path and any(expression.fullmatch(path) for expression in expressions)
        if kind.between or has_forward(module)
        if all(f"{path}.{end}" in modules for end in kind.between or ())
    ]


def _mark(
    result: ModuleOffload, modules: Mapping[str, nn.Module], name: str, kind: _Kind
) -> list[str]:
    found, manager = dict[nn.Module, str](), result.manager
    for path in _find(modules, kind):
        found.setdefault(modules[path], path)
    for module, path in found.items():
        handles = hooks_of(name, module)
        if kind.between is None:
            site = OffloadSite(name, lambda: manager)
            handles += hook_calls(module, site.begin, site.end, ends_graph=True)
        else:
            first, last = (modules[f"{path}.{end}"] for end in kind.between)
            site = OffloadSite(name, lambda: manager, takes=(outputs, inputs))
            begin, end, close = map(ModuleHook, (site.begin, site.end, site.close))
            handles.append(first.register_forward_hook(begin))
            handles.append(last.register_forward_pre_hook(end, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(close, always_call=True))
        result.remove_later(handles)
    return [*found.values()]

"""This implementation in the place of megatron-core's own, in all modules that refer to that.

That is in namespaces by identity, and in the class that layers hold.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

import megatron_offload.fine_grained_activation_offload as facade
from megatron_offload.config import (
    EXTRA_MODULES,
    LAYER_INPUT,
    MEGATRON_RECOMPUTE,
    OffloadConfig,
    module_patterns,
)
from megatron_offload.core.policy_config import MemoryTargetConfig
from megatron_offload.engine.group import SOURCES
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, IntegrationError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.frontends.around import leave_search
from megatron_offload.frontends.modules import ModuleOffload
from megatron_offload.integrations.megatron_recompute import PATCHES
from megatron_offload.integrations.megatron_rows import (
    NOTES,
    WITHOUT_WEIGHTS,
    copy_uncompiled,
    count_recomputed,
    mark_layers,
    refuse_rows,
    unmark_layers,
)
from megatron_offload.integrations.megatron_search import MegatronSearch
from megatron_offload.memory.host_pool import HostPool
from megatron_offload.memory.nested import tensors_in
from megatron_offload.recompute.patches import Call, PatchStack, around

_MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
_PREPARE = "preprocess_for_fine_grained_offloading"

MakeSearch = Callable[[PipelineOffloadManager], MegatronSearch]

_logger = logging.getLogger(__name__)

patches = PatchStack()
"""The patches of `install`, and of later hooks; `uninstall` undoes them."""

_marked: WeakKeyDictionary[nn.Module, tuple[HostPool, ModuleOffload]] = WeakKeyDictionary()
"""By model, the hooks on its modules, and what its manager had when they were set: another has been
configured anew."""

_notes_on_weights: WeakSet[nn.Module] = WeakSet()
"""Models whose linear layers note on their saved weights what overlapped reduction asks for."""


def install(config: OffloadConfig | None = None, tuner: MakeSearch | None = None) -> None:
    """Put this implementation in megatron-core's place, in this process; twice is once.

    Layers then record into `PipelineOffloadManager.get_instance`; ``config`` is for that one, which
    is not made before it is used if CUDA hasn't begun: only the job knows its device.
    ``TransformerConfig`` says which groups are marked, as ever; its ``offload_modules`` takes
    `EXTRA_MODULES` and patterns too. Where nothing says what is kept of them, the first steps find
    it (docs/rows.md), by what a ``tuner`` makes that may be given with a config.

    Raises:
        IntegrationError: megatron-core is absent, or older than 0.16.
    """
    if not patches:
        target = import_from_megatron(_MODULE)
        their_class = target.FineGrainedActivationOffloadingInterface
        pairs = [
            (value, getattr(facade, name))
            for name, value in vars(target).items()
            if hasattr(facade, name) and getattr(value, "__module__", "") == _MODULE
            if value is not their_class
        ]
        for place, call in (_PATCHES | PATCHES).items():
            owner_name, _, name = place.rpartition(".")
            try:
                owner = resolve_name(f"megatron.core.{owner_name}")
            except (ImportError, AttributeError):  # of this version, or of what it needs
                continue
            original = vars(owner).get(name)
            if original is not None and isinstance(owner, types.ModuleType):
                pairs.append((original, around(original, call)))
            elif original is not None:
                patches.wrap(owner, name, call)
        # The first to be noted is the last to be undone.
        patches.on_undo(partial(_put_back_copies, {id(o): t for t, o in pairs}))
        patch_everywhere(pairs)
        our_class = facade.FineGrainedActivationOffloadingInterface
        for name, member in vars(our_class).items():  # layers hold the class itself
            if isinstance(member, (staticmethod, types.FunctionType)):
                patches.replace(their_class, name, member)
        patches.on_undo(_marked.clear)
        patches.on_undo(_leave_search)
        patches.replace(PipelineOffloadManager, "usual_recompute", MEGATRON_RECOMPUTE)
        # The calls of megatron-core 0.16 don't say it.
        patches.replace(PipelineOffloadManager, "pipeline_rank", staticmethod(pipeline))
        patches.on_undo(partial(setattr, PipelineOffloadManager, "at_first_use", None))
    its = PipelineOffloadManager
    if config is not None or its.at_first_use is None:
        its.at_first_use = partial(_begin, config, tuner)
    if its.instance or torch.cuda.is_initialized() or not torch.cuda.is_available():
        manager = its.get_instance()
        if its.at_first_use is not None:  # it was made before
            its.at_first_use(manager)


def _begin(
    config: OffloadConfig | None, tuner: MakeSearch | None, manager: PipelineOffloadManager
) -> None:
    """Configure the process's manager, on the device that is current now."""
    PipelineOffloadManager.at_first_use = None
    if config is not None:
        manager.configure(config)
    if tuner is not None or manager.tuner is None:
        manager.tuner = (tuner or MegatronSearch)(manager)


def _leave_search() -> None:
    """Look at no more forwards, as Megatron has its own handler again."""
    manager = PipelineOffloadManager.instance
    if manager is not None and isinstance(manager.tuner, MegatronSearch):
        leave_search(manager)


def patch_everywhere(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Replace the first of each pair for the second, wherever a loaded module refers to it."""
    for module, name, ours in _found({id(original): ours for original, ours in pairs}):
        patches.replace(module, name, ours)


def _found(others: Mapping[int, Any]) -> Iterator[tuple[types.ModuleType, str, Any]]:
    """Yield where loaded modules refer to an object by whose `id` there is another, and that."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and module is not facade:
            for name, value in list(vars(module).items()):
                if id(value) in others:
                    yield module, name, others[id(value)]


uninstall = patches.undo
"""Puts megatron-core's own implementation back; without `install` it does nothing."""

is_installed = patches.__bool__
"""Whether `install` is in effect."""


def _put_back_copies(back: dict[int, Any]) -> None:
    """Put Megatron's own where ours was copied to since."""
    for module, name, original in _found(back):
        if f"{module.__name__}.".startswith("megatron."):
            setattr(module, name, original)


def _keeping_outputs(original: Call, self: Any, run_function: Call, *args: Any) -> Any:
    """Keep the outputs of a ``CheckpointWithoutOutput``, which Megatron empties in place."""
    outputs = original(self, run_function, *args)
    manager = PipelineOffloadManager.get_instance()
    for output in tensors_in(outputs):
        manager.mark_not_offload(output)
    return outputs


def _saving_arguments(original: Call, ctx: Any, run_function: Call, owner: Any, *args: Any) -> Any:
    """Let a ``CheckpointWithoutOutput`` save its arguments, not detached copies as up to 0.19.

    Autograd keeps such leaves, whatever the hooks of saved tensors do, so that nothing would be
    freed. What it computes on again it detaches itself.
    """

    def save(original: Call, *saved: Any) -> None:
        original(*(args if [*map(type, saved)] == [*map(type, args)] else saved))

    with PatchStack() as patched:
        patched.wrap(ctx, "save_for_backward", save)
        return original(ctx, run_function, owner, *args)


def _noting_inputs(original: Call, self: Any, *inputs: torch.Tensor | None) -> Any:
    """Note from what the inputs of a node of overlapped microbatches are detached.

    The node before keeps that for its backward, which doesn't read it.
    """

    def noting(run: Call, *detached: torch.Tensor | None) -> Any:
        for one, source in zip(detached, inputs, strict=True):
            _note_source(one, source)
        return run(*detached)

    with PatchStack() as patched:
        patched.wrap(self, "forward_func", noting)
        return original(self, *inputs)


def _noting_source(original: Call, self: Any, source: torch.Tensor) -> torch.Tensor:
    """Note from what a node detaches a tensor for a later one, likewise."""
    detached: torch.Tensor = original(self, source)
    _note_source(detached, source)
    return detached


def _note_source(detached: torch.Tensor | None, source: torch.Tensor | None) -> None:
    if detached is not None and source is not None:
        SOURCES[detached] = ref(source)


def _taking_our_names(original: Callable[[Any], None], self: Any) -> None:
    """Take names in ``offload_modules`` that Megatron doesn't know; once for each microbatch.

    The configuration keeps all names: Megatron's layers look for their own among them.
    """
    names = self.offload_modules
    if not self.fine_grained_activation_offloading or not names:
        return original(self)
    if isinstance(names, str):
        raise ConfigError(f"offload_modules is a list of names; write [{names!r}]")
    if "layer" in names and self.overlap_moe_expert_parallel_comm:
        raise ConfigError(
            "'layer' in offload_modules would offload nothing: overlap_moe_expert_parallel_comm "
            "calls the parts of layers; name those"
        )
    if LAYER_INPUT in names and self.recompute_granularity != "full":
        raise ConfigError(
            "'layer_input' in offload_modules is what full recompute keeps, and is not on: set "
            "recompute_granularity='full', or name groups such as 'core_attn'"
        )
    known = [name for name in names if not _is_ours(name) and name != LAYER_INPUT]
    self.offload_modules = known or ["core_attn"]  # it wants one
    try:
        return original(self)
    except AssertionError:
        module_patterns(known)  # says which of them are unknown
        raise
    finally:
        self.offload_modules = list(names)


_UNSAVED = (
    "%r is in offload_modules, and nothing in this part of the model is saved under that name (no "
    "such module, recomputed, or experts that aren't grouped)"
)


def _refusing_lost_marks(
    original: Call,
    self: Any,
    config: Any,
    ddp_config: Any,
    module: nn.Module,
    *args: Any,
    **kw: Any,
) -> None:
    """Refuse what no hook of saved tensors can keep: what is set on a saved parameter.

    Under any hook backward gets another object for it. Megatron's own linear layers say on their
    saved weight that they have summed its gradient, and its overlapped reduction asks for that.
    """
    marks_weights = config.gradient_accumulation_fusion and ddp_config.overlap_grad_reduce
    local = "megatron.core.tensor_parallel.layers"
    if marks_weights and any(type(part).__module__ == local for part in module.modules()):
        _notes_on_weights.update(part for part in module.modules() if hasattr(part, _PREPARE))
        names = sorted({*(config.offload_modules or ())} - WITHOUT_WEIGHTS)
        if config.fine_grained_activation_offloading and names:
            raise ConfigError(
                f"offload_modules {', '.join(names)} {NOTES}, take TransformerEngine's layers, or "
                f"name {', '.join(sorted(WITHOUT_WEIGHTS))}"
            )
    original(self, config, ddp_config, module, *args, **kw)


def _is_ours(name: str) -> bool:
    return name in EXTRA_MODULES or "." in name or "*" in name


def _marking(original: Callable[[Any], None], self: Any) -> None:
    """Before a model's forward, hook the modules that Megatron's own call sites don't mark."""
    manager = PipelineOffloadManager.get_instance()
    original(self)
    search = manager.tuner if isinstance(manager.tuner, MegatronSearch) else None
    known_for, _ = _marked.get(self, (None, None))
    if known_for is not manager.host_pool:
        config, names = self.config, self.config.offload_modules
        is_whole = (config.recompute_granularity, config.recompute_method) == ("full", "uniform")
        if is_whole and not _marked and {*names} != {LAYER_INPUT}:
            _logger.warning(
                "full recompute keeps nothing but the inputs of layers: of offload_modules %s "
                "only 'layer_input' offloads anything",
                ", ".join(names),
            )
        marked = ModuleOffload(manager)
        marked.mark([self], filter(_is_ours, names), is_part=True)
        patches.on_undo(marked.remove)
        model = ref(self)
        patches.on_undo(lambda: unmark_layers(model()))
        if manager.config.enabled:
            given = manager.config.rows or ()
            refuse_rows(given, self, notes=self in _notes_on_weights)
            if isinstance(manager.config.policy, MemoryTargetConfig):
                manager.config.policy.targets(pipeline("world_size"))  # as many as there are ranks
            _hook_rows(self, marked)
            if config.recompute_granularity != "full":  # see above
                named = names if manager.config.rows is None else ()
                marked_names = (x for x in named if not (_is_ours(x) or x == LAYER_INPUT))
                manager.learner.expect(marked_names, _UNSAVED)
            if search is not None and self not in _notes_on_weights:
                hook_all = partial(_hook_all_rows, ref(manager))
                marked.remove_later(search.join(self, config, hook_all))
        else:
            unmark_layers(self)
        _marked[self] = manager.host_pool, marked
    if search is not None:
        search.forward_begins(self)


def _by_schedule(original: Call, *args: Any, **kwargs: Any) -> Any:
    """Say that a backward is one of Megatron's schedules."""
    search = PipelineOffloadManager.get_instance().tuner
    if isinstance(search, MegatronSearch):
        search.is_scheduled = True
    return original(*args, **kwargs)


def _hook_rows(model: nn.Module, marked: ModuleOffload) -> None:
    """Hook what rows name in a model, or is recomputed, in place of an earlier call's hooks."""
    find_manager = PipelineOffloadManager.get_instance
    mark_layers(model, marked.manager.rows or ())
    marked.on_undo(adopt_model(model, marked.manager, find_manager, is_part=True))


def _hook_all_rows(manager: ref[PipelineOffloadManager]) -> None:
    for model, (_, marked) in list(_marked.items()):
        if marked.manager is manager():
            _hook_rows(model, marked)


_PATCHES: dict[str, Call] = {
    "distributed.distributed_data_parallel:DistributedDataParallel.__init__": _refusing_lost_marks,
    "pipeline_parallel.schedules.backward_step": _by_schedule,
    "pipeline_parallel.utils:ScheduleNode._forward": _noting_inputs,
    "models.common.utils:TransformerLayerNode.detach": _noting_source,
    "models.gpt.fine_grained_callables:TransformerLayerNode.detach": _noting_source,
    f"models.gpt.gpt_model:GPTModel.{_PREPARE}": _marking,
    f"models.hybrid.hybrid_model:HybridModel.{_PREPARE}": _marking,
    "tensor_parallel.random:CheckpointWithoutOutput.checkpoint": _keeping_outputs,
    "tensor_parallel.random:CheckpointWithoutOutput.discard_output_and_register_recompute": (
        count_recomputed
    ),
    "tensor_parallel.random:CheckpointWithoutOutputFunction.forward": _saving_arguments,
    "tensor_parallel.random._get_share_storage": copy_uncompiled,
    "transformer.transformer_config:TransformerConfig.__post_init__": _taking_our_names,
}
"""As `PATCHES`."""


def pipeline(what: str = "rank") -> int:
    """Return Megatron's pipeline ``rank`` or ``world_size``; 0 or 1 where a job has none."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return int(what != "rank")
    return int(getattr(parallel_state, f"get_pipeline_model_parallel_{what}")())


def import_from_megatron(name: str) -> types.ModuleType:
    """Import a module of megatron-core, which has to be there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise IntegrationError(
            f"megatron-core 0.16 or later is needed: {error}; run: pip install megatron-core"
        ) from error

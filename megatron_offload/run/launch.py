"""What a job over megatron-core gets before its own program runs: offload, and flags for it."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron_offload.config import LAYER_INPUT, OffloadConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, is_installed
from megatron_offload.integrations import megatron_core
from megatron_offload.integrations.megatron_search import MegatronSearch
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.observe.run_report import save_report
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.recompute.patches import Call, PatchStack, around
from megatron_offload.report.console import console
from megatron_offload.run.flags import add_flags, read_flags

_logger = logging.getLogger(__name__)

_MODULES = ("qkv_linear", "core_attn", "attn_proj")
_DENSE = ("mlp_fc1", "mlp_act", "mlp_fc2")
_MOE = ("expert_fc1", "moe_act")
"""What is marked where neither the job nor the configuration says that."""

_ENGINE, _VARIABLE = "transformer_engine", "NVTE_CPU_OFFLOAD_V1"


def install_by_flags(given: Mapping[str, Any], *setting: str) -> OffloadConfig:
    """Install with the configuration that parsed flags stand for, as of `read_flags`; return it."""
    config, folder = read_flags(given, *setting), given.get("offload_report")
    report = Path(folder) if folder else None
    if report and report.exists() and not report.is_dir():
        raise ConfigError(f"the report goes to a folder, and {report} is none; name another")
    if _captures_steps(given):
        config = config.model_copy(update={"whole_step_graph": True})
    megatron_core.install(config, partial(ReportedSearch, report=report))
    return config


def run_program(name: str, program: Callable[[], object]) -> None:
    """Run a job's program; where it ends and no forward came to offload, say so on one rank."""
    begun, its = set[PipelineOffloadManager](), PipelineOffloadManager
    its.at_chunk.append(begun.add)
    try:
        program()
    finally:
        its.at_chunk.remove(begun.add)
        is_over = isinstance(sys.exception(), SystemExit | None)
        is_on = its.instance is None or its.instance.config.enabled
        if is_over and is_on and not begun and os.environ.get("RANK", "0") == "0":
            why = f"{name} ran no forward of a Megatron model with fine_grained_activation_"
            why += "offloading; around that of any other model put 'with OffloadActivations():'"
            console(stderr=True).print(f"megatron-offload: nothing was offloaded: {why}")


def prepare(given: Mapping[str, Any]) -> None:
    """Install by parsed flags, and let Megatron's parser take them too; errors as `install`'s."""
    install_by_flags(given)
    try:
        original: Any = importlib.import_module("megatron.training.arguments")
    except ImportError:  # another trainer's job, whose flags are its own
        return

    def add_megatron_arguments(add: Call, parser: ArgumentParser) -> Any:
        parser = add(parser)
        for action in parser._actions:  # in 0.19 a bare % in one of them ends --help
            action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
        add_flags(parser.add_argument_group("activation offload (megatron-offload)"), given)
        return parser

    def validate_args(validate: Call, args: Any, *more: Any, **named: Any) -> Any:
        config = install_by_flags({**given, **vars(args)})
        if config.enabled:
            usual = _MODULES + (_MOE if getattr(args, "num_experts", None) else _DENSE)
            if getattr(args, "recompute_granularity", None) == "full":
                usual = LAYER_INPUT, *(usual if args.recompute_method == "block" else ())
            names = config.modules if "modules" in config.model_fields_set else usual
            args.offload_modules = list(args.offload_modules or names)
            args.fine_grained_activation_offloading = True
            if _captures_steps(vars(args)):
                if config.tuned_policy is not None:  # whose plan is found by then
                    args.cuda_graph_warmup_steps = max(args.cuda_graph_warmup_steps, 32)
                if getattr(args, "fine_grained_offloading_max_inflight_offloads", 0) is None:
                    # Megatron's only bound, which it asks for; this package has its own.
                    args.fine_grained_offloading_max_inflight_offloads = 1 << 30
        with PatchStack() as asked:
            if args.fine_grained_activation_offloading:
                # Megatron asks for TransformerEngine and a variable, which its handler needs.
                has_engine = args.transformer_impl == _ENGINE and is_installed(_ENGINE)
                asked.replace(args, "fine_grained_activation_offloading", has_engine)
                before = os.environ.get(_VARIABLE)
                asked.on_undo(lambda: before and os.environ.update({_VARIABLE: before}))
                asked.on_undo(lambda: os.environ.pop(_VARIABLE))
                os.environ[_VARIABLE] = "1"
            return validate(args, *more, **named)

    utils: Any = importlib.import_module("megatron.core.pipeline_parallel.utils")
    bind = getattr(utils, "set_ideal_affinity_for_current_gpu", None)
    calls: dict[Any, Any] = {original.add_megatron_arguments: add_megatron_arguments}
    calls[original.validate_args] = validate_args
    if bind is not None:
        calls[bind] = _going_on
    megatron_core.patch_everywhere((their, around(their, call)) for their, call in calls.items())


def _captures_steps(flags: Mapping[str, Any]) -> bool:
    """Whether Megatron's flags ask for graphs of whole steps, as any of its versions names them."""
    impl = flags.get("cuda_graph_impl") or "none"
    names = ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules")
    scopes = (getattr(one, "name", one) for name in names for one in flags.get(name) or ())
    return impl != "none" and "full_iteration" in (impl, *scopes)


def _going_on(bind: Callable[[], None]) -> None:
    """Let a job go on where a package is missing by which Megatron finds a GPU's processors."""
    try:
        bind()
    except (ImportError, RuntimeError) as error:
        _logger.warning("this process is bound to no processors near its GPU: %s", error)


class ReportedSearch(MegatronSearch):
    """Says once on the first rank what is on, and leaves a step of every rank in ``report``."""

    def __init__(self, manager: PipelineOffloadManager, report: Path | None = None) -> None:
        super().__init__(manager)
        self._report = report
        self._reporting: Generator[None, None, None] | None = None

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at the step that has ended, and prepare for the next."""
        super().__call__(manager)
        if self.is_converged and not manager.last_step.is_captured:
            self._reporting = self._reporting or self._reports(manager)
            next(self._reporting, None)

    def _reports(self, manager: PipelineOffloadManager) -> Generator[None, None, None]:
        rank, folder = rank_in(), self._report
        with nullcontext() if folder is None else trace_step(manager, rank) as trace:
            yield
            while not _is_over(manager):
                yield  # an evaluation
        stats, pinned = manager.last_step, manager.host_pool.stats.slab_bytes_total
        if folder is not None:
            save_report(manager, folder, trace)
        if rank == 0:
            sizes = {name: group.offloaded_bytes for name, group in stats.by_name.items()}
            moved = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size]
            does = f"offloads {', '.join(moved) or 'nothing'}"
            if moved or stats.recomputed_bytes:
                again = format_bytes(stats.recomputed_bytes)
                does += f", recomputes {again}, pins {format_bytes(pinned)} on the host"
            console().print(f"megatron-offload: a step of rank 0 {does}")


def _is_over(manager: PipelineOffloadManager) -> bool:
    """Whether a step of training has passed."""
    moves_nothing = manager.rows == () or (manager.do_offload and not manager.may_record)
    step = manager.last_step
    return bool(step.num_groups or step.recomputed_bytes or moves_nothing)

"""The training loop: megatron-core's schedule and optimizer, step after step.

Offloading is switched on for its model chunks, looked at, and planned by its own steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from pydantic import ByteSize

from megatron_offload.config import (
    MEGATRON_MODULES,
    RECOMPUTE_KINDS,
    OffloadConfig,
    module_patterns,
    recompute_patterns,
)
from megatron_offload.core.policy_config import SolvedConfig
from megatron_offload.core.row_config import MODEL
from megatron_offload.core.trace import write_traces
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.integrations import megatron_core
from megatron_offload.machine.job_ranks import gather, rank_in
from megatron_offload.model_map.module_hooks import expression_of, named_modules
from megatron_offload.observe.live_bytes import LiveActivationMeter
from megatron_offload.observe.run_report import LOG_NAME, counters_of, write_facts
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.observe.verdicts import say_last
from megatron_offload.report.console import console
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.data import digest, microbatches
from megatron_offload.train.model import build_chunks, build_optimizer, open_model_parallel
from megatron_offload.train.records import RankStep, StepRecord, summarize
from megatron_offload.train.run_folder import prepare_folder


def run_training(
    config: TrainConfig, device: torch.device, title: str, before: Sequence[StepRecord] | None
) -> list[StepRecord]:
    """Train as ``config`` says, and return what happened in each step on all ranks; collective.

    Every step is said, and whether it is that of a run ``before``; of a run that others will be
    compared with, where that is None, how many there are.
    """
    with open_model_parallel(config, device), open_offload(config) as manager:
        trainer = _Trainer(config, device, manager)
        out, folder = console(stderr=True, quiet=rank_in() != 0), config.run.output
        num_steps, records = config.run.steps, list[StepRecord]()
        if before is None:
            out.print(f"{title}: {num_steps} steps, to compare with")
        with contextlib.ExitStack() as stack:
            if rank_in() == 0:
                prepare_folder(config)
                log = stack.enter_context((folder / LOG_NAME).open("w", buffering=1))
            if manager and trainer.meter:
                stack.enter_context(manager.observed_by(trainer.meter))
            for step in range(1, num_steps + 1):
                records.append(record := trainer.train_step(step))
                if rank_in() == 0:
                    log.write(record.line())
                if before is not None:
                    plain = before[step - 1] if before else None
                    out.print(f"{title}: step {step}/{num_steps}  {_line(record, device, plain)}")
                was_searching = record.ranks[rank_in()].is_planned_by
                if manager and manager.tuner and was_searching and not manager.is_searching:
                    manager.tuner.save(folder)
            if rank_in() == 0:
                summary = summarize(records, config.traced_step)
                write_facts(folder, config, is_simulated=device.type != "cuda", **summary)
        if manager:
            say_last(manager, has_table=True)
    torch.cuda.empty_cache()  # nothing where CUDA was not used
    return records


def _line(record: StepRecord, device: torch.device, plain: StepRecord | None) -> str:
    """Return what is said of a step; of its time only on a device that is not simulated."""
    line = f"loss {record.loss:.6f}  grad norm {record.grad_norm:.4f}"
    if device.type == "cuda":
        tokens = record.tokens / max(record.step_time_s, 1e-9)
        line += f"  {1e3 * record.step_time_s:.0f} ms  {tokens:,.0f} tokens/s"
    if plain:
        pairs = ((record.loss, plain.loss), (record.grad_norm, plain.grad_norm))
        is_same = all(repr(a) == repr(b) for a, b in pairs)  # which has every bit
        different = f"DIFFERENT: without, loss {plain.loss!r}"
        line += f"  {'the same bits as without' if is_same else different}"
    return line


class _Trainer:
    """One rank's model and optimizer, what watches them, and how a step is taken."""

    def __init__(
        self, config: TrainConfig, device: torch.device, manager: PipelineOffloadManager | None
    ) -> None:
        self._config, self._device, self._manager = config, device, manager
        self._synchronize = torch.get_device_module(device).synchronize
        self._chunks = build_chunks(config, device)
        # Of a run without offload too: a comparison is refused before it has trained.
        names = {name for chunk in self._chunks for name in named_modules(chunk.module)}
        check_patterns(config.offload, set().union(*gather(names)))
        self._optimizer = build_optimizer(config, self._chunks)
        live = config.run.measure_live_bytes
        self.meter = LiveActivationMeter(self._parameters()) if live else None

    def train_step(self, step: int) -> StepRecord:
        """Take a step; return what happened on all ranks."""
        config, manager, meter = self._config, self._manager, self.meter
        rank, on_gpu, is_last = rank_in(), self._device.type == "cuda", step == config.run.steps
        is_planning = manager is not None and manager.is_searching
        self._synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        if meter is not None:
            meter.reset_peak()
        start = time.perf_counter()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        trace = None
        with contextlib.ExitStack() as looking:
            if manager and step == config.traced_step:
                trace = looking.enter_context(trace_step(manager, rank))
            if meter is not None:
                looking.enter_context(meter)
            loss = self._pass_over_microbatches(step)
        self._synchronize()
        step_time_s = time.perf_counter() - start
        gradients = digest(p.main_grad for p in self._parameters()) if is_last else None
        start = time.perf_counter()
        _, grad_norm, _ = self._optimizer.step()
        self._synchronize()
        # Without the time of the digest in between.
        step_time_s += time.perf_counter() - start
        mine = RankStep(
            rank=rank,
            pp_rank=rank,
            loss=loss,
            grad_norm=float(grad_norm),
            step_time_s=step_time_s,
            peak_live_activation_bytes=None if meter is None else meter.peak_bytes,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device) if on_gpu else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device) if on_gpu else None,
            gradients=gradients,
            parameters=digest(self._parameters()) if is_last else None,
            is_planned_by=is_planning,
            **(counters_of(manager) if manager else {}),
        )
        ranks = gather(mine)
        if trace is not None:  # only now: rank 0 has cleared the folder for sure
            write_traces(config.run.output / f"trace_{rank}.json", [trace])
        sequences = config.data.microbatches * config.data.micro_batch_size
        return StepRecord.merge(step, sequences * config.model.sequence_length, ranks)

    def _pass_over_microbatches(self, step: int) -> float | None:
        """Run megatron-core's schedule; return the mean loss on the last stage, else None."""
        data, virtual = self._config.data, self._config.parallel.virtual
        iterators = [microbatches(self._config, step, self._device) for _ in range(virtual)]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if virtual > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=data.microbatches,
            seq_length=self._config.model.sequence_length,
            micro_batch_size=data.micro_batch_size,
            forward_only=False,
        )
        found = [entry["loss"] for entry in losses]
        return float(torch.stack(found).mean()) if found else None

    def _parameters(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.parameters()


def check_patterns(offload: OffloadConfig, names: Collection[str]) -> None:
    """Refuse patterns, and sites of rows, that match no module of any rank."""
    within = {name.split(".", 3)[-1] for name in names if name.startswith("decoder.layers.")}
    within |= {*MEGATRON_MODULES, *RECOMPUTE_KINDS, MODEL}
    for key, patterns, known in (
        ("modules", module_patterns(offload.modules), names),
        ("recompute", recompute_patterns(offload.recompute), names),
        ("rows", [row.site for row in offload.rows or ()], within),
    ):
        for pattern in patterns:
            if not any(map(expression_of(pattern).fullmatch, known)):
                raise ConfigError(
                    f"offload.{key}: no module of any rank matches "
                    f"{pattern!r}{did_you_mean(pattern, known)}"
                )


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """Run one microbatch through one chunk; the form that megatron-core's schedules ask for."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides its copy in place

    return output, mean_loss


@contextlib.contextmanager
def open_offload(config: TrainConfig) -> Iterator[PipelineOffloadManager | None]:
    """Offload models that are built inside as ``config`` says; yields the manager, if it is on.

    Where a timeline will be taken, or a policy plans by time, a simulated device lets
    compute take the time that it really does.
    """
    offload, run = config.offload, config.run
    if not offload.enabled:
        yield None
        return
    manager = PipelineOffloadManager.get_instance()
    # Megatron's call sites bring a limit in elements of their own, against which only values that a
    # user has set count.
    changes: dict[str, Any] = {"min_tensor_bytes": ByteSize(offload.smallest_tensor()[0])}
    if run.trace_step or isinstance(offload.policy, SolvedConfig):
        changes["simulated"] = offload.simulated.model_copy(update={"host_time": True})
    manager.configure(offload.model_copy(update=changes))
    megatron_core.install()
    try:
        yield manager
    finally:
        manager.abort()
        megatron_core.uninstall()

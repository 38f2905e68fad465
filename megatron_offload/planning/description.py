"""A training job as a YAML file, and its step from that alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megatron_offload.config import apply_overrides, config_folder, load_yaml
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, validate
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import Job, RankSettings, StageWork
from megatron_offload.planning.model import ModelDescription
from megatron_offload.planning.model_cost import LayerCosts
from megatron_offload.planning.parameters import replicas_us, static_bytes, weights_of
from megatron_offload.planning.schedule import steady_schedule
from megatron_offload.planning.simulate import simulate

_H200S = Machine()
_WORKSPACE_BYTES = 32 * 2**20
"""Of cuBLAS on a Hopper, where PyTorch has one in each thread that multiplies, forward's and
backward's, and TransformerEngine one besides, with experts one for each of four streams."""


def job_from_model(model: ModelDescription, machine: Machine = _H200S) -> Job:
    """Return the step of a model, from its description alone."""
    name = model.schedule or ("interleaved" if model.virtual_stages > 1 else "1f1b")
    sizes = model.pipeline_parallel, model.num_microbatches, model.virtual_stages
    schedule = steady_schedule(name, *sizes, model.microbatch_group_size_per_vp_stage)
    costs = LayerCosts(model, machine)
    hidden_bytes = costs.hidden_bytes
    stages = []
    for stage, num_layers in enumerate(model.layers_of_stages):
        groups = [group for index in model.layers_of(stage) for group in costs.layer(index)]
        if stage == 0:
            groups = [costs.embedding(), *groups]
        elif groups and groups[0].is_marked and groups[0].num_bytes >= hidden_bytes:
            # The schedule holds the input of a stage until backward.
            first, held = groups[0], groups[0].kept_bytes + hidden_bytes
            groups[0] = replace(first, num_bytes=first.num_bytes - hidden_bytes, kept_bytes=held)
        if stage == schedule.num_stages - 1:
            groups += [*costs.loss(), *costs.further_tokens()]
        # An input and a gradient may arrive while a pass of another microbatch runs.
        buffer_bytes = 2 * hidden_bytes if schedule.num_stages > 1 else 0
        num_launches = num_layers * model.num_launches / 2
        host_us = 2 * num_launches * model.host_us_per_launch, model.host_us_per_group
        stages.append(StageWork(tuple(groups), hidden_bytes, buffer_bytes, num_launches, *host_us))
    ranks = range(schedule.num_ranks)
    workspaces = _WORKSPACE_BYTES * (2 + (0 if model.eager_kernels else 5 if model.experts else 1))
    return Job(
        schedule=schedule,
        stages=tuple(stages),
        static_bytes=tuple(static_bytes(model, rank) + workspaces for rank in ranks),
        unused_bytes=tuple(weights_of(model, rank).unused_bytes for rank in ranks),
        expandable_segments=model.expandable_segments,
        machine=machine,
        replicas_us=tuple(replicas_us(model, machine, rank, stages) for rank in ranks),
        gpus_per_rank=model.tensor_parallel * model.context_parallel * model.data_parallel,
    )


def fit(model: ModelDescription, step_us: float, machine: Machine = _H200S) -> ModelDescription:
    """Return the model whose step without offload takes this time, `ConfigError` if none does.

    Where the host decides the step, it is the host that is quicker or slower, else the products.
    """

    def at(scale: float, *, is_host: bool) -> tuple[ModelDescription, float]:
        keys = ("host_us_per_launch", "host_us_per_group") if is_host else ()
        found = {key: getattr(model, key) * scale for key in keys}
        found = found or {"achieved_share": model.achieved_share / scale}
        changed = model.model_copy(update=found)
        return changed, simulate(job_from_model(changed, machine)).step_us

    is_host = at(1.01, is_host=True)[1] > 1.005 * at(1.0, is_host=True)[1]
    least = 0.0 if is_host else model.achieved_share
    # The time is all but linear in the scale, so a secant on that is there at once.
    before, before_us, scale = 0.0, 0.0, 1.0
    for _ in range(20):
        if scale < least:
            break
        fitted, got_us = at(scale, is_host=is_host)
        if abs(got_us / step_us - 1) < 1e-6:
            return fitted
        if got_us == before_us:  # the other alone decides
            break
        step = (step_us - got_us) * (scale - before) / (got_us - before_us)
        before, before_us, scale = scale, got_us, scale + step
    raise ConfigError(f"no achieved_share up to 1 makes a step of {step_us:g} us of this model")


class MeasuredStep(StrictModel):
    """A step measured on the same kind of GPU, of the job as its file has it or of another one."""

    step_ms: float = Field(gt=0, le=1e9)
    """Of the slowest rank, without offload."""
    model: dict[str, Any] = Field(default={})
    """What was other there than in the section ``model``, such as ``hidden`` and ``ffn``."""


class JobDescription(StrictModel):
    """A model and what stands around it: machine and budgets."""

    machine: Machine = Machine()
    offload: RankSettings = RankSettings()
    model: ModelDescription
    measured: MeasuredStep | None = None
    """Fits ``achieved_share``, or the host's times where it decides; they count only without it."""

    @model_validator(mode="before")
    @classmethod
    def _with_gpu(cls, data: Any) -> Any:
        """Add what ``machine.gpu`` implies; what the description says itself wins."""
        machine = data.get("machine") if isinstance(data, Mapping) else None
        name = machine.get("gpu") if isinstance(machine, Mapping) else None
        if machine is None or name is None:
            return data
        sheets = load_yaml(config_folder("machines") / "gpus.yaml")
        known = sheets["gpus"]
        if not isinstance(name, str) or name not in known:
            names = ", ".join(known)
            raise ConfigError(f"machine.gpu: no GPU {name!r} is known; there are {names}")
        gpu, model = known[name], data.get("model")
        found = {**data, "machine": sheets["links"][gpu["link"]] | gpu["machine"] | machine}
        return found | ({"model": gpu["model"] | model} if isinstance(model, dict) else {})

    def job(self) -> Job:
        """Return the step that it describes; `ConfigError` where no schedule has these sizes."""
        num_gpus, gpus_per_node = self.model.tensor_parallel, self.machine.gpus_per_node
        if num_gpus > gpus_per_node:
            raise ConfigError(
                f"model.tensor_parallel {num_gpus} doesn't fit into a node of "
                f"machine.gpus_per_node {gpus_per_node}"
            )
        return job_from_model(self.model, self.machine)


def load_description(
    path: str | Path,
    overrides: Sequence[str] = (),
    typed: Mapping[str, str] | None = None,
    data: dict[str, Any] | None = None,
) -> JobDescription:
    """Read a job; `ConfigError` says all that is wrong, one line each.

    ``overrides`` are ``section.key=value`` pairs, ``typed`` as of `validate`, ``data`` what counts
    in place of a file. A measured step is one of the job as the file has it.
    """
    data = load_yaml(path) if data is None else data
    asked = validate(JobDescription, apply_overrides(data, overrides), str(path), typed)
    if (measured := asked.measured) is None:
        return asked
    as_measured = data | {"model": data.get("model", {}) | measured.model, "measured": None}
    before = validate(JobDescription, as_measured, f"{path}, as it was measured")
    fitted = fit(before.model, measured.step_ms * 1e3, before.machine)
    found = {k: value for k, value in fitted if value != getattr(before.model, k)}
    model = asked.model.model_copy(update=found)
    return asked.model_copy(update={"model": model, "measured": None})

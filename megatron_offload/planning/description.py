"""A training job as a YAML file, and its step from that alone: bytes, FLOP and microseconds.

The formulas, with their sources, stand in docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from megatron_offload.config import apply_overrides, load_yaml
from megatron_offload.core.machine import Machine
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.strict_model import (
    Bytes,
    NamesField,
    StrictModel,
    default,
    validate,
)
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork, UnitWork
from megatron_offload.planning.schedule import make_schedule

LAYER_GROUPS = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
    *("mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"),
)
"""The groups of a layer, in its order."""

_MADE_FROM = {"qkv_linear": "attn_norm", "mlp_fc1": "mlp_norm", "mlp_fc2": "mlp_act"}
"""Where a group's unit is made from what another holds, and not from what it holds itself."""

_MOST = 10**9
_MOST_LAYERS = 10**5
"""Larger sizes are a slip of the pen."""

_GRADIENT_BUFFERS = 2
"""An input and a gradient that arrive while a pass of another microbatch runs."""


class ModelDescription(StrictModel):
    """A dense GPT, how it is cut over GPUs, and how fast one GPU is."""

    layers: int = Field(ge=1, le=_MOST_LAYERS)
    hidden: int = Field(ge=1, le=_MOST)
    ffn: int = Field(ge=1, le=_MOST)
    """Width of the MLP."""
    heads: int = Field(ge=1, le=_MOST)
    kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values; None for as many as of queries."""
    vocabulary: int = Field(ge=1, le=_MOST)
    gated_mlp: bool = False
    """Whether the MLP's first layer is twice as wide, as with SwiGLU."""

    sequence: int = Field(ge=1, le=_MOST)
    microbatch: int = Field(default=1, ge=1, le=_MOST)
    """Sequences."""
    num_microbatches: int = Field(ge=1, le=_MOST)

    pipeline_parallel: int = Field(default=1, ge=1, le=_MOST)
    virtual_stages: int = Field(default=1, ge=1, le=_MOST)
    """Of each pipeline rank."""
    microbatch_group_size_per_vp_stage: int | None = Field(default=None, ge=1)
    """Of the schedule ``interleaved``, as Megatron's option of this name; None: as many
    microbatches as there are pipeline ranks."""
    tensor_parallel: int = Field(default=1, ge=1, le=_MOST)
    """GPUs of one node that share every layer, with sequence parallelism."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = None
    """None: ``interleaved`` with several virtual stages, else ``1f1b``."""
    account_for_embedding_in_pipeline_split: bool = False
    """Whether the embedding takes the place of a layer, as by Megatron's option of this name."""
    account_for_loss_in_pipeline_split: bool = False
    """Likewise the head and the loss."""

    value_bytes: int = Field(default=2, ge=1)
    """Of an activation or a weight; 2 in bf16."""
    static_bytes_per_parameter: float = Field(default=4.0, ge=0)
    """Weight, gradient and this GPU's share of the optimizer's state."""
    fused_norm: bool = True
    """Whether norms are part of the linear layer behind them, as TransformerEngine's, and so no
    groups of their own."""
    fused_gradients: bool = False
    """Whether gradients of weights are added where they lie (``gradient_accumulation_fusion``),
    with no temporary of their own."""

    modules: tuple[str, ...] = LAYER_GROUPS
    """Groups that the engine sees; see `LAYER_GROUPS`."""
    min_tensor_bytes: Bytes = ByteSize(1024 * 1024)
    """Smaller tensors stay."""

    peak_tflops: float = Field(gt=0)
    """Of a GPU, dense."""
    achieved_share: float = Field(gt=0, le=1)
    """The part of it that matrix products get."""
    memory_gbps: float = Field(gt=0)
    """Bandwidth of the device's own memory."""
    launches_per_layer: float = Field(default=76.0, ge=0)
    """Kernels that a layer launches in a forward and a backward together. 76 are megatron-core's
    with TransformerEngine: 20 for the rotation of queries, 20 for that of keys where it isn't
    fused, and 36 others (11 forward, 25 backward)."""

    @field_validator("modules")
    @classmethod
    def _known_modules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in LAYER_GROUPS:
                raise ConfigError(f"unknown group {name!r}{did_you_mean(name, LAYER_GROUPS)}")
        return names

    @model_validator(mode="after")
    def _divides(self) -> ModelDescription:
        divisors = (
            ("hidden", self.heads),
            ("heads", self.kv_heads or self.heads),
            ("heads", self.tensor_parallel),
            ("ffn", self.tensor_parallel),
        )
        for what, number in divisors:
            if getattr(self, what) % number:
                raise ValueError(f"{what} {getattr(self, what)} is no multiple of {number}")
        num_stages, num_layers = self.pipeline_parallel * self.virtual_stages, self._num_slots
        if num_layers % num_stages:
            raise ValueError(f"{num_layers} layers don't divide into {num_stages} stages")
        return self

    @property
    def _num_slots(self) -> int:
        """Layers, and what takes the place of one."""
        ends = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        return self.layers + sum(ends)

    @property
    def kv_width(self) -> int:
        """What keys, or values, take of a token."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """How many layers each stage of the pipeline has."""
        num_stages = self.pipeline_parallel * self.virtual_stages
        counts = [self._num_slots // num_stages] * num_stages
        counts[0] -= self.account_for_embedding_in_pipeline_split
        counts[-1] -= self.account_for_loss_in_pipeline_split
        return tuple(counts)


class _Costs:
    """Sizes and times of one GPU, from a description."""

    def __init__(self, model: ModelDescription) -> None:
        self.model = model
        tokens, width = model.sequence * model.microbatch, model.value_bytes
        self.token_bytes = tokens * width // model.tensor_parallel
        self.hidden_bytes = model.hidden * self.token_bytes
        self.ffn_bytes = model.ffn * self.token_bytes
        self.fc1_bytes = self.ffn_bytes * (2 if model.gated_mlp else 1)
        self.kv_bytes = model.kv_width * self.token_bytes
        self.scores_bytes = 4 * tokens * model.heads // model.tensor_parallel
        self.logits_bytes = 4 * tokens * model.vocabulary // model.tensor_parallel
        # What sequence parallelism gathers from the other GPUs in front of a linear layer.
        self.gathered_bytes = self.hidden_bytes * model.tensor_parallel
        if model.tensor_parallel == 1:
            self.gathered_bytes = 0

    def weight_bytes(self, inputs: int, outputs: int) -> int:
        return inputs * outputs * self.model.value_bytes // self.model.tensor_parallel

    def us_of_flop(self, flop: float) -> float:
        model = self.model
        return flop / (model.tensor_parallel * model.peak_tflops * model.achieved_share * 1e6)

    def us_of_traffic(self, num_bytes: float) -> float:
        return num_bytes / (self.model.memory_gbps * 1e3)

    def split(self, *tensor_bytes: int) -> tuple[int, int]:
        """Return what of some tensors is large enough to move, and what stays."""
        moving = sum(each for each in tensor_bytes if each >= self.model.min_tensor_bytes)
        return moving, sum(tensor_bytes) - moving

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        saved: tuple[int, ...],
        *,
        norm_bytes: int = 0,
        residual_bytes: int = 0,
        gathered_bytes: int = 0,
        units: tuple[UnitWork, ...] = (),
    ) -> GroupWork:
        """Return a linear layer's group, in bytes of each tensor that it saves.

        ``norm_bytes`` is of the input of a norm that is part of it, ``residual_bytes`` of what is
        added to its output, ``gathered_bytes`` of the input of all GPUs together.
        """
        tokens = self.model.sequence * self.model.microbatch
        product_us = self.us_of_flop(2.0 * tokens * inputs * outputs)
        weight_bytes = self.weight_bytes(inputs, outputs)
        gradient_bytes = 0 if self.model.fused_gradients else weight_bytes
        weight_us = product_us + self.us_of_traffic(3 * gradient_bytes)
        num_bytes, kept_bytes = self.split(*saved)
        input_bytes, output_bytes = inputs * self.token_bytes, outputs * self.token_bytes
        return GroupWork(
            name,
            num_bytes,
            forward_us=product_us + self.us_of_traffic(2 * norm_bytes + 3 * residual_bytes),
            backward_us=product_us + weight_us + self.us_of_traffic(3 * norm_bytes),
            kept_bytes=kept_bytes,
            weight_us=weight_us,
            gradient_bytes=output_bytes,
            forward_temp_bytes=output_bytes + gathered_bytes,
            backward_temp_bytes=gradient_bytes + input_bytes + output_bytes + gathered_bytes,
            units=tuple(unit for unit in units if unit.num_bytes >= self.model.min_tensor_bytes),
        )

    def unit(self, name: str, read_bytes: int, made_bytes: int) -> UnitWork:
        """Return what an operation that only reads and writes makes again."""
        return UnitWork(name, made_bytes, self.us_of_traffic(read_bytes + made_bytes))

    def pointwise(self, name: str, saved: int, output_bytes: int) -> GroupWork:
        """Return the group of what only reads and writes: a norm, an activation."""
        num_bytes, kept_bytes = self.split(saved)
        return GroupWork(
            name,
            num_bytes,
            forward_us=self.us_of_traffic(saved + output_bytes),
            backward_us=self.us_of_traffic(2 * saved + output_bytes),
            kept_bytes=kept_bytes,
            forward_temp_bytes=output_bytes,
            backward_temp_bytes=saved + output_bytes,
        )

    def attention(self) -> GroupWork:
        model, hidden = self.model, self.hidden_bytes
        tokens = model.sequence * model.microbatch
        flop_us = self.us_of_flop(2.0 * tokens * model.sequence * model.hidden)
        qkv_bytes = hidden + 2 * self.kv_bytes
        rotation_us = self.us_of_traffic(2 * (hidden + self.kv_bytes))
        num_bytes, kept_bytes = self.split(
            hidden, self.kv_bytes, self.kv_bytes, hidden, self.scores_bytes
        )
        return GroupWork(
            "core_attn",
            num_bytes,
            forward_us=flop_us + rotation_us,
            backward_us=2.5 * flop_us + rotation_us,
            kept_bytes=kept_bytes,
            forward_temp_bytes=qkv_bytes,
            backward_temp_bytes=2 * qkv_bytes + hidden,
        )

    def layer(self) -> list[GroupWork]:
        model, hidden = self.model, self.hidden_bytes
        is_fused = model.fused_norm
        norm_bytes = hidden if is_fused else 0
        saved = (hidden, hidden) if is_fused else (hidden,)
        norm = self.unit("norm", hidden, hidden)
        activation = self.unit("mlp_act", self.fc1_bytes, self.ffn_bytes)
        before: dict[str, Any] = {
            "norm_bytes": norm_bytes,
            "gathered_bytes": self.gathered_bytes,
            "units": (norm,),
        }
        qkv_width = model.hidden + 2 * model.kv_width
        fc1_width = model.ffn * (2 if model.gated_mlp else 1)
        groups = [
            self.pointwise("attn_norm", hidden, hidden),
            self.linear("qkv_linear", model.hidden, qkv_width, saved, **before),
            self.attention(),
            self.linear("attn_proj", model.hidden, model.hidden, (), residual_bytes=hidden),
            self.pointwise("mlp_norm", hidden, hidden),
            self.linear("mlp_fc1", model.hidden, fc1_width, saved, **before),
            self.pointwise("mlp_act", self.fc1_bytes, self.ffn_bytes),
            self.linear(
                "mlp_fc2",
                model.ffn,
                model.hidden,
                (self.ffn_bytes,),
                residual_bytes=hidden,
                units=(activation,),
            ),
        ]
        if is_fused:
            groups = [group for group in groups if not group.name.endswith("_norm")]
        marked = [group.name for group in groups if group.name in model.modules]
        for place, group in enumerate(groups):
            name = group.name
            parent = _MADE_FROM.get(name)
            distances: tuple[int, ...] = ()
            if name in marked and parent in marked:
                distances = (marked.index(name) - marked.index(parent),)
            units = tuple(unit._replace(parents=distances) for unit in group.units)
            groups[place] = replace(group, units=units, is_marked=name in marked)
        return groups

    def embedding(self) -> GroupWork:
        table_bytes = self.weight_bytes(self.model.vocabulary, self.model.hidden)
        gradient_bytes = 0 if self.model.fused_gradients else table_bytes
        traffic_us = self.us_of_traffic(2 * self.hidden_bytes)
        return GroupWork(
            "embedding",
            0,
            traffic_us,
            traffic_us + self.us_of_traffic(3 * gradient_bytes),
            backward_temp_bytes=gradient_bytes + self.hidden_bytes,
            is_marked=False,
        )

    def loss(self) -> list[GroupWork]:
        """Return the last norm, the head, and the cross entropy in fp32."""
        model, logits = self.model, self.logits_bytes
        head = self.linear(
            "head",
            model.hidden,
            model.vocabulary,
            (self.hidden_bytes, self.hidden_bytes),
            norm_bytes=self.hidden_bytes,
            gathered_bytes=self.gathered_bytes,
        )
        entropy = GroupWork(
            "loss",
            0,
            forward_us=self.us_of_traffic(4 * logits),
            backward_us=self.us_of_traffic(2 * logits),
            kept_bytes=logits,
            # The logits before they were widened; the exponential is taken in place.
            forward_temp_bytes=logits * model.value_bytes // 4,
            backward_temp_bytes=logits * model.value_bytes // 4,
            is_marked=False,
        )
        return [replace(head, is_marked=False), entropy]


def num_parameters(model: ModelDescription, rank: int) -> int:
    """Return the weights of one GPU of a pipeline rank."""
    hidden, qkv_width = model.hidden, model.hidden + 2 * model.kv_width
    fc1_width = model.ffn * (2 if model.gated_mlp else 1)
    products = hidden * (qkv_width + hidden + fc1_width + model.ffn)
    layers = model.layers_of_stages[rank :: model.pipeline_parallel]
    ends = (rank == 0) + (rank == model.pipeline_parallel - 1)
    whole = sum(layers) * products + ends * model.vocabulary * hidden
    norms = sum(layers) * 2 * hidden + (rank == model.pipeline_parallel - 1) * hidden
    return whole // model.tensor_parallel + norms


def job_from_model(model: ModelDescription, machine: Machine | None = None) -> Job:
    """Return the step of a model, from its description alone; without a machine by the defaults."""
    name = model.schedule or ("interleaved" if model.virtual_stages > 1 else "1f1b")
    schedule = make_schedule(
        name,
        model.pipeline_parallel,
        model.num_microbatches,
        model.virtual_stages,
        model.microbatch_group_size_per_vp_stage,
    )
    costs = _Costs(model)
    hidden_bytes = costs.hidden_bytes
    stages = []
    for stage, num_layers in enumerate(model.layers_of_stages):
        groups = costs.layer() * num_layers
        if stage == 0:
            groups = [costs.embedding(), *groups]
        elif groups and groups[0].is_marked and groups[0].num_bytes >= hidden_bytes:
            # The schedule holds the input of a stage until backward.
            first, held = groups[0], groups[0].kept_bytes + hidden_bytes
            groups[0] = replace(first, num_bytes=first.num_bytes - hidden_bytes, kept_bytes=held)
        if stage == schedule.num_stages - 1:
            groups += costs.loss()
        buffer_bytes = _GRADIENT_BUFFERS * hidden_bytes if schedule.num_stages > 1 else 0
        num_launches = num_layers * model.launches_per_layer / 2
        stages.append(StageWork(tuple(groups), hidden_bytes, buffer_bytes, num_launches))
    per_parameter = model.static_bytes_per_parameter
    return Job(
        schedule=schedule,
        stages=tuple(stages),
        static_bytes=tuple(
            int(num_parameters(model, rank) * per_parameter) for rank in range(schedule.num_ranks)
        ),
        machine=machine or Machine(),
        gpus_per_rank=model.tensor_parallel,
    )


_TRAINERS = frozenset({"data", "optimizer", "parallel", "run", "schedule"})
"""Sections of the trainer's configuration that no description has."""

_SETTINGS = RankSettings()


class Budgets(StrictModel):
    """The device memory of copies, and the pieces of host memory, as in ``OffloadConfig``."""

    max_inflight_bytes: Bytes | None = None
    """Device memory for groups on their way out. None leaves it to the package."""

    prefetch_bytes: Bytes | None = None
    """Device memory for groups that are back ahead of their use. None leaves it to the package."""

    host_slab_bytes: Bytes = Field(default=ByteSize(_SETTINGS.host_slab_bytes), gt=0)
    """Pinned memory comes in pieces of this."""

    recompute: NamesField = default(())
    """The units that may be made again; unless set, all that the job has."""


class Surroundings(StrictModel):
    """What stands around a model: machine and budgets."""

    machine: Machine = Machine()
    offload: Budgets = Budgets()


class JobDescription(Surroundings):
    """A model and what stands around it."""

    model: ModelDescription

    def job(self) -> Job:
        """Return the step that it describes; `ConfigError` where no schedule has these sizes.

        A tensor-parallel group is of one node, which has its GPUs where nothing says how many.
        """
        machine, num_gpus = self.machine, self.model.tensor_parallel
        if num_gpus > machine.gpus_per_node:
            if "gpus_per_node" in machine.model_fields_set:
                raise ConfigError(
                    f"model.tensor_parallel {num_gpus} doesn't fit into a node of "
                    f"machine.gpus_per_node {machine.gpus_per_node}"
                )
            machine = machine.model_copy(update={"gpus_per_node": num_gpus})
        return job_from_model(self.model, machine)


def load_description(
    path: str | Path, overrides: Sequence[str] = (), *, machine: Mapping[str, Any] | None = None
) -> JobDescription:
    """Read a job; `ConfigError` says all that is wrong, one line each.

    Args:
        path: the file's.
        overrides: ``section.key=value`` pairs that win over the file.
        machine: a section in the place of the file's.
    """
    data = load_yaml(path)
    if data.keys() & _TRAINERS:
        raise ConfigError(
            f"{path} is a configuration of 'train' (it has the section "
            f"{min(data.keys() & _TRAINERS)!r}), and no description of a job; run it with "
            "run.profile_step=3 and give its folder, or write a file as configs/models/ has them"
        )
    if machine is not None:
        data["machine"] = dict(machine)
    return validate(JobDescription, apply_overrides(data, overrides), str(path))

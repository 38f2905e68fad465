"""What may be said of a model, of how it is cut over GPUs, and of how fast one GPU is."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import ByteSize, Field, field_validator, model_validator

from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.strict_model import Bytes, Names, OneOrMany, StrictModel
from megatron_offload.machine.profile import Rate
from megatron_offload.planning.schedule import ScheduleName

LAYER_GROUPS = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
    *("mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"),
    *("expert_fc1", "moe_act", "expert_fc2"),
)
"""The groups of a layer, in its order; the last three take the place of a dense MLP's."""

Dtype: TypeAlias = Literal["fp32", "fp16", "bf16", "fp8"]

Sharding: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

VALUE_BYTES = 2  # of an activation or a weight, in bf16
_MOST = 10**9
"""Larger sizes are a slip of the pen."""


class Attention(NamedTuple):
    """What a token takes in attention of a layer, in values."""

    query: int
    key: int
    value: int
    attended: int
    """The output of attention's core."""
    products: tuple[tuple[int, int], ...]
    """Inputs and outputs of the linear layers in front of the core."""
    norms: tuple[tuple[int, int], ...]
    """How many norms queries and keys, or what they are made from, go through, and their width."""
    projected: tuple[int, ...]
    """What is saved between the layer's norm and the core."""


class ModelDescription(StrictModel):
    """A GPT, how it is cut over GPUs, and how fast one GPU is."""

    layers: int = Field(ge=1, le=10**5)
    hidden: int = Field(ge=1, le=_MOST)
    ffn: int = Field(ge=1, le=_MOST)
    """Width of the MLP."""
    heads: int = Field(ge=1, le=_MOST)
    kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values; None for as many as of queries."""
    kv_channels: int | None = Field(default=None, ge=1, le=_MOST)
    """Width of a head; None for ``hidden`` over ``heads``."""
    qk_layernorm: bool = False
    """Whether queries and keys, or what multi-latent attention makes them from, have norms."""
    window_size: int | None = Field(default=None, ge=1, le=_MOST)
    """Tokens that a query sees in layers with a sliding window; None where no layer has one."""
    window_attn_skip_freq: int = Field(default=0, ge=0, le=_MOST)
    """Of so many layers the last sees all tokens all the same; 0 for none."""

    kv_lora_rank: int | None = Field(default=None, ge=1, le=_MOST)
    """Multi-latent attention: width of what keys and values are made from; None for none. Heads
    then are ``qk_head_dim`` + ``qk_pos_emb_head_dim`` wide, those of values ``v_head_dim``."""
    q_lora_rank: int | None = Field(default=None, ge=1, le=_MOST)
    """Likewise of queries; None where they are made from the layer's input."""
    qk_head_dim: int = Field(default=128, ge=1, le=_MOST)
    qk_pos_emb_head_dim: int = Field(default=64, ge=1, le=_MOST)
    v_head_dim: int = Field(default=128, ge=1, le=_MOST)

    vocabulary: int = Field(ge=1, le=_MOST)
    tied_embeddings: bool = False
    """Whether embedding and head are one weight, of which first and last stage have a copy each."""
    mtp_num_layers: int = Field(default=0, ge=0, le=100)
    """Layers of multi-token prediction on the last stage, each with head and loss of its own."""
    gated_mlp: bool = False
    """Whether the MLP's first layer is twice as wide, as with SwiGLU."""

    rotary: bool = True
    """Whether queries and keys are rotated by their positions."""

    experts: int = Field(default=0, ge=0, le=_MOST)
    """In place of a dense MLP; 0 for none."""
    experts_per_token: int = Field(default=2, ge=1, le=_MOST)
    expert_ffn: int | None = Field(default=None, ge=1, le=_MOST)
    """Width of an expert; None for ``ffn``."""
    shared_expert_ffn: int = Field(default=0, ge=0, le=_MOST)
    """Width of the expert that takes every token; 0 for none."""
    dense_layers: int = Field(default=0, ge=0)
    """So many of the first layers have a dense MLP all the same."""

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
    context_parallel: int = Field(default=1, ge=1, le=_MOST)
    """GPUs that share every sequence, each with its part of the tokens."""
    expert_parallel: int = Field(default=1, ge=1, le=_MOST)
    """GPUs that share the experts, each whole; a token goes to any GPU with the same chance."""
    schedule: ScheduleName | None = None
    """None: ``interleaved`` with several virtual stages, else ``1f1b``."""
    stage_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of each stage of the whole pipeline; None: as many everywhere."""
    account_for_embedding_in_pipeline_split: bool = False
    """Whether the embedding takes the place of a layer, as by Megatron's option of this name."""
    account_for_loss_in_pipeline_split: bool = False
    """Likewise the head and the loss."""

    static_bytes_per_parameter: float | None = Field(default=None, ge=0, le=_MOST)
    """Weight, gradient and this GPU's share of the optimizer's state; None: as the keys of
    ``optimizer`` make it, or 4 without one."""
    optimizer: Literal["adam", "sgd"] | None = None
    """In mixed precision: weights and gradients, weights of its own, and two moments with Adam."""
    main_params_dtype: Dtype = "fp32"
    main_grads_dtype: Dtype = "fp32"
    exp_avg_dtype: Dtype = "fp32"
    """Of both moments."""
    data_parallel: int = Field(default=1, ge=1, le=_MOST)
    """Replicas, which Megatron places beside each other: they share a node, and what the next key
    says. ``num_microbatches`` are those of each."""
    data_parallel_sharding_strategy: Sharding = "optim"
    """What replicas share of the optimizer's state, gradients and weights: stages 0 to 3 of ZeRO.
    With weights, two layers' are gathered at a time; with gradients, one layer's are whole."""
    overlap_grad_reduce: bool = True
    """Whether messages of replicas are sent behind compute: Megatron's options of this name, and
    ``overlap_param_gather``."""
    lora_rank: int = Field(default=0, ge=0, le=_MOST)
    """LoRA on every linear layer of attention and MLP, all else frozen, by Adam unless
    ``optimizer`` says otherwise; 0 for full training."""
    fused_norm: bool = True
    """Whether norms are part of the linear layer behind them, as TransformerEngine's, and so no
    groups of their own."""
    fused_gradients: bool = False
    """Whether gradients of weights are added where they lie (``gradient_accumulation_fusion``),
    with no temporary of their own."""

    fused_kernels: bool = False
    """Whether rotation, a gated activation and loss are one kernel each, as with Megatron's
    ``apply_rope_fusion``, ``bias_activation_fusion`` and ``cross_entropy_loss_fusion``."""
    eager_kernels: bool = False
    """Whether norms, rotation, gates and loss are PyTorch's own kernels, some in fp32, and so are
    adapters, as in transformers and peft; ``fused_norm`` and ``fused_kernels`` don't count then."""
    deterministic: bool = False
    """Whether attention's backward is the deterministic one of TransformerEngine, which for a while
    takes a value for every score."""

    expandable_segments: bool = False
    """Whether PYTORCH_CUDA_ALLOC_CONF says so: mixed sizes leave no gaps then."""

    recompute: (
        Literal["full"] | Annotated[tuple[Literal["norm", "mlp_act", "moe_act"], ...], OneOrMany]
    ) = ()
    """What the job recomputes without this package: every layer, or outputs of these kinds."""

    modules: Names = LAYER_GROUPS
    """Groups that the engine sees; see `LAYER_GROUPS`."""
    min_tensor_bytes: Bytes = ByteSize(1024 * 1024)
    """Smaller tensors are kept."""

    peak_tflops: Rate
    """Of a GPU, dense."""
    achieved_share: float = Field(default=0.66, ge=1e-6, le=1)
    """The part of it that matrix products get where nothing else runs, and so the least; 0.66 on
    H200s at their limit of power. The section ``measured`` of a job fits it."""
    memory_gbps: Rate
    """Bandwidth of the device's own memory."""
    host_us_per_launch: float = Field(default=55.0, ge=0, le=_MOST)
    """What the host takes for a kernel, all that Python does around it included."""
    host_us_per_group: float = Field(default=350.0, ge=0, le=_MOST)
    """What it takes besides for a group that this package sees."""

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
            ("hidden", 1 if self.kv_channels or self.kv_lora_rank else self.heads),
            ("heads", self.kv_heads or self.heads),
            ("heads", self.tensor_parallel),
            ("ffn", self.tensor_parallel),
            ("experts", self.expert_parallel),
            ("sequence", self.context_parallel),
        )
        for what, number in divisors:
            if getattr(self, what) % number:
                raise ValueError(f"{what} {getattr(self, what)} is no multiple of {number}")
        num_gpus = self.tensor_parallel * self.context_parallel * self.data_parallel
        if num_gpus % self.expert_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} doesn't divide the {num_gpus} GPUs of a "
                "stage (tensor_parallel, context_parallel and data_parallel)"
            )
        num_stages = self.pipeline_parallel * self.virtual_stages
        if self.stage_layers is not None:
            if len(self.stage_layers) != num_stages or sum(self.stage_layers) != self.layers:
                raise ValueError(
                    f"stage_layers {list(self.stage_layers)} are {len(self.stage_layers)} stages "
                    f"with {sum(self.stage_layers)} layers in all, and the model has {num_stages} "
                    f"with {self.layers}"
                )
        elif self._num_slots % num_stages:
            raise ValueError(
                f"{self._num_slots} layers don't divide into {num_stages} stages; stage_layers "
                "says how many each has"
            )
        return self

    @property
    def _num_slots(self) -> int:
        """Layers, and what takes the place of one."""
        ends = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        return self.layers + sum(ends)

    @property
    def attention(self) -> Attention:
        """The widths of attention."""
        hidden, heads, rank, kv_rank = self.hidden, self.heads, self.q_lora_rank, self.kv_lora_rank
        if kv_rank is None:
            width = self.kv_channels or hidden // heads
            query, key = heads * width, (self.kv_heads or heads) * width
            norms = ((heads, width), (key // width, width)) if self.qk_layernorm else ()
            products, projected = ((hidden, query + 2 * key),), tuple(map(prod, norms))
            return Attention(query, key, key, query, products, norms, projected)
        head, value = self.qk_head_dim + self.qk_pos_emb_head_dim, heads * self.v_head_dim
        shared, query = kv_rank + self.qk_pos_emb_head_dim, heads * head
        queries = ((hidden, rank), (rank, query)) if rank else ((hidden, query),)
        products = (*queries, (hidden, shared), (kv_rank, heads * self.qk_head_dim + value))
        made = tuple(filter(None, (rank, kv_rank)))
        own_norms = tuple((1, width) for width in made if self.qk_layernorm)
        projected = made * (1 + self.qk_layernorm)  # before and behind their norms
        return Attention(query, query, value, value, products, own_norms, projected)

    def seen_tokens(self, index: int) -> float:
        """Return what of a sequence's tokens a query of a layer sees, without its causal half."""
        window, skip = self.window_size or self.sequence, self.window_attn_skip_freq
        if window >= self.sequence or (skip and index % skip == skip - 1):
            return self.sequence
        return 2 * window - window**2 / self.sequence

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """How many layers each stage of the pipeline has."""
        if self.stage_layers is not None:
            return self.stage_layers
        num_stages = self.pipeline_parallel * self.virtual_stages
        counts = [self._num_slots // num_stages] * num_stages
        counts[0] -= self.account_for_embedding_in_pipeline_split
        counts[-1] -= self.account_for_loss_in_pipeline_split
        return tuple(counts)

    def layers_of(self, stage: int) -> range:
        """Return the places in the model of a stage's layers."""
        first = sum(self.layers_of_stages[:stage])
        return range(first, first + self.layers_of_stages[stage])

    def has_experts(self, index: int) -> bool:
        """Whether the layer at this place has experts."""
        return self.experts > 0 and index >= self.dense_layers

    @property
    def num_launches(self) -> int:
        """Kernels of a layer, forward and backward together: megatron-core's, by reading it."""
        rotation = (4 if self.fused_kernels else 40) if self.rotary else 0
        again = 11 + rotation // 2 if self.recompute == "full" else 0
        return 36 + rotation + again

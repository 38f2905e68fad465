"""Configuration of a training run: model, parallelism, data, run, offload.

Every check that needs no device is made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel


class ModelConfig(StrictModel):
    """A dense GPT. Sizes in elements."""

    layers: int = Field(default=4, ge=1)
    """Transformer layers over all pipeline ranks."""
    hidden: int = Field(default=128, ge=1)
    """Width of the residual stream."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide ``hidden``."""
    ffn: int | None = Field(default=None, ge=1)
    """Width inside the MLP. None: four times ``hidden``."""
    sequence_length: int = Field(default=128, ge=2, le=2**20)
    """Tokens in one sequence."""
    vocabulary: int = Field(default=256, ge=256)
    """Rows of the embedding, rounded up to a multiple of 128; text takes 256, one for each byte."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of dropping, in attention and in the residual stream."""
    tied_embeddings: bool = False
    """Share the embedding with the output layer, over the pipeline's first and last rank."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of normalization."""
    position_embedding: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter."""
    bias: bool = True
    """Whether linear layers have one."""

    def model_post_init(self, _: Any, /) -> None:
        """Refuse what doesn't fit together."""
        if self.hidden % self.heads:
            fits = ", ".join(str(n) for n in range(1, self.hidden + 1) if self.hidden % n == 0)
            raise ConfigError(
                f"model.heads {self.heads} does not divide model.hidden {self.hidden}; choose one "
                f"of {fits}"
            )
        width = self.hidden // self.heads
        if self.position_embedding == "rope" and width % 2:
            raise ConfigError(
                f"model.position_embedding rope needs an even width a head, not {width}"
            )


class ParallelConfig(StrictModel):
    """How ranks share the model."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline ranks (PP), each a process on this machine."""
    virtual: int = Field(default=1, ge=1)
    """Model chunks on each pipeline rank (VPP); more than one is the interleaved schedule."""


class DataConfig(StrictModel):
    """How many tokens make a step."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences in one microbatch."""
    microbatches: int = Field(default=1, ge=1)
    """Microbatches of one step."""


class RunConfig(StrictModel):
    """How long, how fast, from which seed, and where results go."""

    steps: int = Field(default=10, ge=1)
    """Training steps."""
    lr: float = Field(default=1e-3, gt=0.0)
    """Learning rate."""
    seed: int = Field(default=1234, ge=0, lt=2**31)
    """Seed of weights, data order and dropout."""
    output: Path = Path("runs/train")
    """Folder for ``steps.jsonl`` and what else a run writes; not one that holds another run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train, in bfloat16 on a GPU and in float32 on a CPU; ``auto`` takes CUDA where there
    is a device."""
    measure_live_bytes: bool = True
    """Count the bytes that autograd keeps alive. Costs some microseconds for each saved tensor."""
    trace_step: int = Field(default=0, ge=0)
    """Step of which every rank writes a timeline (``trace_<rank>.json``); 0 for none. Changes no
    bit. From the fourth on steps are like those after."""


class TrainConfig(StrictModel):
    """Everything about one training run."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()
    offload: OffloadConfig = OffloadConfig(enabled=False)
    """Off where it is left out; a section, or a flag or ``--set`` for one of its keys, is on unless
    it says ``enabled: false``."""

    def model_post_init(self, _: Any, /) -> None:
        """Refuse sections that don't fit one another."""
        modules = self.offload.modules if self.offload.enabled else ()
        pipeline, virtual = self.parallel.pipeline, self.parallel.virtual
        layers, microbatches = self.model.layers, self.data.microbatches
        chunks = pipeline * virtual
        if "attn_proj" in modules and "core_attn" not in modules:
            raise ConfigError(
                "offload.modules names attn_proj without core_attn: the projection saves the core "
                "attention's output, which only its group can free; add core_attn"
            )
        if virtual > 1 and pipeline == 1:
            raise ConfigError(
                "parallel.virtual needs a pipeline: set it to 1, or parallel.pipeline to 2"
            )
        if layers % chunks:
            raise ConfigError(
                f"parallel.pipeline {pipeline} x parallel.virtual {virtual} = {chunks} chunks "
                f"don't divide model.layers {layers}; set model.layers to a multiple of {chunks}"
            )
        if virtual > 1 and microbatches % pipeline:
            raise ConfigError(
                f"the interleaved schedule takes data.microbatches in multiples of "
                f"parallel.pipeline {pipeline}, got {microbatches}"
            )

    @property
    def traced_step(self) -> int:
        """The step of which a timeline is taken; 0 for none."""
        return min(self.run.trace_step, self.run.steps)

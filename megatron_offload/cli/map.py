"""Print what each site of a model saves for backward: what rows can name, and what each frees.

reads    MODEL, the config.json of a language model of transformers, or its folder; no weights, and
         no code that comes with it
prints   by site the layers that have it, what one of them saves there, what of that a token takes,
         in how many tensors, what may recompute it (a run's own search, only a row, or none, and
         why), and which other sites save the same memory: it is freed only where all of them have
         rows; from forwards with fake tensors of this length, its half and its quarter, in which
         nothing is computed and no memory is needed
writes   nothing

exit status: 0 printed, 1 transformers is missing, 2 bad input

example: megatron-offload map config.json --batch 4 --length 2048
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from megatron_offload.cli.options import Options
from megatron_offload.files.text import read_json
from megatron_offload.report.console import console


class Given(Options):
    """The options of ``map``."""

    model: CliPositionalArg[Path]
    """The model's config.json, or its folder."""

    batch: int = Field(default=1, ge=1)
    """Sequences of a microbatch."""

    length: int = Field(default=2048, ge=1)
    """Tokens of a sequence."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and activations."""


def run(given: Given) -> int:
    """Print the map; return 0."""
    path = given.model / "config.json" if given.model.is_dir() else given.model
    config = read_json(path)
    from megatron_offload.integrations.hugging_face import map_config  # imports torch

    shape = given.batch, given.length
    with console(stderr=True).status("running forwards with fake tensors"):
        found = map_config(config, shape, given.dtype)
    console().print(f"{given.model}: {given.batch} x {given.length} tokens in {given.dtype}")
    console().print(str(found))
    return 0

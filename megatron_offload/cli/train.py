r"""Train a GPT by megatron-core's own model and pipeline schedules, on GPUs or on CPUs.

reads    --config, a YAML file (or the name of one in configs/); flags win over the file
prints   a line for each step, and in the end what was offloaded on each rank, and the rows that
         the run has found
writes   run.output: steps.jsonl (a JSON line for each step), config.yaml, run.json, timelines with
         run.trace_step, frontier.json where rows were found (see 'megatron-offload plan --from');
         a folder that holds another run is refused

starts its own processes, one for each rank, on this machine

exit status: 0 trained, 1 a rank failed, 2 bad input (nothing was started), 143 or 130 stopped by
SIGTERM or SIGINT

example: megatron-offload train --config quickstart --set run.steps=6 \
             run.output=runs/example --offload-modules core_attn mlp_act
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megatron_offload.cli.options import OptionsWithKeys
from megatron_offload.config import LAYER_INPUT, apply_overrides, find_config, load_yaml
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.planning.found import NAME, read_frontier
from megatron_offload.report.console import console
from megatron_offload.train.config import TrainConfig

_logger = logging.getLogger(__name__)


class Given(OptionsWithKeys):
    """What says how a run is configured; flags win over the file, and over ``--set``."""

    keys = TrainConfig
    also: ClassVar = {
        "--offload.enabled": "--fine-grained-activation-offloading",
        "--offload.modules": "--offload-modules",
        "--offload.fraction": "--activation-offload-fraction",
        "--offload.min_tensor_elements": "--min-offloaded-tensor-size",
    }

    config: Path | None = None
    """YAML file, or the name of one that comes with the package, such as quickstart."""


def read_config(given: Given) -> TrainConfig:
    """Read the YAML file and lay the flags over it; a `ConfigError` says all that is wrong."""
    data = load_yaml(find_config(given.config)) if given.config else {}
    data = apply_overrides(data, given.set)
    config = validate(TrainConfig, data, str(given.config or "command line"), given.typed)
    if LAYER_INPUT in {*config.offload.modules, *(row.site for row in config.offload.rows or ())}:
        raise ConfigError(
            "offload: layer_input is for full recompute, which the trainer hasn't: leave "
            "it out, or train under 'megatron-offload run'"
        )
    num_tokens = config.data.micro_batch_size * config.model.sequence_length
    for row in config.offload.rows or ():
        if row.min_tokens > num_tokens:
            _logger.warning("row %s does nothing: a microbatch has %d tokens", row, num_tokens)
    return config


def run(given: Given) -> int:
    """Train, and print what was offloaded; return 0."""
    config = read_config(given)
    is_asked = any(key.startswith("offload.") for key in given.typed)
    if is_asked and not config.offload.enabled and "offload.enabled" not in given.typed:
        raise ConfigError(  # else it would go unheard
            f"{given.config} says offload.enabled: false, and the command line says how to "
            f"offload; add --fine-grained-activation-offloading, or leave the rest out"
        )
    if config.run.trace_step and not config.offload.enabled:
        raise ConfigError(
            f"run.trace_step {config.run.trace_step}: without offload there are no groups to look "
            "at; add a section offload: (--fine-grained-activation-offloading), or set "
            "run.trace_step: 0"
        )
    from megatron_offload.report.tables import rank_table
    from megatron_offload.train.launch import launch

    with launch([("train", config)]) as [facts]:
        out, title = console(), "Ranks: bytes of the last step, peaks over usual steps"
        out.print(rank_table(facts.by_rank, title))
        for line in (*found_in(config.run.output), f"steps: {config.run.output / 'steps.jsonl'}"):
            out.print(line)
    return 0


def found_in(folder: Path) -> Iterator[str]:
    """Yield the rows that a run has found and followed, and where its other plans are."""
    if (folder / NAME).exists():
        yield read_frontier(folder).followed
        yield f"plans: {folder / NAME}; 'megatron-offload plan --from {folder}' prints them"

"""The command ``train``, and the flags that it shares with ``compare``.

Owns flags and how they win over the YAML file; they keep Megatron's names. Must not import torch
before the input is checked. Read next: `megatron_offload.train.launch`.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_offload.cli.example_configs import find_config
from megatron_offload.config import apply_overrides, load_yaml, validate
from megatron_offload.errors import ConfigError
from megatron_offload.report.console import console
from megatron_offload.train.config import TrainConfig

__all__ = ["ABOUT", "add_arguments", "add_run_arguments", "read_config", "run"]

ABOUT = """\
Train a GPT with pipeline parallelism, megatron-core's own model and schedules, on GPUs or on CPUs.

reads    --config, a YAML file (or the name of one in configs/), and the text or the indexed dataset
         that it names; flags win over the file
prints   a line for each step, and in the end what moved on each rank and in each group
writes   run.output: steps.jsonl (a JSON line for each step), config.yaml, run.json, timelines with
         run.trace_step, checkpoints with run.checkpoint_interval; a folder that holds another run
         is refused, unless --resume goes on with it

starts its own processes, one for each rank; under torchrun it is one of them

exit status: 0 trained, 1 a rank failed, 2 bad input (nothing was started), 143 or 130 stopped by
SIGTERM or SIGINT after a whole step

example: megatron-offload train --config quickstart --set run.steps=6 \\
             run.output=runs/example --offload-modules core_attn mlp_act
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train``."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in run.output, if there is one (run.resume)",
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says how a run is configured."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file, or the name of one that comes with the package, such as quickstart",
    )
    parser.add_argument(
        "--fine-grained-activation-offloading",
        action="store_true",
        help="offload activations (offload.enabled); a section 'offload' in the file, and each of "
        "the flags below, say so too",
    )
    parser.add_argument(
        "--offload-modules", nargs="+", metavar="NAME", help="groups to move (offload.modules)"
    )
    parser.add_argument(
        "--activation-offload-fraction",
        type=float,
        metavar="F",
        help="share of the groups that moves (offload.fraction)",
    )
    parser.add_argument(
        "--min-offloaded-tensor-size",
        type=int,
        metavar="N",
        help="smallest tensor that moves, in elements (offload.min_tensor_elements)",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="set any key, such as run.steps=5",
    )


def read_config(options: argparse.Namespace) -> TrainConfig:
    """Read the YAML file and lay the flags over it.

    Raises:
        ConfigError: everything that is wrong with the input.
    """
    data = load_yaml(find_config(options.config)) if options.config else {}
    data = apply_overrides(data, options.set)
    flags: dict[str, Any] = {
        "enabled": True if options.fine_grained_activation_offloading else None,
        "modules": options.offload_modules,
        "fraction": options.activation_offload_fraction,
        "min_tensor_elements": options.min_offloaded_tensor_size,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    if given:
        section = data.get("offload") or {}
        if not isinstance(section, dict):
            raise ConfigError(f"{options.config}: 'offload' must be a section of keys and values")
        data["offload"] = {**section, **given}
    if getattr(options, "resume", False):
        data = apply_overrides(data, ["run.resume=true"])
    return validate(TrainConfig, data, str(options.config or "command line"))


def _check_asked(options: argparse.Namespace, config: TrainConfig) -> None:
    """Check that no word about offload goes unheard."""
    flags = (
        options.offload_modules,
        options.activation_offload_fraction,
        options.min_offloaded_tensor_size,
    )
    keys = [item.partition("=")[0].strip() for item in options.set]
    is_asked = any(flag is not None for flag in flags) or any(
        key.startswith("offload.") for key in keys
    )
    if is_asked and not config.offload.enabled and "offload.enabled" not in keys:
        raise ConfigError(
            f"{options.config} says offload.enabled: false, and the command line says how to "
            f"offload; add --fine-grained-activation-offloading, or leave the rest out"
        )


def run(options: argparse.Namespace) -> int:
    """Train, and print what moved; return 0.

    Raises:
        ConfigError: bad input; nothing was started.
        OffloadError: a rank failed.
    """
    config = read_config(options)
    _check_asked(options, config)
    from megatron_offload.report.summary import group_table, rank_table
    from megatron_offload.train.launch import launch

    with launch([("train", config)]) as reports:
        if reports is None:
            return 0
        ranks = reports[0].peaks()
        out = console()
        if ranks:
            out.print(rank_table(ranks, "Ranks: bytes of the last step, peaks over usual steps"))
            if config.offload.enabled:
                out.print(group_table(ranks, "Groups of the last step"))
        out.print(f"steps: {config.run.output / 'steps.jsonl'}")
    return 0

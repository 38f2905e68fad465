"""The command ``megatron-offload``: ``train`` and ``compare``.

Owns flags and exit statuses: 0 fine, 1 the runs differ or a rank failed, 2 bad input, 143 or 130
stopped by SIGTERM or SIGINT after a whole step. Flags keep Megatron's names and win over the YAML
file. Must not import torch before the input is checked.
Read next: `megatron_offload.train.launch`, `megatron_offload.train.compare`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from megatron_offload.config import apply_overrides, load_yaml, validate
from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.stopping import StoppedError, exit_status

__all__ = ["main", "read_config"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    Args:
        arguments: the words after the program's name; None for those of this process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        config = read_config(options)
        status: int = options.run(config)
    except ConfigError as error:
        errors.print(f"megatron-offload: {error}")
        return 2
    except StoppedError as error:
        errors.print(f"megatron-offload: {error}")
        return exit_status(error.number)
    except OffloadError as error:
        errors.print(f"megatron-offload: {error}")
        return 1
    except KeyboardInterrupt:
        errors.print("megatron-offload: interrupted")
        return 130
    return status


def read_config(options: argparse.Namespace) -> TrainConfig:
    """Read the YAML file and lay the flags over it.

    Raises:
        ConfigError: everything that is wrong with the input.
    """
    data = load_yaml(options.config) if options.config else {}
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-offload", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="command")
    train = commands.add_parser("train", help="train a GPT with pipeline parallelism")
    train.set_defaults(run=_train)
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in run.output, if there is one (run.resume)",
    )
    compare = commands.add_parser(
        "compare", help="train without and then with offload, and compare every step's bits"
    )
    compare.set_defaults(run=_compare)
    for command in (train, compare):
        command.add_argument("--config", metavar="FILE", help="YAML file (see configs/)")
        command.add_argument(
            "--fine-grained-activation-offloading",
            action="store_true",
            help="offload activations (offload.enabled)",
        )
        command.add_argument(
            "--offload-modules", nargs="+", metavar="NAME", help="groups to move (offload.modules)"
        )
        command.add_argument(
            "--activation-offload-fraction",
            type=float,
            metavar="F",
            help="share of the groups that moves (offload.fraction)",
        )
        command.add_argument(
            "--min-offloaded-tensor-size",
            type=int,
            metavar="N",
            help="smallest tensor that moves, in elements (offload.min_tensor_elements)",
        )
        command.add_argument(
            "--set",
            nargs="+",
            action="extend",
            default=[],
            metavar="KEY=VALUE",
            help="set any key, such as run.steps=5",
        )
    return parser


def _train(config: TrainConfig) -> int:
    from megatron_offload.reporting.summary import group_table, rank_table
    from megatron_offload.train.launch import launch

    reports = launch([("train", config)])
    if reports is None:
        return 0
    ranks = reports[0].peaks()
    console = Console()
    if ranks:
        console.print(rank_table(ranks, "Ranks: bytes of the last step, peaks over all steps"))
        if config.offload.enabled:
            console.print(group_table(ranks, "Groups of the last step"))
    console.print(f"steps: {config.run.output / 'steps.jsonl'}", soft_wrap=True)
    return 0


def _compare(config: TrainConfig) -> int:
    from megatron_offload.train.compare import compare

    return compare(config)


if __name__ == "__main__":
    sys.exit(main())

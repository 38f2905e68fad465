"""What a shell reads to complete the words of all commands; shtab makes it of their parsers."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser
from importlib import import_module

from megatron_offload.cli.main import COMMANDS, Parser
from megatron_offload.cli.options import add_flags
from megatron_offload.config import config_folder, load_yaml
from megatron_offload.errors import ConfigError, did_you_mean, require


def completion(shell: str) -> str:
    """Return the script of a shell. ConfigError: shtab isn't installed, or doesn't know it."""
    require("completion of commands", "shtab")
    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(f"no shell {shell!r}{did_you_mean(shell, shtab.SUPPORTED_SHELLS)}")
    parser = Parser(prog="megatron-offload")
    commands = parser.add_subparsers()
    gpus = load_yaml(config_folder("machines") / "gpus.yaml")["gpus"]
    models = sorted(file.stem for file in config_folder("models").glob("*.yaml"))
    for name, summary in COMMANDS.items():
        module = import_module(f"megatron_offload.cli.{name}")
        own: ArgumentParser = commands.add_parser(name, help=summary)
        if hasattr(module, "read"):
            with contextlib.suppress(ConfigError):  # that its script is missing
                module.read(own, [])
        else:
            add_flags(own, module.Given)
        for action in own._actions:
            what = str(action.metavar)
            known = {"machine.gpu": gpus, "job": models}.get(action.dest)
            if known or what.startswith("{"):
                action.choices = known or what.strip("{}").split(",")
            elif what in ("FILE", "FOLDER", "MODEL", "SCRIPT"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)

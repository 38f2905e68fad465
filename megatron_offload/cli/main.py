"""The command ``megatron-offload``: which commands there are, and how they end.

Each command is a module of this folder: its docstring is the text of its help, its model ``Given``
holds the options, and ``run(given)`` returns the exit status. Only the one asked for is imported.
The one that runs another program has a function ``read`` in place of the model, and ``run`` returns
what is left to call then, whose errors are no longer the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from megatron_offload import __version__
from megatron_offload.errors import ConfigError, OffloadError, did_you_mean, require

COMMANDS = {
    "run": "run a Megatron job's own script with offload",
    "train": "train a GPT with pipeline parallelism",
    "compare": "train without and then with offload, and compare every step's bits",
    "plan": "choose what is offloaded of a described model, or show what a run has found",
    "map": "print what each site of a model saves, from its config.json",
    "simulate": "predict a step without and with offload, with no GPU",
    "report": "write one HTML page about a run, or about plans",
    "doctor": "say what is wrong with this machine for offload",
    "trace": "put a run's timelines into one file for Perfetto",
}

_EPILOG = """\
exit status: 0 fine, 1 other bits, a failed rank or a target that can't be kept, 2 bad input

'megatron-offload COMMAND --help' says what a command reads and writes, with an example.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default this process's; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    status: int | Callable[[], object]
    try:
        # Inside, as an interrupt may come while they are imported.
        from megatron_offload.report.console import console

        try:
            if words and not words[0].startswith("-"):
                command, given = read_command(words)
                status = command.run(given)
            else:
                sys.stdout.write(_about(words))
                status = 0
        except (OffloadError, OSError) as error:  # such as a full disk behind what is printed
            console(stderr=True).print(f"megatron-offload: {error}")
            status = getattr(error, "exit_status", ConfigError.exit_status)
    except KeyboardInterrupt:
        sys.stderr.write("megatron-offload: interrupted\n")
        status = 130
    if isinstance(status, int):
        if arguments is None:  # all is done; at the process's end one is a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return status
    status()
    return 0


def read_command(words: Sequence[str]) -> tuple[Any, Any]:
    """Return the module of the command that words begin with, and the options that follow."""
    from megatron_offload.cli.options import add_flags, read_options

    name, *more = words
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}")
    module = import_module(f"megatron_offload.cli.{name}")
    parser = _Parser(prog=f"megatron-offload {name}", description=module.__doc__)
    if hasattr(module, "read"):
        return module, module.read(parser, more)
    add_flags(parser, module.Given)
    return module, read_options(module.Given, parser, more)


def _about(words: Sequence[str]) -> str:
    parser = _Parser(
        prog="megatron-offload",
        description="Exact activation offload for pipeline-parallel transformers.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    what = "print what bash, zsh, fish or another SHELL reads to complete commands; needs shtab"
    parser.add_argument("--print-completion", metavar="SHELL", help=what)
    commands = parser.add_subparsers(metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=text) for name, text in COMMANDS.items()}
    shell = parser.parse_args(words).print_completion
    return parser.format_help() if shell is None else _completion(shell, parser, parsers)


def _completion(shell: str, parser: _Parser, parsers: Mapping[str, _Parser]) -> str:
    """Return what a shell reads to complete the words of all commands. ConfigError: no shtab."""
    require("completion of commands", "shtab")
    import shtab

    from megatron_offload.cli.options import add_flags
    from megatron_offload.config import config_folder, load_yaml

    if shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(f"no shell {shell!r}{did_you_mean(shell, shtab.SUPPORTED_SHELLS)}")
    gpus = load_yaml(config_folder("machines") / "gpus.yaml")["gpus"]
    models = sorted(file.stem for file in config_folder("models").glob("*.yaml"))
    for name, own in parsers.items():
        module = import_module(f"megatron_offload.cli.{name}")
        if hasattr(module, "read"):
            with contextlib.suppress(ConfigError):  # its script is missing
                module.read(own, [])
        else:
            add_flags(own, module.Given)
        for action in own._actions:
            known = {"machine.gpu": gpus, "job": models}.get(action.dest)
            what = str(action.metavar)
            if known or what.startswith("{"):
                action.choices = known or what.strip("{}").split(",")
            elif what in ("FILE", "FOLDER", "MODEL", "SCRIPT"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


class _Usage(argparse.RawDescriptionHelpFormatter):
    """Leaves configuration keys, of which there are a hundred, out of the line of usage."""

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], *more: Any, **others: Any
    ) -> None:
        own = [action for action in actions if "." not in action.dest]
        super().add_usage(usage, own, *more, **others)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(
            formatter_class=_Usage, conflict_handler="resolve", allow_abbrev=False, **settings
        )
        self._negative_number_matcher = re.compile(r"-\d")  # a size too is a value, if a wrong one

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

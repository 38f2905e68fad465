"""The command ``megatron-offload``: which commands there are, and how they end.

Owns the table of commands, what becomes of errors, and exit statuses: 0 fine, 1 what was asked
turned out wrong (other bits, a rank that failed, a target that can't be kept), 2 bad input, 143 or
130 stopped by SIGTERM or SIGINT after a whole step. Must not import torch, nor a command that
wasn't asked for, nor at its top what takes its time.

Invariant: each command is a module with ``ABOUT``, the text of its help, ``add_arguments(parser)``
and ``run(options)``, which returns the exit status. Read next:
`megatron_offload.cli.train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from megatron_offload import __version__
from megatron_offload.errors import ConfigError, OffloadError, TargetError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "train": ("cli.train", "train a GPT with pipeline parallelism"),
    "compare": (
        "cli.compare",
        "train without and then with offload, and compare every step's bits",
    ),
    "plan": ("cli.plan", "choose what moves, from profiles or a described model"),
    "simulate": ("cli.simulate", "predict a step without and with offload, with no GPU"),
    "report": ("cli.report", "write one HTML page about a run"),
    "doctor": ("cli.doctor", "say what is wrong with this machine for offload"),
    "trace": ("cli.trace", "put a run's timelines into one file, and into a picture"),
}
"""For each command its module in this package, and what it does."""

_EPILOG = """\
exit status: 0 fine, 1 other bits, a failed rank or a target that can't be kept, 2 bad input

'megatron-offload COMMAND --help' says what a command reads and writes, with an example.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    Args:
        arguments: the words after the program's name; None for those of this process.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("megatron-offload: interrupted\n")
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    # Inside, as an interrupt may come while they are imported.
    from megatron_offload.report.console import console
    from megatron_offload.train.stopping import StoppedError, exit_status

    errors = console(stderr=True)
    try:
        options = _parser().parse_args(arguments)
        status: int = options.run(options)
    except StoppedError as error:
        errors.print(f"megatron-offload: {error}")
        return exit_status(error.number)
    except OffloadError as error:
        errors.print(f"megatron-offload: {error}")
        is_input = isinstance(error, ConfigError) and not isinstance(error, TargetError)
        return 2 if is_input else 1
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        from megatron_offload.report.console import printable

        self.exit(2, printable(f"{self.prog}: {message}; see {self.prog} --help\n"))


class _CommandParser(_Parser):
    """Loads its command's module when it is the one that was asked for."""

    module = ""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        command = _load(self.module)
        self.description = command.ABOUT
        command.add_arguments(self)
        self.set_defaults(run=command.run)
        return super().parse_known_args(*args, **kwargs)


def _load(module: str) -> ModuleType:
    return import_module(f"megatron_offload.{module}")


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="megatron-offload",
        description="Exact activation offload for pipeline-parallel transformers.",
        epilog=_EPILOG,
        formatter_class=layout,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(run=lambda _: _print_help(parser))
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_CommandParser)
    for name, (module, summary) in COMMANDS.items():
        one = commands.add_parser(name, help=summary, formatter_class=layout)
        one.module = module
    return parser


if __name__ == "__main__":
    sys.exit(main())

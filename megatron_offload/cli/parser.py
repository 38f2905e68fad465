"""The parser of a command line, which needs nothing but argparse."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from megatron_offload.errors import ConfigError


class _Usage(argparse.RawDescriptionHelpFormatter):
    """Leaves configuration keys, of which there are a hundred, out of the line of usage."""

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], *more: Any, **others: Any
    ) -> None:
        own = [action for action in actions if "." not in action.dest]
        super().add_usage(usage, own, *more, **others)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and knows which flags there are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            formatter_class=_Usage, conflict_handler="resolve", allow_abbrev=False, **settings
        )
        self.flags: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong as an error of the user's."""
        raise ConfigError(f"{message}; see {self.prog} --help")

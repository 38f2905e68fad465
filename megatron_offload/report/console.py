"""The one console that all output for people goes through, and the tables made for it.

Nothing is cut off and no text is taken for markup. Control characters, which a terminal would obey,
are written out, wherever the text came from. `rich.text.Text` is for words of this package alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDEST = 1 << 16  # columns of what isn't a terminal: more than any table needs

# All controls but tab and newline, and what turns the direction of writing.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console for results, or that for messages, on the standard error stream.

    In a pipe or a file tables are plain ASCII and as wide as what is in them, whatever ``COLUMNS``
    says. In a terminal they fold to its width, as long as their words fit.
    """
    out = _Output(
        stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True
    )
    if not out.file.isatty():
        out.size = ConsoleDimensions(_WIDEST, _WIDEST)
    return out


def plain_table(
    title: str, columns: Sequence[str], num_left: int = 0, rows: Iterable[Sequence[Any]] = ()
) -> Table:
    """Return a table, its first columns to the left and the others to the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return table


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return text in which what an encoding lacks and what a terminal obeys is written out."""
    text = _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


class _Output(Console):
    """Strings that reach it, in tables too, are printed as they are."""

    @property
    def encoding(self) -> str:
        """What rich draws lines for: nothing but ASCII where no terminal shows them."""
        return super().encoding if self.file.isatty() else "ascii"

    def on_broken_pipe(self) -> None:
        """Say no more where the reader has gone, such as ``head``; the command ends as it would."""
        self.quiet = True
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())

    def render_str(self, text: str, **options: Any) -> Text:
        """Make text of a string; rich calls it for all that is printed, cells and titles too."""
        return super().render_str(printable(text, super().encoding), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; in a narrow terminal sentences of a table fold, and its words do not."""
        if self.file.isatty():
            for table in (one for one in objects if isinstance(one, Table)):
                self._share_width(table)
        super().print(*objects, **options)

    def _share_width(self, table: Table) -> None:
        """Give each column what its longest word needs, and what is left to the narrowest first."""
        unbound, columns = self.options.update(width=_WIDEST), list[tuple[int, int, int]]()
        least = Measurement.get(self, unbound, table).minimum
        table.width, spare = (least, 0) if least > self.width else (None, self.width - least)
        for index, column in enumerate(table.columns):
            sizes = [Measurement.get(self, unbound, x) for x in (column.header, *column.cells)]
            word = max(size.minimum for size in sizes)
            columns.append((max(size.maximum for size in sizes) - word, index, word))
        for num_left, (want, index, word) in zip(count(len(columns), -1), sorted(columns)):
            given = min(want, spare // num_left)
            table.columns[index].width = word + given
            spare -= given

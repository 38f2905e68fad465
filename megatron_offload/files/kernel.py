"""Small files in which the kernel shows its accounts: ``/proc`` and ``/sys``.

Nothing here raises: what is absent, unreadable or makes no sense is empty text, no number, no
members.
"""

from __future__ import annotations

from pathlib import Path

from megatron_offload.errors import ConfigError
from megatron_offload.files.text import read_text


def read_kernel_text(path: Path) -> str:
    """Return a file's text, empty where there is none that can be read."""
    try:
        return read_text(path)
    except ConfigError:
        return ""


def read_int(path: Path) -> int | None:
    """Return the integer that a file holds; None for no file or another word, such as "max"."""
    return to_int(read_kernel_text(path).strip())


def read_field(path: Path, name: str) -> int | None:
    """Return the integer behind ``name`` in a file of one name and one number a line."""
    lines = (line.split() for line in read_kernel_text(path).splitlines())
    return next((to_int(words[1]) for words in lines if len(words) > 1 and words[0] == name), None)


def read_members(text: str) -> frozenset[int]:
    """Return the members of a list such as ``0-3,8``; none where it is no such list."""
    members: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        start, end = to_int(first), to_int(last if dash else first)
        if start is None or end is None:
            return frozenset()
        members.update(range(start, end + 1))
    return frozenset(members)


def to_int(word: str) -> int | None:
    """Return a plain decimal number that is not negative; None for anything else."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 30 else None

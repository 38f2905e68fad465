"""Sizes as people read them.

Owns `format_bytes`. Must not know torch, nor what is sized.

Invariant: plain text of a few letters, whatever the size.
Read next: `megatron_offload.report.summary`.
"""

from __future__ import annotations

__all__ = ["format_bytes"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size_bytes: float | None, digits: int = 1) -> str:
    """Return a size with a unit that keeps it short; ``-`` for None.

    Args:
        size_bytes: may be below 0.
        digits: behind the point, except of single bytes.
    """
    if size_bytes is None:
        return "-"
    value = float(size_bytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.{digits}f} {_UNITS[-1]}"

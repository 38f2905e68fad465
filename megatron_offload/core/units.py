"""Sizes and times as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def byte_unit(size_bytes: float) -> tuple[int, str]:
    """Return the unit that keeps a size short: its bytes and its name."""
    power = sum(abs(size_bytes) >= 1024**each for each in range(1, len(_UNITS)))
    return 1024**power, _UNITS[power]


def format_bytes(size_bytes: float | None, digits: int = 1) -> str:
    """Return a size with a unit that keeps it short; ``-`` for None.

    Args:
        size_bytes: may be below 0.
        digits: behind the point, except of single bytes.
    """
    if size_bytes is None:
        return "-"
    scale, name = byte_unit(size_bytes)
    return f"{size_bytes / scale:.{digits if scale > 1 else 0}f} {name}"


def format_us(time_us: float | None) -> str:
    """Return a time, given in microseconds, in milliseconds from one on; ``-`` for None."""
    if time_us is None:
        return "-"
    return f"{time_us:.1f} µs" if abs(time_us) < 1000 else f"{time_us / 1e3:.1f} ms"

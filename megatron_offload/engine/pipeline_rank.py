"""This process's pipeline rank, for callers that begin a chunk without saying theirs."""

from __future__ import annotations

from collections.abc import Callable

_source: Callable[[], int] | None = None


def tell_pipeline_rank(source: Callable[[], int] | None) -> None:
    """Say who knows the rank; it is asked at every chunk. None, as at first: the rank is 0."""
    global _source
    _source = source


def pipeline_rank() -> int:
    """Return the rank."""
    return 0 if _source is None else _source()

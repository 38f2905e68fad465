"""What other libraries need done before this package looks at what they save.

Owns a list of calls, made at the start of every chunk. Must not know any library: the package
registers its integrations. A call must be cheap, and may come any number of times.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["before_chunk"]

before_chunk: list[Callable[[], None]] = []
"""Called in order, in the thread that begins the chunk."""

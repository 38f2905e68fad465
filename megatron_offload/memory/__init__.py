"""Pinned host memory and reload targets: bytes, and the events behind which they may be reused."""

"""Pinned host memory: bytes, and the events behind which they may be reused."""

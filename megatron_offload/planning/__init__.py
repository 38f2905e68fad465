"""Decisions about what is offloaded: pure Python, no torch, runs anywhere."""

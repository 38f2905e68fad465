"""Decisions about what moves: pure Python, no torch, runs anywhere."""

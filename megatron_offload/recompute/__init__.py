"""Recompute: calls whose output is dropped in forward and run again in backward."""

"""The engine: the manager, its step, chunks, groups, saved tensors, boundaries and transfers."""

"""The engine: manager, chunks, groups, saved tensors, boundaries, transfers and prefetch."""

"""Who watches a step, and what he makes of it."""

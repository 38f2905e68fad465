"""Commands that need neither torch nor a GPU: ``plan`` and ``simulate``."""

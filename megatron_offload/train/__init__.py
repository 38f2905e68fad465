"""The trainer behind ``megatron-offload train`` and ``megatron-offload compare``."""

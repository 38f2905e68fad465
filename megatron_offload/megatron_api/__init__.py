"""Megatron-core's documented offload API: its names, over the engine's manager and chunks."""

import megatron_offload.frontends  # noqa: F401 - what each door does at its import

"""Ways to mark groups without touching model code."""

import megatron_offload.observe.verdicts
import megatron_offload.recompute.transformer_engine  # noqa: F401 - both for their effect

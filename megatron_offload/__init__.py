"""Exact, bounded, hidden activation offload for pipeline-parallel transformers.

Public names only. ``group_start`` and ``group_commit`` mark a layer group in model code; the
manager catches what autograd saves in between:

    from megatron_offload import PipelineOffloadManager, group_commit, group_start

    manager = PipelineOffloadManager.get_instance()
    with manager.step():
        for batch in microbatches:
            manager.begin_chunk()
            x = group_start(x, "mlp")
            with manager:
                x = mlp(x)
            x = group_commit(x, "mlp")
            loss(x).backward()

Read next: `megatron_offload.engine.manager`.
"""

from megatron_offload.config import OffloadConfig
from megatron_offload.fine_grained_activation_offload import PipelineOffloadManager
from megatron_offload.fine_grained_activation_offload import (
    fine_grained_offloading_group_commit as group_commit,
)
from megatron_offload.fine_grained_activation_offload import (
    fine_grained_offloading_group_start as group_start,
)
from megatron_offload.frontends.ratio import CPUOffload, get_tensor_memory
from megatron_offload.frontends.whole_model import (
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
)
from megatron_offload.integrations import transformer_engine_weights  # noqa: F401  registers itself

__all__ = [
    "CPUOffload",
    "NoOpManager",
    "OffloadActivations",
    "OffloadConfig",
    "PipelineOffloadManager",
    "get_act_offloading_ctx_manager",
    "get_tensor_memory",
    "group_commit",
    "group_start",
]

"""A job and a machine for the tests of planning."""

from __future__ import annotations

from megatron_offload.machine.profile import Machine

PIPELINE = {
    "layers": 8,
    "vocabulary": 1000,
    "sequence": 4096,
    "num_microbatches": 4,
    "pipeline_parallel": 2,
    "virtual_stages": 2,
    "peak_tflops": 989.0,
    "memory_gbps": 4800.0,
}
"""Of a described job all but the sizes of its layers."""


def plain_machine(gbps, **more):
    """Return a machine whose links carry as much each way, alone and together; the node far more.

    The node has one limit for both ways.
    """
    rates = {"d2h_gbps": gbps, "h2d_gbps": gbps, "both_gbps": gbps, "node_gbps": 100 * gbps}
    return Machine(**{**rates, "node_d2h_gbps": None, "node_h2d_gbps": None, **more})

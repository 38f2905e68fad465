"""The bandwidths that a plan rests on, and where they come from.

Of GPUs that differ the slowest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_offload.core.machine import CopyRates, MachineConfig
from megatron_offload.core.profile import StepProfile

DEFAULTS = "the defaults, measured with four H200s"

FROM_COPIES = "what copies got in the profiled step, on the slowest rank"


def measured_machine(gpus: Sequence[CopyRates]) -> MachineConfig:
    """Return what every rank of a job can count on, by the GPUs of one of its machines."""
    return MachineConfig(
        d2h_gbps=min(gpu.d2h_gbps for gpu in gpus),
        h2d_gbps=min(gpu.h2d_gbps for gpu in gpus),
        both_gbps=min(min(gpu.both_d2h_gbps, gpu.both_h2d_gbps) for gpu in gpus),
        node_gbps=sum(gpu.node_d2h_gbps + gpu.node_h2d_gbps for gpu in gpus),
        node_d2h_gbps=None,  # all GPUs were not measured one way
        gpus_per_node=len(gpus),
    )


def slowest_link(profiles: Iterable[StepProfile]) -> MachineConfig | None:
    """Return links that every rank has to itself, one way each, by what copies of each have got.

    None where in no profile both ways were timed.
    """
    rates = [(one.d2h_gbps, one.h2d_gbps) for one in profiles if one.d2h_gbps and one.h2d_gbps]
    if not rates:
        return None
    d2h_gbps, h2d_gbps = (min(gbps) for gbps in zip(*rates, strict=True))
    return MachineConfig(
        d2h_gbps=d2h_gbps,
        h2d_gbps=h2d_gbps,
        both_gbps=min(d2h_gbps, h2d_gbps),
        node_gbps=d2h_gbps + h2d_gbps,
        node_d2h_gbps=None,
        gpus_per_node=1,
    )

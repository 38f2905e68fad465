"""The bandwidths that a plan rests on, where they come from, and their file in a run's folder.

Of GPUs that differ the slowest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from megatron_offload.core.machine import CopyRates, MachineConfig
from megatron_offload.files.strict_model import StrictModel

BANDWIDTHS_NAME = "bandwidths.json"
"""Beside the profiles of a run that has planned."""

DEFAULTS = "the defaults, measured with four H200s"

FROM_COPIES = "what copies got in the profiled step, on the slowest rank"


class Bandwidths(StrictModel):
    """What a run plans with."""

    format: Literal["megatron_offload bandwidths"] = "megatron_offload bandwidths"
    version: Literal[1] = 1

    machine: MachineConfig

    gpus_per_rank: Annotated[int, Field(strict=True, ge=1)]
    """GPUs of a node that do the same at the same time."""

    origin: Annotated[str, Field(strict=True, max_length=5000)]
    """Where they come from, in words; a plan has room for it and for the path of its file."""


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


def link_machine(d2h_gbps: float, h2d_gbps: float) -> MachineConfig:
    """Return links that every rank has to itself, one way each."""
    return MachineConfig(
        d2h_gbps=d2h_gbps,
        h2d_gbps=h2d_gbps,
        both_gbps=min(d2h_gbps, h2d_gbps),
        node_gbps=d2h_gbps + h2d_gbps,
        node_d2h_gbps=None,
        gpus_per_node=1,
    )


def slowest_link(rates: Sequence[tuple[float, float]]) -> Bandwidths:
    """Return what every rank can count on, by what the copies of each have got in one step."""
    seen = [pair for pair in rates if all(pair)]
    if not seen:
        return Bandwidths(machine=MachineConfig(), gpus_per_rank=1, origin=DEFAULTS)
    slowest = (min(gbps) for gbps in zip(*seen, strict=True))
    return Bandwidths(machine=link_machine(*slowest), gpus_per_rank=1, origin=FROM_COPIES)

"""The bandwidths that a plan rests on, where they come from, and their file in a run's folder.

Of machines that differ the slowest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_offload.core.machine import MachineConfig
from megatron_offload.files.strict_model import StrictModel, read_model
from megatron_offload.files.text import replace_text
from megatron_offload.machine.profile import CopyRates

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


def measured_machine(machines: Sequence[Sequence[CopyRates]]) -> MachineConfig:
    """Return what every rank of a job can count on: the numbers of the slowest GPU and machine."""
    rates = [gpu for machine in machines for gpu in machine]
    slowest = min(machines, key=lambda machine: _total_gbps(machine) / len(machine))
    return MachineConfig(
        d2h_gbps=min(rate.d2h_gbps for rate in rates),
        h2d_gbps=min(rate.h2d_gbps for rate in rates),
        both_gbps=min(min(rate.both_d2h_gbps, rate.both_h2d_gbps) for rate in rates),
        node_gbps=_total_gbps(slowest),
        node_d2h_gbps=None,  # all GPUs were not measured one way
        node_h2d_gbps=None,
        gpus_per_node=len(slowest),
    )


def link_machine(d2h_gbps: float, h2d_gbps: float) -> MachineConfig:
    """Return links that every rank has to itself, one way each."""
    return MachineConfig(
        d2h_gbps=d2h_gbps,
        h2d_gbps=h2d_gbps,
        both_gbps=min(d2h_gbps, h2d_gbps),
        node_gbps=d2h_gbps + h2d_gbps,
        node_d2h_gbps=None,
        node_h2d_gbps=None,
        gpus_per_node=1,
    )


def slowest_link(rates: Sequence[tuple[float, float]]) -> Bandwidths:
    """Return what every rank can count on, by what the copies of each have got in one step."""
    seen = [pair for pair in rates if all(pair)]
    if not seen:
        return Bandwidths(machine=MachineConfig(), gpus_per_rank=1, origin=DEFAULTS)
    slowest = (min(gbps) for gbps in zip(*seen, strict=True))
    return Bandwidths(machine=link_machine(*slowest), gpus_per_rank=1, origin=FROM_COPIES)


def save_bandwidths(bandwidths: Bandwidths, path: str | Path) -> None:
    """Write a file in the place of the one that is there, if any."""
    replace_text(path, bandwidths.model_dump_json(indent=1) + "\n")


def load_bandwidths(path: str | Path) -> Bandwidths:
    """Read what `save_bandwidths` has written; `ConfigError` says all that is wrong."""
    return read_model(Bandwidths, Path(path))


def _total_gbps(machine: Sequence[CopyRates]) -> float:
    """Return what all GPUs of a machine copy together, in and out added."""
    return sum(gpu.node_d2h_gbps + gpu.node_h2d_gbps for gpu in machine)

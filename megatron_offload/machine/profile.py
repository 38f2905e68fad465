"""What was measured on a machine's GPUs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from megatron_offload.files.strict_model import StrictModel

Rate = Annotated[float, Field(gt=0, le=1e6)]


class CopyRates(StrictModel):
    """How fast one GPU copies, in 10^9 bytes a second, from and to page-locked memory."""

    d2h_gbps: Rate
    """To the host, alone."""
    h2d_gbps: Rate
    """To the device, alone."""
    both_d2h_gbps: Rate
    """To the host while as much comes back."""
    both_h2d_gbps: Rate
    """To the device meanwhile."""
    node_d2h_gbps: Rate
    """To the host while all GPUs of the job on this machine copy both ways."""
    node_h2d_gbps: Rate
    """To the device meanwhile."""


class MachineProfile(StrictModel):
    """What was measured on a machine."""

    version: Literal[4] = 4
    measured_at: AwareDatetime
    gpus: tuple[CopyRates, ...] = Field(max_length=64)
    """Those that the process could use, in CUDA's order."""

"""What copies and messages of a node get: what plans and simulations reckon with, and was measured.

Bandwidths are in GB/s, 10^9 bytes a second, of one direction unless said.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, ByteSize, Field

from megatron_offload.files.strict_model import Bytes, StrictModel, TargetBytes

Rate = Annotated[float, Field(ge=1e-6, le=1e15)]
"""Others are a slip of the pen, and make a time that is no number."""


class Machine(StrictModel):
    """What copies and messages get, in 10^9 bytes a second; defaults: measured with four H200s.

    A host whose directions differ gives less one way: four H200s that all copy to the host get 41
    GB/s each, to the device 55, and 51.2 both ways together, of which more is offloaded.
    """

    gpu: str | None = None
    """Name of a GPU, such as ``H100-80GB``, whose data sheet says what is not set: of this section,
    and ``peak_tflops``, ``memory_gbps`` and ``achieved_share`` of the model."""
    d2h_gbps: Rate = 55.0
    """To the host, one GPU with the host to itself."""
    h2d_gbps: Rate = 55.0
    """Host-to-device bandwidth, GB/s."""
    both_gbps: Rate = 51.0
    """Each way, when both directions of a GPU run."""
    node_gbps: Rate = 205.0
    """What all GPUs of a node copy together, in and out added."""
    node_d2h_gbps: Rate | None = 164.0
    """The most of it that is offloaded; None sets no such bound."""
    node_h2d_gbps: Rate | None = None
    """The most of it that goes to the devices; None sets no such bound."""
    node_d2h_share: float = Field(default=0.6, ge=0.01, le=0.99)
    """The part of ``node_gbps`` that is offloaded where both directions would take all of it: 0.59
    to 0.63 in 94 measurements of two and four H100s and H200s, whose sums are 127 to 220."""
    gpus_per_node: int = Field(default=4, ge=1)
    """GPUs that share what a node's copies get: those of pipeline ranks in order, and of each rank
    all that do the same at the same time, such as a tensor-parallel group."""
    p2p_gbps: Rate = 100.0
    """Of a GPU between neighbouring stages, and of others' messages between nodes; messages don't
    slow each other down."""
    nvlink_gbps: Rate = 360.0
    """What other messages of a GPU get of the link inside a node."""
    device_bytes: TargetBytes = ByteSize(139 * 2**30)
    """Memory of a GPU; what doesn't fit is said."""
    host_bytes: Bytes = ByteSize(2 * 2**40)
    """Memory of a node that may be pinned; likewise."""
    p2p_latency_us: float = Field(default=10.0, ge=0, le=1e9)
    """Of a message of any size."""

    def _sent_us(self, near_bytes: float, far_bytes: float) -> float:
        slowest_us = max(near_bytes / self.nvlink_gbps, far_bytes / self.p2p_gbps) / 1e3
        return self.p2p_latency_us + slowest_us if slowest_us else 0.0

    def ring_us(self, num_gpus: int, stride: int, num_bytes: float) -> float:
        """Return what it takes to gather so many bytes of each GPU, or to scatter sums of as many.

        Of a group every ``stride``-th GPU is one, as Megatron places them. All GPUs of a node share
        what a ring sends out of it.
        """
        sent_bytes = (num_gpus - 1) * num_bytes
        near = min(num_gpus, max(1, self.gpus_per_node // stride))
        return self._sent_us(sent_bytes, sent_bytes / near if near < num_gpus else 0.0)

    def all_to_all_us(self, num_gpus: int, num_bytes: float) -> float:
        """Return what it takes neighbours that have so many bytes, of which each gets its part."""
        near = min(num_gpus, self.gpus_per_node)
        return self._sent_us(*(n * num_bytes / num_gpus for n in (near - 1, num_gpus - near)))


class CopyRates(StrictModel):
    """How fast one GPU copies, in 10^9 bytes a second, from and to page-locked memory."""

    d2h_gbps: Rate
    """To the host, alone."""
    h2d_gbps: Rate
    """To the device, alone."""
    both_d2h_gbps: Rate
    """To the host while as much is reloaded."""
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

    def machine(self) -> Machine:
        """Return what every rank of a job can count on: of GPUs that differ the slowest counts."""
        node_gbps = sum(gpu.node_d2h_gbps + gpu.node_h2d_gbps for gpu in self.gpus)
        return Machine(
            d2h_gbps=min(gpu.d2h_gbps for gpu in self.gpus),
            h2d_gbps=min(gpu.h2d_gbps for gpu in self.gpus),
            both_gbps=min(min(gpu.both_d2h_gbps, gpu.both_h2d_gbps) for gpu in self.gpus),
            node_gbps=node_gbps,
            node_d2h_share=sum(gpu.node_d2h_gbps for gpu in self.gpus) / node_gbps,
            node_d2h_gbps=None,  # all GPUs were not measured one way
            gpus_per_node=len(self.gpus),
        )

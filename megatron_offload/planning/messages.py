"""How long GPUs that share a layer, its tokens, experts or weights send to each other.

Messages of several kinds at a time, and copies to the host beside them, don't slow each other down.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_offload.machine.profile import Machine


class Peers(NamedTuple):
    """GPUs that send to each other: every ``stride``-th, as Megatron places them."""

    machine: Machine
    num_gpus: int
    stride: int = 1

    @property
    def num_near(self) -> int:
        """Those of them in one node."""
        return min(self.num_gpus, max(1, self.machine.gpus_per_node // self.stride))

    def _us(self, near_bytes: float, far_bytes: float) -> float:
        if self.num_gpus == 1:
            return 0.0
        link, network = self.machine.nvlink_gbps, self.machine.p2p_gbps
        return self.machine.p2p_latency_us + max(near_bytes / link, far_bytes / network) / 1e3

    def ring_us(self, num_bytes: float) -> float:
        """Return what it takes to gather so many bytes of each, or to scatter sums of as many.

        All GPUs of a node share what a ring sends out of it.
        """
        sent_bytes = (self.num_gpus - 1) * num_bytes
        is_far = self.num_near < self.num_gpus
        return self._us(sent_bytes, is_far * sent_bytes / self.num_near)

    def all_to_all_us(self, num_bytes: float) -> float:
        """Return what it takes where each has so many bytes, of which each gets its part."""
        far = self.num_gpus - self.num_near
        return self._us(*(n * num_bytes / self.num_gpus for n in (self.num_near - 1, far)))

"""How long GPUs that share a layer, its tokens, experts or weights send to each other.

Of a group every ``stride``-th GPU is one, as Megatron places them. Messages of several kinds at a
time, and copies to the host beside them, don't slow each other down.
"""

from __future__ import annotations

from megatron_offload.machine.profile import Machine


def _num_near(machine: Machine, num_gpus: int, stride: int) -> int:
    return min(num_gpus, max(1, machine.gpus_per_node // stride))


def _us(machine: Machine, near_bytes: float, far_bytes: float) -> float:
    slowest_us = max(near_bytes / machine.nvlink_gbps, far_bytes / machine.p2p_gbps) / 1e3
    return machine.p2p_latency_us + slowest_us if slowest_us else 0.0


def ring_us(machine: Machine, num_gpus: int, stride: int, num_bytes: float) -> float:
    """Return what it takes to gather so many bytes of each GPU, or to scatter sums of as many.

    All GPUs of a node share what a ring sends out of it.
    """
    sent_bytes, near = (num_gpus - 1) * num_bytes, _num_near(machine, num_gpus, stride)
    return _us(machine, sent_bytes, sent_bytes / near if near < num_gpus else 0.0)


def all_to_all_us(machine: Machine, num_gpus: int, num_bytes: float) -> float:
    """Return what it takes neighbours that have so many bytes, of which each gets its part."""
    near = _num_near(machine, num_gpus, 1)
    return _us(machine, *(n * num_bytes / num_gpus for n in (near - 1, num_gpus - near)))

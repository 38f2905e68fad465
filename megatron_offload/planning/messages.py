"""How long GPUs of a described job send to each other, besides their pipeline's messages.

What is sent is that of Megatron: tensor parallelism with sequence parallelism gathers tokens in
front of a block's linear layers and scatters sums behind them; context parallelism sends keys and
values round (``cp_comm_type`` p2p); tokens go to their experts and back, each copy by itself
(``moe_token_dispatcher_type`` alltoall); replicas add up gradients and gather weights. What waits
for nothing, as there, is hidden behind compute and counts as far as it takes longer.

Messages of several kinds at a time, and copies to the host beside them, don't slow each other down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import GroupWork
from megatron_offload.planning.model import ModelDescription


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


class LayerMessages:
    """Messages of the layers: what each group's passes take with them."""

    def __init__(self, model: ModelDescription, machine: Machine, hidden_bytes: int) -> None:
        attention, tensor = model.attention, Peers(machine, model.tensor_parallel)
        context = Peers(machine, model.context_parallel, model.tensor_parallel)
        experts = Peers(machine, model.expert_parallel)
        self._block_us = tensor.ring_us(hidden_bytes)
        keys = attention.key + attention.value
        self._keys_us = context.ring_us(hidden_bytes * keys / model.hidden)
        self._tokens_us = 2 * experts.all_to_all_us(model.experts_per_token * hidden_bytes)

    def sent(self, group: GroupWork) -> GroupWork:
        """Return a group with what it sends."""
        forward_us, backward_us = group.forward_us, group.backward_us
        name = group.name.removeprefix("shared ")
        if name in ("qkv_linear", "mlp_fc1", "head"):
            # Backward gathers the input again, and scatters its gradient, behind the products.
            forward_us += self._block_us
            backward_us = max(backward_us, 2 * self._block_us)
        elif name in ("attn_proj", "mlp_fc2", "embedding"):
            forward_us += self._block_us
            backward_us += self._block_us
        elif name == "core_attn":  # backward sends gradients of keys and values, too
            forward_us = max(forward_us, self._keys_us)
            backward_us = max(backward_us, 2 * self._keys_us)
        elif name == "router":
            forward_us += self._tokens_us
            backward_us += self._tokens_us
        return replace(group, forward_us=forward_us, backward_us=backward_us)

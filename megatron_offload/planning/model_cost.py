"""Bytes, FLOP and microseconds of a described layer on one GPU.

The formulas, with their sources and what they were measured against, are in docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_offload.planning.job import GroupWork, UnitWork
from megatron_offload.planning.model import ModelDescription

_SPARED_SHARE = 0.27
"""A GPU at its limit of power runs products slower: for each microsecond in which it only reads and
writes, which takes that much less power, the products beside it are done so much earlier."""
_LEAST_TIME = 0.85  # of what products take at that limit: their time at the full clock
_PRODUCT_US = 2.0  # what a product takes however small it is
_ATTENTION_SHARE = 0.72  # of what products get: flash attention's, with infinitely long sequences
_ATTENTION_TOKENS = 1200  # the length at which it gets half of that: diagonal blocks are half empty
_MEMORY_SHARE = 0.83  # of the memory's bandwidth, what kernels get which only read and write
_ACTIVATION = 1.4  # what an activation takes more than its traffic does

# In reads or writes of a tensor, by kernels of their own, most of which are strided:
_ROTATION = 29  # of the tensor that is rotated
_GATE_FORWARD, _GATE_BACKWARD = 10.0, 23.0  # of the output of a gated activation
_LOSS_FORWARD, _LOSS_BACKWARD = 13.0, 4.6  # of the logits in fp32; fused, 3 and 2
_SORTED_GRADIENT = 30  # of a microbatch's embeddings, to add up their gradients

_MADE_FROM = {
    "qkv_linear": "attn_norm",
    "mlp_fc1": "mlp_norm",
    "mlp_fc2": "mlp_act",
    "expert_fc2": "moe_act",
}
"""Where a group's unit is made from what another holds, and not from what it holds itself."""


class LayerCosts:
    """Sizes and times of one GPU, from a description."""

    def __init__(self, model: ModelDescription) -> None:
        self.model = model
        self.tokens = model.sequence * model.microbatch // model.context_parallel
        self.token_bytes = self.tokens * model.value_bytes // model.tensor_parallel
        self.hidden_bytes = model.hidden * self.token_bytes
        self.kv_bytes = model.kv_width * self.token_bytes
        # What sequence parallelism gathers from the other GPUs in front of a linear layer.
        num_gathered = model.tensor_parallel if model.tensor_parallel > 1 else 0
        self.gathered_bytes = self.hidden_bytes * num_gathered
        self._product_us = 0.0
        self._slowness = 1.0
        groups = self._layer(model.layers - 1)
        all_us = sum(group.forward_us + group.backward_us for group in groups)
        self._slowness = max(_LEAST_TIME, 1 - _SPARED_SHARE * (all_us / self._product_us - 1))

    def _gradient_bytes(self, inputs: int, outputs: int, experts: int | None = None) -> int:
        """Return what a weight's gradient takes: its part of one, or those of whole experts."""
        num_views = self.model.tensor_parallel if experts is None else 1
        num_bytes = inputs * outputs * self.model.value_bytes * (experts or 1) // num_views
        return 0 if self.model.fused_gradients else num_bytes

    def _product(self, flop: float) -> float:
        model = self.model
        us = flop / (model.tensor_parallel * model.peak_tflops * model.achieved_share * 1e6)
        self._product_us += us
        return self._slowness * us

    def _traffic(self, num_bytes: float) -> float:
        return num_bytes / (self.model.memory_gbps * _MEMORY_SHARE * 1e3)

    def _saved(self, *tensor_bytes: int) -> dict[str, Any]:
        moving = sum(each for each in tensor_bytes if each >= self.model.min_tensor_bytes)
        return {"num_bytes": moving, "kept_bytes": sum(tensor_bytes) - moving}

    def _linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        saved: tuple[int, ...],
        *,
        norm_bytes: int = 0,
        residual_bytes: int = 0,
        gathered_bytes: int = 0,
        units: tuple[UnitWork, ...] = (),
        experts: int | None = None,
    ) -> GroupWork:
        """Return a linear layer's group, in bytes of each tensor that it saves.

        ``norm_bytes`` is of the input of a norm that is part of it, ``residual_bytes`` of what is
        added to its output, ``gathered_bytes`` of the input of all GPUs together. A GPU has so many
        ``experts``, whole ones, and each token comes in a copy for each of its own.
        """
        model = self.model
        copies = 1 if experts is None else model.experts_per_token
        flop = 2.0 * copies * self.tokens * inputs * outputs
        least_us = _PRODUCT_US * (experts or 1)
        product_us, again_us, weight_us = (least_us + self._product(flop) for _ in range(3))
        gradient_bytes = self._gradient_bytes(inputs, outputs, experts)
        weight_us += self._traffic(3 * gradient_bytes)
        token_bytes = copies * self.token_bytes
        return GroupWork(
            name,
            **self._saved(*saved),
            forward_us=product_us + self._traffic(2 * norm_bytes + 3 * residual_bytes),
            # A norm's gradient is added to that of the residual.
            backward_us=again_us + weight_us + self._traffic(6 * norm_bytes),
            forward_temp_bytes=outputs * token_bytes + gathered_bytes,
            backward_temp_bytes=gradient_bytes + (inputs + outputs) * token_bytes + gathered_bytes,
            units=tuple(unit for unit in units if unit.num_bytes >= model.min_tensor_bytes),
        )

    def _norm(self, name: str) -> GroupWork:
        """Return a norm's group, where it is one of its own."""
        hidden = self.hidden_bytes
        return self._pointwise(name, (hidden,), hidden, 2 * hidden, 6 * hidden)

    def _activation(self, name: str, input_bytes: int, output_bytes: int) -> GroupWork:
        """Return the group of an activation; an expert's is fused with its probabilities."""
        read = input_bytes + output_bytes
        if not self.model.gated_mlp or self.model.fused_kernels or name == "moe_act":
            moved = _ACTIVATION * read, _ACTIVATION * (read + input_bytes)
            return self._pointwise(name, (input_bytes,), output_bytes, *moved)
        # Both halves that are multiplied, one of them from the activation, are new tensors.
        saved = (input_bytes, output_bytes, output_bytes)
        moved = _GATE_FORWARD * output_bytes, _GATE_BACKWARD * output_bytes
        return self._pointwise(name, saved, output_bytes, *moved)

    def _pointwise(
        self, name: str, saved: tuple[int, ...], output_bytes: int, forward: float, backward: float
    ) -> GroupWork:
        return GroupWork(
            name,
            **self._saved(*saved),
            forward_us=self._traffic(forward),
            backward_us=self._traffic(backward),
            forward_temp_bytes=output_bytes,
            backward_temp_bytes=saved[0] + output_bytes,
        )

    def _attention(self) -> GroupWork:
        model, hidden = self.model, self.hidden_bytes
        work = (1 + _ATTENTION_TOKENS / model.sequence) / _ATTENTION_SHARE
        flop = 2.0 * work * self.tokens * model.sequence * model.hidden
        forward_us, backward_us = self._product(flop), self._product(2.5 * flop)
        qkv_bytes = hidden + 2 * self.kv_bytes
        scores_bytes = 4 * self.tokens * model.heads // model.tensor_parallel
        num_scores = self.tokens * model.sequence * model.heads // model.tensor_parallel
        rotated = (2 if model.fused_kernels else _ROTATION) if model.rotary else 0
        rotation_bytes = rotated * (hidden + self.kv_bytes)
        return GroupWork(
            "core_attn",
            **self._saved(hidden, self.kv_bytes, self.kv_bytes, hidden, scores_bytes),
            # Values are copied, slowly; gradients are put side by side.
            forward_us=forward_us + self._traffic(rotation_bytes + 5 * self.kv_bytes),
            backward_us=backward_us + self._traffic(rotation_bytes + 2 * qkv_bytes),
            forward_temp_bytes=qkv_bytes,
            backward_temp_bytes=2 * qkv_bytes + hidden,
            backward_block_bytes=model.deterministic * num_scores * model.value_bytes,
        )

    def layer(self, index: int) -> list[GroupWork]:
        """Return the groups of the layer at this place of the model."""
        model = self.model
        groups = [replace(group, layer=index) for group in self._layer(index)]
        if model.recompute == "full":
            return [run_again("layer", groups, self.hidden_bytes)]
        return with_parents(
            replace(
                group, is_marked=group.is_marked and group.name in model.modules
            ).with_recompute(model.recompute)
            for group in groups
        )

    def _layer(self, index: int) -> list[GroupWork]:
        model, hidden = self.model, self.hidden_bytes
        is_fused, has_experts = model.fused_norm, model.has_experts(index)
        before: dict[str, Any] = {
            "norm_bytes": hidden if is_fused else 0,
            "gathered_bytes": self.gathered_bytes,
            "units": (UnitWork("norm", hidden, self._traffic(2 * hidden)),),
        }
        saved = (hidden, hidden) if is_fused else (hidden,)
        qkv_width = model.hidden + 2 * model.kv_width
        groups = [] if is_fused else [self._norm("attn_norm")]
        groups += [
            self._linear("qkv_linear", model.hidden, qkv_width, saved, **before),
            self._attention(),
            self._linear("attn_proj", model.hidden, model.hidden, (), residual_bytes=hidden),
        ]
        if has_experts or not is_fused:
            groups.append(self._norm("mlp_norm"))
        return groups + (self._experts() if has_experts else self._mlp(model.ffn, saved, before))

    def _mlp(self, ffn: int, saved: tuple[int, ...], before: dict[str, Any]) -> list[GroupWork]:
        hidden, ffn_bytes = self.model.hidden, ffn * self.token_bytes
        width = ffn * (2 if self.model.gated_mlp else 1)
        fc1 = self._linear("mlp_fc1", hidden, width, saved, **before)
        activation = self._activation("mlp_act", width * self.token_bytes, ffn_bytes)
        behind: dict[str, Any] = {
            "residual_bytes": self.hidden_bytes,
            "units": (UnitWork("mlp_act", ffn_bytes, activation.forward_us),),
        }
        return [fc1, activation, self._linear("mlp_fc2", ffn, hidden, (ffn_bytes,), **behind)]

    def _experts(self) -> list[GroupWork]:
        """Return the router with a shared expert, which no group marks, and the experts."""
        model, hidden = self.model, self.hidden_bytes
        ffn, copies = model.expert_ffn or model.ffn, model.experts_per_token
        width = ffn * (2 if model.gated_mlp else 1)
        routed, fc1_bytes, act_bytes = (
            copies * each * self.token_bytes for each in (model.hidden, width, ffn)
        )
        num_tokens = self.tokens // model.tensor_parallel
        num_choices, experts = num_tokens * copies, model.experts // model.expert_parallel
        # Each way tokens are copied for their experts, and what experts made is added up.
        moved_us = self._traffic(2 * (hidden + routed))
        router = self._linear("router", model.hidden, model.experts, (), residual_bytes=hidden)
        router = replace(
            router,
            forward_us=router.forward_us + moved_us,
            backward_us=router.backward_us + moved_us,
            # Its input; the indices, in int64, with probabilities, in fp32, and their order; a map.
            kept_bytes=hidden
            + num_choices * (8 + 4 + 8)
            + num_tokens * model.experts * (1 + model.value_bytes),
            forward_temp_bytes=routed,
            backward_temp_bytes=2 * routed,
        )
        shared = self._mlp(model.shared_expert_ffn, (), {}) if model.shared_expert_ffn else []
        unmarked = [
            replace(group, name=f"shared {group.name}", units=(), is_marked=False)
            for group in shared
        ]
        fc1 = self._linear("expert_fc1", model.hidden, width, (routed,), experts=experts)
        act = self._activation("moe_act", fc1_bytes, act_bytes)
        units = (UnitWork("moe_act", act_bytes, act.forward_us),)
        fc2 = self._linear(
            "expert_fc2", ffn, model.hidden, (act_bytes,), units=units, experts=experts
        )
        act = replace(act, kept_bytes=act.kept_bytes + num_choices * model.value_bytes)
        return [replace(router, is_marked=False), *unmarked, fc1, act, fc2]

    def embedding(self) -> GroupWork:
        """Return what the first stage does before its layers."""
        gradient_bytes = self._gradient_bytes(self.model.vocabulary, self.model.hidden)
        sorted_bytes = _SORTED_GRADIENT * self.hidden_bytes
        return GroupWork(
            "embedding",
            0,
            self._traffic(4 * self.hidden_bytes),
            self._traffic(sorted_bytes + 4 * gradient_bytes),
            backward_temp_bytes=gradient_bytes + self.hidden_bytes,
            is_marked=False,
        )

    def loss(self) -> list[GroupWork]:
        """Return the last norm, the head, and the cross entropy in fp32."""
        model, hidden = self.model, self.hidden_bytes
        logits = 4 * self.tokens * model.vocabulary // model.tensor_parallel
        before: dict[str, Any] = {"norm_bytes": hidden, "gathered_bytes": self.gathered_bytes}
        head = self._linear("head", model.hidden, model.vocabulary, (hidden, hidden), **before)
        entropy = GroupWork(
            "loss",
            0,
            forward_us=self._traffic((3 if model.fused_kernels else _LOSS_FORWARD) * logits),
            backward_us=self._traffic((2 if model.fused_kernels else _LOSS_BACKWARD) * logits),
            kept_bytes=logits,
            # The logits before they were widened; the exponential is taken in place.
            forward_temp_bytes=logits * model.value_bytes // 4,
            backward_temp_bytes=logits * model.value_bytes // 4,
            is_marked=False,
        )
        return [replace(head, is_marked=False), entropy]


def with_parents(groups: Iterable[GroupWork]) -> list[GroupWork]:
    """Return the groups of a layer, with the places of what their units are made from."""
    groups = list(groups)
    marked = [group.name for group in groups if group.is_marked]
    for place, group in enumerate(groups):
        name, parent = group.name, _MADE_FROM.get(group.name)
        parents: tuple[int, ...] = ()
        if name in marked and parent in marked:
            parents = (marked.index(name) - marked.index(parent),)
        units, recomputed = (
            tuple(unit._replace(parents=parents) for unit in of)
            for of in (group.units, group.recomputed)
        )
        groups[place] = replace(group, units=units, recomputed=recomputed)
    return groups


def run_again(name: str, groups: Sequence[GroupWork], input_bytes: int) -> GroupWork:
    """Return groups that keep their input alone, and are recomputed as a whole in backward."""
    forward_us = sum(group.forward_us for group in groups)
    saved_bytes = sum(group.saved_bytes for group in groups)
    return GroupWork(
        name,
        0,
        forward_us,
        forward_us + sum(group.backward_us for group in groups),
        kept_bytes=input_bytes,
        # What its groups save goes as soon as the next has taken it, or with the whole.
        forward_temp_bytes=max(group.saved_bytes + group.forward_temp_bytes for group in groups),
        backward_temp_bytes=max(group.backward_temp_bytes for group in groups),
        backward_block_bytes=saved_bytes + max(group.backward_block_bytes for group in groups),
        is_marked=False,
        recomputed=(UnitWork(name, saved_bytes - input_bytes, forward_us),),
        layer=groups[0].layer,
    )

"""Bytes, FLOP and microseconds of a described layer on one GPU.

The formulas, with their sources and what they were measured against, are in docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import GroupWork, UnitWork
from megatron_offload.planning.model import VALUE_BYTES, ModelDescription

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
_EAGER_NORM = 18, 35  # of the input, forward and backward: by reading the source, not measured
_WIDE = 4 // VALUE_BYTES  # what values in fp32 take more
_SORTED_GRADIENT = 30  # of a microbatch's embeddings, to add up their gradients


_Pass: TypeAlias = tuple[float, int]
"""Of a group's forward, or backward: its microseconds, and bytes that are there for a while."""


class LayerCosts:
    """Sizes and times of one GPU, from a description."""

    def __init__(self, model: ModelDescription, machine: Machine | None = None) -> None:
        if model.eager_kernels:
            model = model.model_copy(update={"fused_norm": False, "fused_kernels": False})
        self.model = model
        self.tokens = model.sequence * model.microbatch // model.context_parallel
        self.token_bytes = self.tokens * VALUE_BYTES // model.tensor_parallel
        self.hidden_bytes = model.hidden * self.token_bytes
        # A norm saves a number of each token, in fp32.
        self._norm_bytes = 4 * self.tokens // model.tensor_parallel
        # What sequence parallelism gathers from the other GPUs in front of a linear layer.
        num_gathered = model.tensor_parallel if model.tensor_parallel > 1 else 0
        self.gathered_bytes = self.hidden_bytes * num_gathered
        self._machine = machine or Machine()
        self._product_us = 0.0
        self._slowness = 1.0
        groups = self._layer(model.layers - 1)
        all_us = sum(group.forward_us + group.backward_us for group in groups)
        self._slowness = max(_LEAST_TIME, 1 - _SPARED_SHARE * (all_us / self._product_us - 1))

    def _gradient_bytes(self, inputs: int, outputs: int, experts: int | None = None) -> int:
        """Return what a weight's gradient takes: its part of one, or those of whole experts."""
        num_views = self.model.tensor_parallel if experts is None else 1
        num_bytes = inputs * outputs * VALUE_BYTES * (experts or 1) // num_views
        return 0 if self.model.fused_gradients or self.model.lora_rank else num_bytes

    def _product(self, flop: float) -> float:
        model = self.model
        us = flop / (model.tensor_parallel * model.peak_tflops * model.achieved_share * 1e6)
        self._product_us += us
        return self._slowness * us

    def _traffic(self, num_bytes: float) -> float:
        return num_bytes / (self.model.memory_gbps * _MEMORY_SHARE * 1e3)

    def _group(
        self, name: str, saved: Sequence[int], forward: _Pass, backward: _Pass, **more: Any
    ) -> GroupWork:
        """Return a group, from the bytes of each tensor that it saves."""
        moving_bytes = sum(each for each in saved if each >= self.model.min_tensor_bytes)
        kept_bytes = sum(saved) - moving_bytes + more.pop("kept_bytes", 0)
        us, temp_bytes = (forward[0], backward[0]), (forward[1], backward[1])
        return GroupWork(name, moving_bytes, *us, kept_bytes, *temp_bytes, **more)

    def _linear(
        self,
        name: str,
        *products: tuple[int, int],
        saved: Sequence[int] = (),
        norm_bytes: int = 0,
        residual_bytes: int = 0,
        gathered_bytes: int = 0,
        experts: int | None = None,
        num_layers: int = 1,
        **more: Any,
    ) -> GroupWork:
        """Return the group of a linear layer, or of some, each by its inputs and outputs.

        ``norm_bytes`` is of the input of a norm that is part of it, ``residual_bytes`` of what is
        added to its output, ``gathered_bytes`` of the input of all GPUs together. A GPU has so many
        ``experts``, whole ones, and each token comes in a copy for each of its own. Each of
        ``num_layers`` may have an adapter; those of peft, in fp32, have a copy of its input.
        """
        copies = 1 if experts is None else self.model.experts_per_token
        flop = 2.0 * copies * self.tokens * sum(inputs * outputs for inputs, outputs in products)
        least_us = _PRODUCT_US * (experts or 1) * len(products)
        is_trained = self.model.lora_rank == 0
        is_adapted = num_layers > 0 and not is_trained
        times = (least_us + self._product(flop) for _ in range(2 + is_trained))
        product_us, again_us, *weight_us = times
        gradients = [self._gradient_bytes(*product, experts) for product in products]
        gradient_bytes = max(gradients)
        weights_us = sum(weight_us) + self._traffic(3 * sum(gradients))
        token_bytes = copies * self.token_bytes
        inputs, outputs = products[0][0], products[-1][1]
        if self.model.eager_kernels and not is_trained:
            read = [_WIDE * one[0] * token_bytes for one in products]
            saved, more["units"] = [*read * num_layers, *saved[1:]], ()
        temp_bytes = outputs * token_bytes + gathered_bytes
        if self.model.eager_kernels and is_adapted:
            # What an adapter adds, before and behind its scale, in fp32.
            temp_bytes += 2 * _WIDE * outputs * token_bytes // num_layers
        # An adapter reads what its layer reads, and adds to what that has written.
        adapters = 2 * token_bytes * sum(map(sum, products)) * is_adapted
        moved_bytes = adapters + 2 * norm_bytes + 3 * residual_bytes
        forward_us = product_us + self._traffic(moved_bytes)
        forward = forward_us, temp_bytes
        temp_bytes += gradient_bytes + inputs * token_bytes
        # A norm's gradient is added to that of the residual.
        backward_us = again_us + weights_us + self._traffic(2 * adapters + 6 * norm_bytes)
        return self._group(name, saved, forward, (backward_us, temp_bytes), **more)

    def _behind(self, norm: str) -> dict[str, Any]:
        """Return what a linear layer has of the norm in front of it, and of other GPUs' tokens."""
        hidden, is_fused = self.hidden_bytes, self.model.fused_norm
        return {
            "saved": (hidden,) + (hidden, self._norm_bytes) * is_fused,
            "norm_bytes": hidden * is_fused,
            "gathered_bytes": self.gathered_bytes,
            "units": self._units("norm", hidden, self._traffic(2 * hidden), norm),
        }

    def _units(self, name: str, num_bytes: int, us: float, parent: str) -> tuple[UnitWork, ...]:
        is_large = num_bytes >= self.model.min_tensor_bytes
        return (UnitWork(name, num_bytes, us, (parent,)),) if is_large else ()

    def _norm(self, name: str) -> GroupWork:
        """Return a norm's group, where it is one of its own."""
        size = self.hidden_bytes
        forward, backward = _EAGER_NORM if self.model.eager_kernels else (2, 6)
        passes = (self._traffic(forward * size), size), (self._traffic(backward * size), 2 * size)
        return self._group(name, [*self._normed(size), self._norm_bytes], *passes)

    def _normed(self, num_bytes: int) -> list[int]:
        """Return what a norm saves of its input, of such a size."""
        if not self.model.eager_kernels:
            return [num_bytes]
        return [_WIDE * num_bytes, *([] if self.model.lora_rank else [num_bytes])]

    def _attention(self, index: int) -> GroupWork:
        model, seen = self.model, self.model.seen_tokens(index)
        widths = model.attention[:4]
        query, key, value, attended = (width * self.token_bytes for width in widths)
        work = (1 + _ATTENTION_TOKENS / seen) / _ATTENTION_SHARE
        flop = work * self.tokens * seen * (widths[0] + widths[3])
        rows_bytes = 4 * self.tokens * model.heads // model.tensor_parallel
        num_scores = self.tokens * model.sequence * model.heads // model.tensor_parallel
        rotated = (2 if model.fused_kernels else _ROTATION) if model.rotary else 0
        rotation_bytes, qkv_bytes = rotated * (query + key), query + key + value
        # Values are copied, slowly; gradients are put side by side.
        forward_us = self._product(flop) + self._traffic(rotation_bytes + 5 * value)
        backward_us = self._product(2.5 * flop) + self._traffic(rotation_bytes + 2 * qkv_bytes)
        passes = (forward_us, qkv_bytes), (backward_us, 2 * qkv_bytes + attended)
        saved, kept_bytes = [query, key, value, rows_bytes], 0
        if model.rotary and not (model.fused_kernels or model.eager_kernels):
            # Sines and cosines of all positions, for queries and for keys.
            width = model.qk_pos_emb_head_dim if model.kv_lora_rank else widths[0] // model.heads
            kept_bytes = 4 * width * VALUE_BYTES * self.tokens // model.microbatch
        if "attn_proj" in model.modules:
            saved.append(attended)
        else:  # its projection, which is no group, holds it
            kept_bytes += attended
        block_bytes = model.deterministic * num_scores * VALUE_BYTES
        more: dict[str, Any] = {"backward_block_bytes": block_bytes, "kept_bytes": kept_bytes}
        return self._group("core_attn", saved, *passes, **more)

    def _sent(self, group: GroupWork) -> GroupWork:
        """Return a group with the messages of Megatron that its passes wait for.

        Tensor parallelism gathers tokens in front of a block and scatters sums behind it. Keys and
        values go round (``cp_comm_type`` p2p). A copy of a token goes to each of its experts, and
        back (``moe_token_dispatcher_type`` alltoall).
        """
        model, machine, forward_us = self.model, self._machine, group.forward_us
        backward_us, name = group.backward_us, group.name.removeprefix("shared ")
        if name == "core_attn":  # behind its products; backward sends gradients too
            num_bytes = (model.attention.key + model.attention.value) * self.token_bytes
            us = machine.ring_us(model.context_parallel, model.tensor_parallel, num_bytes)
            forward_us, backward_us = max(forward_us, us), max(backward_us, 2 * us)
        elif name == "router":
            routed_bytes = model.experts_per_token * self.hidden_bytes
            us = 2 * machine.all_to_all_us(model.expert_parallel, routed_bytes)
            forward_us, backward_us = forward_us + us, backward_us + us
        elif name in ("qkv_linear", "mlp_fc1", "head", "attn_proj", "mlp_fc2", "embedding"):
            us = machine.ring_us(model.tensor_parallel, 1, self.hidden_bytes)
            forward_us += us
            if name in ("attn_proj", "mlp_fc2", "embedding"):
                backward_us += us
            else:  # what is gathered again, and gradients that are scattered, behind its products
                backward_us = max(backward_us, 2 * us)
        return replace(group, forward_us=forward_us, backward_us=backward_us)

    def layer(self, index: int) -> list[GroupWork]:
        """Return the groups of the layer at this place of the model."""
        model = self.model
        groups = [replace(self._sent(group), layer=index) for group in self._layer(index)]
        if model.recompute == "full":
            return [run_again("layer", groups, self.hidden_bytes)]
        for place, group in enumerate(groups):
            is_marked = group.is_marked and group.name in model.modules
            groups[place] = replace(group, is_marked=is_marked).with_recompute(model.recompute)
        return groups

    def _layer(self, index: int) -> list[GroupWork]:
        model, attention, behind = self.model, self.model.attention, self._behind("attn_norm")
        for width in attention.projected:
            behind["saved"] += tuple(self._normed(width * self.token_bytes))
        behind["saved"] += (sum(number for number, _ in attention.norms) * self._norm_bytes,)
        behind["norm_bytes"] += sum(map(prod, attention.norms)) * self.token_bytes
        output, residual_bytes = (attention.attended, model.hidden), self.hidden_bytes
        groups = [] if model.fused_norm else [self._norm("attn_norm")]
        num_layers = 3 if len(attention.products) == 1 else 1
        groups += [
            self._linear("qkv_linear", *attention.products, num_layers=num_layers, **behind),
            self._attention(index),
            self._linear("attn_proj", output, residual_bytes=residual_bytes),
        ]
        if model.has_experts(index) or not model.fused_norm:
            groups.append(self._norm("mlp_norm"))
        if not model.has_experts(index):
            return groups + self._mlp(model.ffn, **self._behind("mlp_norm"))
        groups.append(self._router())
        for group in self._mlp(model.shared_expert_ffn) if model.shared_expert_ffn else ():
            name = f"shared {group.name}"
            groups.append(replace(group, name=name, units=(), is_marked=False))
        experts, ffn = model.experts // model.expert_parallel, model.expert_ffn or model.ffn
        saved = (model.experts_per_token * self.hidden_bytes,)
        return groups + self._mlp(ffn, saved=saved, experts=experts)

    def _mlp(self, ffn: int, **before: Any) -> list[GroupWork]:
        """Return an MLP, or that of ``experts``, from what its first linear layer has besides."""
        model, hidden, experts = self.model, self.model.hidden, before.get("experts")
        name, act_name, copies, kept_bytes = "mlp", "mlp_act", 1, 0
        behind: dict[str, Any] = {"residual_bytes": self.hidden_bytes}
        if experts is not None:
            name, act_name, copies = "expert", "moe_act", model.experts_per_token
            behind = {"experts": experts}
            kept_bytes = self.tokens // model.tensor_parallel * copies * VALUE_BYTES
        width = ffn * (2 if model.gated_mlp else 1)
        input_bytes, output_bytes = (copies * each * self.token_bytes for each in (width, ffn))
        moved = (
            _ACTIVATION * (input_bytes + output_bytes),
            _ACTIVATION * (2 * input_bytes + output_bytes),
        )
        saved, wide_bytes = [input_bytes], 0
        if model.gated_mlp and not model.fused_kernels:
            # Both halves that are multiplied, one of them from the activation, are new tensors.
            saved += [output_bytes, output_bytes]
            if model.eager_kernels:  # of two linear layers, so that the one half is none
                saved = [output_bytes] * 3
            moved = _GATE_FORWARD * output_bytes, _GATE_BACKWARD * output_bytes
        if experts is not None and not model.fused_kernels:
            # So is what is multiplied by tokens' probabilities, in fp32.
            saved.append(output_bytes)
            wide_bytes = _WIDE * output_bytes
        forward = self._traffic(moved[0]), output_bytes + wide_bytes
        backward = self._traffic(moved[1]), input_bytes + output_bytes + 2 * wide_bytes
        act = self._group(act_name, saved, forward, backward, kept_bytes=kept_bytes)
        units = self._units(act_name, output_bytes, act.forward_us, act_name)
        return [
            self._linear(f"{name}_fc1", (hidden, width), num_layers=width // ffn, **before),
            act,
            self._linear(f"{name}_fc2", (ffn, hidden), saved=[output_bytes], units=units, **behind),
        ]

    def _router(self) -> GroupWork:
        """Return what sends tokens to experts, which no group marks."""
        model, hidden = self.model, self.hidden_bytes
        routed = model.experts_per_token * hidden
        num_tokens = self.tokens // model.tensor_parallel
        # Its input; the indices, in int64, with probabilities, in fp32, and their order; a map.
        token_bytes = model.experts_per_token * (8 + 4 + 8)
        token_bytes += model.experts * (1 + VALUE_BYTES)
        more: dict[str, Any] = {
            "residual_bytes": hidden,
            "kept_bytes": hidden + num_tokens * token_bytes,
        }
        product = model.hidden, model.experts
        router = self._linear("router", product, num_layers=0, is_marked=False, **more)
        # Each way tokens are copied for their experts, and what experts made is added up.
        moved_us = self._traffic(2 * (hidden + routed))
        return replace(
            router,
            forward_us=router.forward_us + moved_us,
            backward_us=router.backward_us + moved_us,
            forward_temp_bytes=routed,
            backward_temp_bytes=2 * routed,
        )

    def further_tokens(self) -> list[GroupWork]:
        """Return the layers of multi-token prediction with their losses, all of it kept."""
        model, hidden = self.model, self.hidden_bytes
        # Two norms save what they are given, and the linear layer both outputs side by side.
        both: dict[str, Any] = {"saved": (hidden,) * 4, "norm_bytes": 2 * hidden}
        entry = self._linear("mtp", (2 * model.hidden, model.hidden), **both)
        own = [entry, *self.layer(model.layers - 1), *self.loss()]
        return model.mtp_num_layers * [
            replace(x, units=(), is_marked=False, layer=None) for x in own
        ]

    def embedding(self) -> GroupWork:
        """Return what the first stage does before its layers."""
        hidden = self.hidden_bytes
        gradient_bytes = self._gradient_bytes(self.model.vocabulary, self.model.hidden)
        moved_bytes = 0 if self.model.lora_rank else _SORTED_GRADIENT * hidden + 4 * gradient_bytes
        backward_us = self._traffic(moved_bytes)
        passes = (self._traffic(4 * hidden), 0), (backward_us, gradient_bytes + hidden)
        return self._sent(self._group("embedding", (), *passes, is_marked=False))

    def loss(self) -> list[GroupWork]:
        """Return the last norm, the head, and the cross entropy in fp32."""
        model, hidden = self.model, self.hidden_bytes
        logits = 4 * self.tokens * model.vocabulary // model.tensor_parallel
        before: dict[str, Any] = {"norm_bytes": hidden, "gathered_bytes": self.gathered_bytes}
        # The logits before they were widened; the exponential is taken in place. Eager, there are
        # gradients in fp32 of the logarithms of what is likely, and of the logits.
        temp_bytes, is_eager = logits // _WIDE, model.eager_kernels
        moved = (3, 2) if model.fused_kernels else (_LOSS_FORWARD, _LOSS_BACKWARD)
        forward_us, backward_us = (self._traffic(each * logits) for each in moved)
        passes = (forward_us, temp_bytes), (backward_us, temp_bytes * (not is_eager))
        apart: dict[str, Any] = {"is_marked": False, "is_apart": is_eager}
        before |= {"saved": (hidden, *self._normed(hidden)), "num_layers": 0} | apart
        more = {"kept_bytes": logits, "backward_block_bytes": 2 * logits * is_eager} | apart
        return [
            self._sent(self._linear("head", (model.hidden, model.vocabulary), **before)),
            self._group("loss", (), *passes, **more),
        ]


def run_again(name: str, groups: Sequence[GroupWork], input_bytes: int) -> GroupWork:
    """Return groups that keep their input alone, and are recomputed as a whole in backward."""
    forward_us = sum(group.forward_us for group in groups)
    saved_bytes = sum(group.saved_bytes for group in groups)
    temp_bytes = max(group.backward_temp_bytes for group in groups)
    # Each group's backward runs beside what those before it have saved.
    peaks, held_bytes = [], 0
    for group in groups:
        held_bytes += group.saved_bytes
        peaks.append(held_bytes + group.backward_temp_bytes + group.backward_block_bytes)
    return GroupWork(
        name,
        0,
        forward_us,
        forward_us + sum(group.backward_us for group in groups),
        kept_bytes=input_bytes,
        # What its groups save goes as soon as the next has taken it, or with the whole.
        forward_temp_bytes=max(group.saved_bytes + group.forward_temp_bytes for group in groups),
        backward_temp_bytes=temp_bytes,
        backward_block_bytes=max(peaks) - temp_bytes,
        is_marked=False,
        recomputed=(UnitWork(name, saved_bytes - input_bytes, forward_us),),
        layer=groups[0].layer,
    )

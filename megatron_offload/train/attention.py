"""Core attention through PyTorch's scaled dot product, for GPUs without TransformerEngine.

Owns one module that takes the place of megatron-core's unfused core attention, which saves the
whole matrix of scores. Must not know anything else of the trainer.

Invariant: causal self-attention over whole sequences, nothing else; other uses raise.
Read next: `megatron_offload.train.model`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_offload.errors import UnsupportedCallError

__all__ = ["ScaledDotProductAttention"]


class ScaledDotProductAttention(torch.nn.Module):
    """Causal attention; saves queries, keys, values, the output and one number for each row.

    Args:
        config: gives the dropout's probability.
        attention_dropout: overrides that probability.
        softmax_scale: factor of the scores; None is one over the root of a head's width.
        _: what megatron-core's builders give besides, such as the layer's number.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.dropout = float(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: shape [sequence, batch, heads, width of a head].
            key: the same with as many heads as there are query groups.
            value: like ``key``.
            attention_mask: must be None: the mask is causal.
            packed_seq_params: must be None.

        Returns:
            Shape [sequence, batch, heads * width of a head].

        Raises:
            UnsupportedCallError: a mask or packed sequences are given.
        """
        if attention_mask is not None or packed_seq_params is not None:
            raise UnsupportedCallError(
                "this core attention is causal over whole sequences; set model.layer_spec: "
                "transformer_engine for masks and packed sequences"
            )
        probability = self.dropout if self.training else 0.0
        dropping = get_cuda_rng_tracker().fork() if probability else contextlib.nullcontext()
        queries, keys, values = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with dropping:
            output = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                dropout_p=probability,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=key.shape[2] != query.shape[2],
            )
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

"""What stands for TransformerEngine's modules and CUDA's streams in Megatron's layers on a CPU."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import torch


class GroupedLinear(torch.nn.Module):
    """Stands for TransformerEngine's: one weight for each expert."""

    save_original_input = False

    def __init__(self, num_gemms, input_size, output_size, *, init_method, **_):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.empty(output_size, input_size) for _ in range(num_gemms)
        )
        for weight in self.weights:
            init_method(weight)

    def forward(self, tokens, tokens_per_expert):
        parts = torch.split(tokens, list(tokens_per_expert))
        pairs = zip(parts, self.weights, strict=True)
        return torch.cat([part @ weight.t() for part, weight in pairs]), None


class LatentAttention(torch.nn.Module):
    """Stands for TransformerEngine's: values are narrower than keys."""

    def __init__(self, config, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **_):
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        scores = scores.masked_fill(attention_mask, -1e4).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", scores, value).flatten(2)


@contextlib.contextmanager
def overlapping():
    """Let Megatron overlap all-to-alls without CUDA, on a rank that is alone."""
    from megatron.core.pipeline_parallel import utils
    from megatron.core.transformer.moe import token_dispatcher

    names = dict.fromkeys(("Stream", "Event", "current_stream", "stream", "nvtx"), mock.DEFAULT)
    utils.set_streams(mock.MagicMock(), mock.MagicMock())
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **names))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        all_to_all = stack.enter_context(mock.patch.object(token_dispatcher, "all_to_all"))
        all_to_all.side_effect = lambda group, tensor, *_, **__: tensor.clone()
        yield


class TransformerLayer(torch.nn.Module):
    """Marks the group of its core, and has an MLP without parts."""

    __module__ = "megatron.core"

    def __init__(self, number):
        super().__init__()
        self.layer_number, self.offload_core_attention = number, True
        self.core_attention, self.mlp = torch.nn.Identity(), torch.nn.ModuleDict()


def configured(*modules, **settings):
    """Return a model with a configuration."""
    model = torch.nn.Sequential(*modules)
    settings = {"num_layers": 4, "offload_modules": ["core_attn"], **settings}
    none = dict.fromkeys(("recompute_granularity", "recompute_method"))
    model.config = types.SimpleNamespace(**none | settings)
    return model

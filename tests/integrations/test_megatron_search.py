"""What names in ``offload_modules`` let a Megatron job's own rows offload."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from megatron_offload.integrations.megatron_search import _is_named

ATTENTION, MLP = "0.decoder.layers.3.self_attention", "0.decoder.layers.3.mlp"


@pytest.mark.parametrize(
    ("names", "site", "path", "expected"),
    [
        (["core_attn"], "attention", ATTENTION, True),
        (["core_attn"], "mlp", MLP, False),
        (["core_attn"], "layer", "0.decoder.layers.3", False),
        (["core_attn", "expert_fc1"], "layer", "0.decoder.layers.3", True),
        (["layer"], "mlp", MLP, True),
        (["**.mlp"], "mlp", MLP, True),
        (["decoder.layers.0-2.mlp"], "mlp", MLP, False),
        (["decoder.layers.*.mlp.linear_fc1"], "mlp", MLP, False),
        (["expert_fc1"], "mlp.experts", f"{MLP}.experts", True),
        (["core_attn"], "mlp.experts", f"{MLP}.experts", False),
        (["layer_input"], "attention", ATTENTION, False),
    ],
)
def test_a_site_is_offloaded_where_a_name_lies_in_it(names, site, path, expected):
    assert _is_named(names, site, path) is expected

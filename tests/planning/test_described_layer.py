"""What a layer of each shipped family saves, against megatron-core's own layer on a CPU."""

from __future__ import annotations

import layer_bytes
import pytest
from processes import found_by, run_python

from megatron_offload.planning.model_cost import LayerCosts

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def saved():
    # Dynamo would compile Megatron's fused functions, whose saved tensors are the same.
    return found_by(run_python(layer_bytes.__file__, TORCHDYNAMO_DISABLE="1"))


@pytest.mark.parametrize("name", layer_bytes.FAMILIES)
def test_a_layer_saves_what_megatron_s_own_does(saved, name):
    groups = LayerCosts(layer_bytes.small(name)).layer(0)
    mine = {group.name: group.saved_bytes for group in groups if group.saved_bytes}
    original = {group: num_bytes for group, num_bytes in saved[name].items() if group}
    if "shared mlp_fc1" in original:  # it comes first there, and has the same input as the router
        original["router"] += original.pop("shared mlp_fc1")
    assert original.keys() == mine.keys()
    for group, num_bytes in mine.items():
        assert num_bytes == pytest.approx(original[group], rel=0.01), group

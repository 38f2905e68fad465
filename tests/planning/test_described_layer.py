"""What a described layer saves, against megatron-core's own layer on a CPU."""

from __future__ import annotations

import layer_bytes
import pytest
from processes import found_by, run_python

from megatron_offload.files.strict_model import validate
from megatron_offload.planning.model import ModelDescription
from megatron_offload.planning.model_cost import LayerCosts

pytest.importorskip("megatron.core")

SIZES = {
    "layers": 1,
    "hidden": layer_bytes.HIDDEN,
    "ffn": layer_bytes.FFN,
    "heads": layer_bytes.HEADS,
    "vocabulary": 128,
    "sequence": layer_bytes.SEQUENCE,
    "microbatch": layer_bytes.MICROBATCH,
    "num_microbatches": 1,
    "fused_norm": False,
    "min_tensor_bytes": 0,
    "peak_tflops": 989.0,
    "memory_gbps": 4800.0,
}
GATED = {"gated_mlp": True, "fused_kernels": True}
QUERIES = {"kv_channels": 256, "kv_heads": 2, "qk_layernorm": True}
EXPERTS = {
    "experts": layer_bytes.EXPERTS,
    "experts_per_token": layer_bytes.CHOSEN,
    "expert_ffn": layer_bytes.EXPERT_FFN,
}


@pytest.fixture(scope="module")
def saved():
    # Dynamo would compile Megatron's fused functions, whose saved tensors are the same.
    return found_by(run_python(layer_bytes.__file__, TORCHDYNAMO_DISABLE="1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "described"),
    [
        ("dense", {}),
        ("gated", GATED),
        ("experts", GATED | EXPERTS),
        ("queries", GATED | QUERIES),
        ("latent", GATED | layer_bytes.LATENT),
    ],
)
def test_a_layer_saves_what_megatron_s_own_does(saved, case, described):
    model = validate(ModelDescription, SIZES | described, "model")
    groups = {group.name: group for group in LayerCosts(model).layer(0)}
    mine = {name: group.num_bytes + group.kept_bytes for name, group in groups.items()}
    # Core attention is flash attention's, which no CPU has; the projection saves its output.
    for name in ("core_attn", "attn_proj"):
        del mine[name]
    original = {name: num_bytes for name, num_bytes in saved[case].items() if name in mine}
    assert original.keys() == mine.keys()
    if case == "queries":
        # torch's norm of keys keeps the whole projection, of which it is given a part;
        # TransformerEngine's copies that part.
        width = model.attention.query + model.attention.value
        original["qkv_linear"] -= 2 * width * layer_bytes.SEQUENCE * layer_bytes.MICROBATCH
    for name, num_bytes in mine.items():
        # A norm's mean and deviation, in fp32, are left out.
        assert num_bytes == pytest.approx(original[name], rel=0.02), name

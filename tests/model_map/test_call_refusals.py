"""Which layers and parts run again: by libraries, by what a user names, and by collectives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_offload.model_map import sites
from megatron_offload.model_map.sites import sites_of_layers

PLAIN = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "num_moe_experts": None}
ALL = {"self_attention", "mlp", "mlp.experts", "layer"}


class Part(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.experts = nn.Linear(1, 1)


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.self_attention = Part(), nn.Linear(1, 1)

    def forward(self, x):
        return x


class OtherLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(1, 1)

    def forward(self, x):
        return x


@pytest.fixture
def own_classes(monkeypatch):
    monkeypatch.setattr(sites, "LIBRARIES", (*sites.LIBRARIES, f"{__name__}."))


def may_rerun(model, named=None):
    found = sites_of_layers(model, named)
    return {path.partition(".")[2] or "layer" for path, x in found.items() if not x.refusal}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, ALL),
        ({"tensor_model_parallel_size": 2}, set()),
        ({"context_parallel_size": 2}, {"mlp", "mlp.experts"}),
        ({"expert_model_parallel_size": 2}, ALL),
        (
            {"expert_model_parallel_size": 2, "num_moe_experts": 4},
            {"self_attention", "mlp.experts"},
        ),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {"mlp.experts"}),
    ],
)
@pytest.mark.usefixtures("own_classes")
def test_nothing_is_recomputed_unasked_that_holds_collectives(sizes, expected):
    config = SimpleNamespace(**PLAIN | {"expert_model_parallel_size": 1} | sizes)
    for owner in (0, 1):
        model = nn.Sequential(TransformerLayer())
        [model, model[0]][owner].config = config
        assert may_rerun(model) == expected
        assert may_rerun(model, ["mlp"]) == expected & {"mlp", "mlp.experts"}


def test_why_a_site_is_not_recomputed_unasked():
    model = nn.Sequential(TransformerLayer())
    assert may_rerun(model) == {"self_attention", "mlp.experts"}
    assert sites_of_layers(model)["0.mlp"].refusal == f"Part is a class of {__name__}"
    model[0].mlp = nn.Sequential(nn.Linear(1, 1))
    model[0].mlp.compile()
    model[0].self_attention = torch.compile(nn.Linear(1, 1))
    found = sites_of_layers(model)
    assert found.keys() == {"0", "0.self_attention"}
    assert found["0.self_attention"].refusal == "it is compiled"
    model = nn.Sequential(OtherLayer(), OtherLayer())
    refusal = "no library lets class OtherLayer run again"
    assert {x.refusal for x in sites_of_layers(model).values()} == {refusal}
    assert {x.refusal for x in sites_of_layers(model, ["mlp"]).values()} == {
        "",
        "'recompute' names other sites",
    }


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("layernorm", {"layer"}),
        ("mla_up_proj", {"layer", "self_attention"}),
        ("moe_act", {"layer", "mlp", "mlp.experts"}),
        ("core_attn", set()),
    ],
)
@pytest.mark.usefixtures("own_classes")
def test_what_megatron_recomputes_inside_is_not_recomputed_unasked(name, around):
    model = nn.Sequential(TransformerLayer())
    model.config = SimpleNamespace(recompute_granularity="selective", recompute_modules=[name])
    assert may_rerun(model) == ALL - around
    model.config.recompute_granularity = None
    assert may_rerun(model) == ALL

"""Rows that can't be are refused at once, and those that do nothing are said.

And which layers and parts run again: by libraries, by what a user names, and by collectives.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from programs import assert_same, make_manager, take_steps
from small_net import WIDTH, Block, around, changed_net, make_net
from torch import nn

from megatron_offload import (
    CPUOffload,
    OffloadActivations,
    OffloadConfig,
    get_act_offloading_ctx_manager,
    offload_modules,
)
from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import ConfigError
from megatron_offload.model_map import sites
from megatron_offload.model_map.sites import sites_of_layers
from megatron_offload.model_map.structure import layers_of


def test_rows_whose_sites_a_forward_does_not_come_by_are_not_silent(caplog):
    net, tokens = make_net(), torch.arange(40)[None]
    context = around(net, [{"site": "mlp", "offload": "all"}])
    with torch.no_grad(), context:
        make_net()(tokens)
    with context:
        net(tokens).sum().backward()
    for other in (torch.nn.Identity(), make_net()) * 3:
        with context:
            other(tokens)
    assert "none of those sites" not in caplog.text
    context = around(net, [{"site": "mlp", "offload": "all"}])
    for _ in range(5):
        with context:
            make_net()(tokens).sum().backward()
    assert caplog.text.count("none of those sites was called") == 1


@pytest.mark.parametrize(
    "settings", [{"rows": [{"site": "mlp", "recompute": True}]}, {"rows": None, "recompute": "mlp"}]
)
def test_what_is_recomputed_inside_a_compiled_graph_is_not_silent(settings, caplog):
    net, tokens = make_net(num_layers=2), torch.arange(40)[None]
    context, compiled = around(net, **settings), torch.compile(net, backend="eager")
    for _ in range(5):
        with context:
            compiled(tokens).sum().backward()
    assert caplog.text.count("none of those sites was called") == 1


def test_a_forward_that_comes_by_no_site_does_not_show_who_saves_what_rows_recompute():
    net = make_net()
    context = around(net, [{"site": "norm", "recompute": True}])
    with context:  # as where an auxiliary model comes first
        loss = nn.Linear(WIDTH, 4)(torch.randn(4, WIDTH)).sum()
    loss.backward()
    take_steps(net, context)
    context.end_step()
    assert context.last_step.by_name["norm"].recomputed_bytes > 0


def test_a_row_that_would_hold_an_input_in_place_of_an_output_says_so(caplog):
    net = make_net()
    context = around(net, [{"site": "mlp.drop", "recompute": True}])
    take_steps(net, context)
    assert "'mlp.drop' returns is kept: it doesn't save what it takes" in caplog.text
    context.end_step()
    assert context.last_step.by_name["mlp.drop"].recomputed_bytes == 0


def test_a_module_without_parts_is_no_site_to_recompute_as_a_whole():
    net = make_net()
    for layer in net.layers:
        layer.mlp = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp has no parts.*such as 'layer'"):
        around(net, [{"site": "mlp", "recompute": True}])


def test_a_part_of_a_kind_s_name_that_is_never_called_says_what_to_name():
    net = make_net()
    for layer in net.layers:
        layer.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH)})
    with pytest.raises(ConfigError, match=r"'mlp' has no forward of its own; 'mlp\.\*' names what"):
        around(net, [{"site": "mlp", "offload": "all"}])


@pytest.mark.parametrize(
    ("site", "around_it"), [("mlp.*", "mlp"), ("mlp.down", "mlp"), ("k", "layer")]
)
def test_outputs_that_nothing_else_saves_are_no_site_to_recompute(site, around_it):
    net = make_net()
    for layer in net.layers:
        layer.forward = lambda x, layer=layer: x + layer.k(x) + layer.mlp(x)
    with pytest.raises(ConfigError, match=f"recomputed as well.*around it: '{around_it}'"):
        take_steps(net, around(net, [{"site": site, "recompute": True}]))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            [{"site": "norm", "recompute": True}],
            r"nothing saves what layers\.0\.norm returns but",
        ),
        (
            [{"site": "mlp_act", "recompute": True}],
            r"nothing saves what layers\.0\.mlp\.act returns",
        ),
        ([{"layers": 1, "site": "drop", "offload": 2}], "nothing is saved inside that could be"),
        ([{"site": "mlp.down", "offload": "all"}], "nothing is saved inside that could be"),
        ([{"site": "drop", "recompute": True}], "nothing is saved inside, but by what"),
        ([{"site": "drop.0", "recompute": True}], "nothing is saved inside, but by what"),
        ([{"site": "norm", "offload": "all"}], ""),
    ],
)
def test_a_row_that_does_nothing_beside_one_that_works_is_said_once(rows, why, caplog):
    def change(layer):
        layer.drop = nn.Sequential(nn.Identity())
        layer.forward = lambda x: x + layer.q(x).sin() + layer.drop(layer.norm(layer.mlp(x)))

    expected, net = take_steps(changed_net(change)), changed_net(change)
    for _ in range(2):
        context = around(net, [{"site": "mlp", "recompute": True}, *rows])
        assert_same(expected, take_steps(net, context))
    said = [x for x in caplog.messages if "does nothing" in x]
    assert len(said) == bool(why)
    assert not why or re.search(rf"^row .*{rows[0]['site']}.* does nothing: .*{why}", said[0])


def test_a_kind_that_is_a_part_s_name_as_well_is_refused():
    def change(layer):
        layer.k = nn.LayerNorm(WIDTH)

    net = changed_net(change)
    recomputed = {"site": "norm", "recompute": True}
    around(net, [recomputed])  # the part is of that kind
    assert around(net, [recomputed]).manager.may_recompute("norm")
    for layer in net.layers:
        layer.norm = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(
        ConfigError, match=r"the kind of layers\.0\.k and the name of layers\.0\.nor"
    ):
        around(net, [recomputed])
    around(net, [{"site": "**.norm", "recompute": True}])


def test_what_others_save_too_is_refused():
    net = make_net()
    rows = [{"site": "q", "offload": "all"}]
    also = r"layers\.0\.k also save 2\.0 KiB of what layers\.0\.q would offload, which would not"
    with pytest.raises(ConfigError, match=also):
        take_steps(net, around(net, rows))
    take_steps(net, around(net, [*rows, {"site": "k", "offload": "all"}]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"site": "mlp.atc", "recompute": True}, "no layer has a site 'mlp.atc'; did you mean"),
        ({"site": "mlp", "layers": "2-9", "offload": 1}, "there are layers 0 to 3"),
        ({"site": "mlp", "layers": "3-1", "offload": 1}, "first of some layers comes before"),
        ({"site": "mlp", "offload": 0}, "'rows.0.offload': offload is 'all', or how many"),
        ({"site": "mlp", "offload": "al"}, "offload is 'all', or how many"),
        ({"site": "loss", "layers": 1, "by_rows": True}, "that takes nothing else"),
        ({"site": "mlp", "layers": "4-x", "offload": 1}, "layers are 'all', a number"),
        ({"site": "mlp"}, "needs one action"),
        ({"site": "mlp", "offload": 1, "recompute": True}, "needs one action"),
        ({"site": "loss", "offload": 1}, "by_rows: true is for site: loss"),
        ({"site": "mlp", "ofload": 1}, "did you mean 'offload'"),
        ({"site": "attention", "offload": 1}, "no layer has a site 'attention'"),
        ({"site": "norm", "recompute": True, "min_tokens": 9}, "min_tokens is for modules of"),
        ({"site": "mlp", "offload": 1, "min_tokens": -1}, "greater than or equal to 0"),
    ],
    ids=lambda value: "",
)
def test_rows_that_cannot_be_are_refused_at_once(row, said):
    with pytest.raises(ConfigError, match=said):
        around(make_net(), [row])


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ("[{site: norm, recompute: true}, {site: mlp, ofload: 1}]", "'rows.1.ofload'"),
        (["{site: mlp, ofload: 1}"], "'rows.0.ofload'"),
        ({"site": "mlp", "ofload": 1}, "'rows.ofload'"),
    ],
)
def test_a_wrong_key_is_named_however_rows_are_given(rows, where):
    with pytest.raises(ConfigError, match=f"unknown key {where}; did you mean 'offload'"):
        OffloadConfig(rows=rows)


def test_rows_are_refused_beside_what_says_the_same_and_where_no_model_is_given():
    row = {"site": "mlp", "offload": 1}
    for other in ({"policy": "auto"}, {"recompute": "mlp"}, {"fraction": 0.5}, {"modules": "a.*"}):
        with pytest.raises(ConfigError, match="rows say what is offloaded and recomputed"):
            OffloadConfig(rows=[row], **other)
    config = OffloadConfig(rows=[row])
    for door in (OffloadActivations, CPUOffload):
        with pytest.raises(ConfigError, match="isn't given the model"):
            door(config=config)
    net = make_net()
    with pytest.raises(ConfigError, match=r"both about layers\.0\.mlp"):
        around(net, [row, {**row, "layers": 0, "offload": 2}])
    net.layers[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="is compiled, and hooks"):
        around(net, [row])
    with pytest.raises(ConfigError, match="no repeated layers"):
        around(nn.Linear(2, 2), [row])
    without = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    with pytest.raises(ConfigError, match="no layer has a site 'norm'"):
        around(without, [{"site": "norm", "recompute": True}])


def test_a_loss_that_no_door_knows_is_said(caplog):
    rows = [{"site": "loss", "by_rows": True}]
    around(make_net(), rows)
    assert "the loss isn't by rows" in caplog.text
    with pytest.raises(ConfigError, match="offload_modules knows no loss"):
        offload_modules(make_net(), [], manager=make_manager(rows=rows))


def test_rows_that_are_printed_can_be_read():
    rows = (
        RowConfig(site="mlp", layers="0-2,7", offload=2),
        RowConfig(site="attention", layers=3, offload="all"),
        RowConfig(site="layer", layers="4-5", recompute=True),
        RowConfig(site="mlp.act", recompute=True, min_tokens=4096),
        RowConfig(site="loss", by_rows=True),
    )
    assert OffloadConfig(rows=f"[{', '.join(map(str, rows))}]").rows == rows


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        blocks = OrderedDict(one=Block(), other=Block())
        blocks["other"].layer_number = 7  # a number of its own
        self.decoder = nn.Sequential(blocks)


def test_layers_are_numbered_in_each_list():
    layers = layers_of(dict(Coder().named_modules()))
    assert layers == {"encoder.0": 0, "encoder.1": 1, "decoder.one": 0, "decoder.other": 1}


def test_a_model_that_is_a_layer_itself_has_those_inside_it_alone():
    alone = type("TransformerLayer", (Block,), {})()
    assert layers_of(dict(alone.named_modules())) == {}
    alone.inner = nn.ModuleList(Block() for _ in range(2))
    assert layers_of(dict(alone.named_modules())) == {"inner.0": 0, "inner.1": 1}
    alone = type("TransformerLayer", (Block,), {})()
    with get_act_offloading_ctx_manager(alone, config=OffloadConfig(backend="simulated")):
        alone(torch.randn(4, WIDTH)).sum().backward()


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

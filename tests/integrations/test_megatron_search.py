"""What a Megatron job's own rows may offload and recompute, and what is refused of a user's."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
from megatron_parts import TransformerLayer, configured
from torch import nn

pytest.importorskip("megatron.core")

from megatron_offload import OffloadConfig, PipelineOffloadManager
from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import ConfigError
from megatron_offload.integrations import megatron_core, megatron_search
from megatron_offload.integrations.megatron_rows import mark_layers, refuse_rows


@pytest.fixture
def manager():
    manager = PipelineOffloadManager(OffloadConfig(policy="auto"))
    manager.tuner = megatron_search.MegatronSearch(manager)
    yield manager
    manager.close()


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
    assert megatron_search._is_named(names, site, path) is expected


def test_rows_are_refused_where_hooks_would_lose_what_layers_note_on_weights():
    rows = [RowConfig(site="core_attn", offload="all"), RowConfig(site="loss", by_rows=True)]
    refuse_rows(rows, configured(), notes=True)
    refuse_rows([RowConfig(site="mlp_act", recompute=True)], configured(), notes=False)
    for row in (RowConfig(site="mlp_act", recompute=True), RowConfig(site="mlp", offload=1)):
        with pytest.raises(ConfigError, match="note on their saved weights"):
            refuse_rows([row], configured(), notes=True)


ACT, MLP_AGAIN = ({"site": site, "recompute": True} for site in ("moe_act", "mlp"))
NO_EXPERTS, FP8 = {"moe_grouped_gemm": False}, {"moe_grouped_gemm": True, "fp8": "hybrid"}


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"site": "attn_proj", "offload": 1}, {}, "add 'attn_proj' to offload_modules"),
        ({"site": "layer_input", "offload": 1}, {}, "'offload: all' alone"),
        ({"site": "core_attn", "recompute": True}, {}, "recomputes moe_act alone"),
        (ACT, NO_EXPERTS, "where experts are grouped"),
        (ACT, {**FP8, "recompute_modules": []}, "want 'moe_act' in recompute_modules"),
        (ACT, {**FP8, "recompute_modules": ["moe_act"]}, ""),
        ({**MLP_AGAIN, "layers": 4}, {"mtp_num_layers": 1}, ""),  # which predicts further tokens
        ({**MLP_AGAIN, "layers": 4}, {"mtp_num_layers": None}, "there are layers 0 to 3"),
    ],
)
def test_what_megatron_s_layers_cannot_do_is_refused(row, settings, said):
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        refuse_rows([RowConfig(**row)], configured(**settings), notes=False)


def test_layers_mark_by_rows_and_without_them_what_they_were_built_to_mark(caplog, monkeypatch):
    model = configured(*map(TransformerLayer, (1, 2, 3)))

    def marks():
        cores = (layer.core_attention for layer in model)
        flags = [bool(layer.offload_core_attention) for layer in model]
        return flags, [len(core._forward_pre_hooks) for core in cores]

    row = RowConfig(site="core_attn", layers="0-1", offload=1)
    mark_layers(model, [row])
    assert marks() == ([True, True, False], [1, 1, 0])
    mark_layers(model, [RowConfig(site="core_attn", layers=2, offload="all")])
    assert marks() == ([False, False, True], [0, 0, 0])
    with pytest.raises(ConfigError, match="are both about 1"):
        mark_layers(model, [row, RowConfig(site="core_attn", layers=1, offload="all")])
    mark_layers(model, ())
    assert marks() == ([True, True, True], [0, 0, 0])
    mark_layers(model, [row])
    disabled = PipelineOffloadManager(OffloadConfig(enabled=False))
    monkeypatch.setattr(PipelineOffloadManager, "instance", disabled)
    with mock.patch.multiple(megatron_core, patches=mock.Mock(), _marked={}):
        megatron_core._marking(lambda _: None, model)
    assert marks() == ([True, True, True], [0, 0, 0])
    assert not caplog.messages


def test_rows_of_groups_that_a_part_s_layers_do_not_mark_are_said_to_do_nothing(caplog):
    model = configured(*map(TransformerLayer, (1, 2)))
    model[0].checkpoint_core_attention = True
    rows = [
        RowConfig(site="core_attn", layers=0, offload="all"),  # recomputed
        RowConfig(site="core_attn", layers=1, offload="all"),
        RowConfig(site="moe_act", layers=1, recompute=True),
        RowConfig(site="moe_act", layers=2, recompute=True),  # of another part
    ]
    mark_layers(model, rows)
    assert [record.args[0] for record in caplog.records] == [rows[0], rows[2]]


def test_what_megatron_recomputes_inside_a_site_is_refused():
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "mlp"]}
    model = configured(TransformerLayer(1), **selective, moe_grouped_gemm=True, fp8=None)
    experts, attention = (RowConfig(site=x, recompute=True) for x in ("mlp.experts", "attention"))
    refuse_rows([attention], model, notes=False)
    with pytest.raises(ConfigError, match="recomputes moe_act inside it"):
        refuse_rows([experts], model, notes=False)
    model.config.recompute_granularity = None
    activation = RowConfig(site="moe_act", layers=1, recompute=True)
    refuse_rows([experts.model_copy(update={"layers": "0"}), activation], model, notes=False)
    with pytest.raises(ConfigError, match="lies inside it"):
        refuse_rows([experts, activation], model, notes=False)


def test_what_overlapped_all_to_alls_do_not_call_is_refused(caplog):
    model = configured(*map(TransformerLayer, (1, 2)), overlap_moe_expert_parallel_comm=True)
    model[1].mlp["router"] = nn.Identity()
    norm = RowConfig(site="norm", recompute=True)
    refuse_rows([norm, RowConfig(site="mlp", layers=0, offload="all")], model, notes=False)
    assert [record.args[0] for record in caplog.records] == [norm]
    for row in (RowConfig(site="layer", offload=1), RowConfig(site="mlp", recompute=True)):
        with pytest.raises(ConfigError, match="calls the parts of layers"):
            refuse_rows([row], model, notes=False)


@pytest.mark.parametrize(
    ("settings", "is_replayed", "expected"),
    [
        ({}, False, ""),
        ({"cuda_graph_impl": "none", "enable_cuda_graph": False}, False, ""),
        ({"cuda_graph_impl": "local"}, False, "cuda_graph_impl"),
        ({"cuda_graph_impl": "full_iteration"}, True, ""),
        ({"external_cuda_graph": True}, False, "external_cuda_graph"),
        ({"overlap_moe_expert_parallel_comm": True}, True, "overlap_moe_expert_parallel_comm"),
    ],
)
def test_rows_are_looked_for_where_layers_are_called_as_modules(settings, is_replayed, expected):
    found = megatron_search._what_goes_around(SimpleNamespace(**settings), is_replayed=is_replayed)
    assert found == expected


def test_where_no_rows_can_be_found_it_is_said_once_and_kept_what_there_is_room_for(
    manager, caplog
):
    config = SimpleNamespace(cuda_graph_impl="local")
    for _ in range(2):
        assert not manager.tuner.join(nn.Linear(2, 2), config, lambda: None)
    assert [m for m in caplog.messages if "only what the device has no room for" in m] == [
        f"megatron-offload: {manager.tuner.said}"
    ]
    assert manager.tuner.is_converged
    assert manager.learner.is_open


def test_activations_of_grouped_experts_are_recomputed_by_megatron_itself(manager):
    model, search = configured(TransformerLayer(1)), manager.tuner
    model[0].mlp, experts = nn.Linear(2, 2), nn.Linear(2, 2)
    model[0].mlp.experts, experts.linear_fc2 = experts, nn.Linear(2, 2)
    vars(experts).update(activation_recompute=False, activation_func=nn.functional.gelu)
    search._models[0], search.is_scheduled, experts.config = model, True, SimpleNamespace(fp8=None)
    path = "0.0.mlp.experts.linear_fc2"
    assert search._sites()[path].name == "moe_act"
    activation, other = (RowConfig(site=x, recompute=True) for x in ("moe_act", "attention"))
    for rows in ([other, activation], [other], [activation], ()):
        search._follow_in_library(rows)
        assert experts.activation_recompute is (activation in rows)
    for what, name, value in (
        (experts, "activation_recompute", True),  # it is anyway
        (experts.config, "fp8", "hybrid"),
        (search, "is_scheduled", False),  # a program's own backward may be of any kind
        (TransformerLayer, "__module__", "anyone"),
        (experts.linear_fc2, "_forward_hooks", {0: print}),
        (nn.modules.module, "_global_forward_hooks", {0: print}),
        (experts, "activation_func", lambda x: x),  # it may do more
        (manager, "config", OffloadConfig(policy="auto", recompute=["norm"])),
        (manager, "config", OffloadConfig(policy="auto", whole_step_graph=True)),
    ):
        with mock.patch.object(what, name, value):
            assert path not in search._sites()


def test_layers_that_megatron_recomputes_have_no_rows_until_it_is_configured_anew(manager):
    model = nn.Linear(2, 2)
    settings = {"recompute_granularity": "full", "offload_modules": ["layer_input"]}
    for method, has_layers in (("uniform", False), ("block", True)):
        config = SimpleNamespace(recompute_method=method, **settings)
        for handle in manager.tuner.join(model, config, lambda: None):
            handle.remove()
        assert manager.tuner._has_layers == has_layers
        manager.configure(manager.config)


def test_a_chunk_that_has_not_joined_is_not_looked_at(manager):
    model = nn.Linear(2, 2)
    for _ in range(9):
        manager.tuner.forward_begins(model)
        manager.tuner(manager)
    assert manager.tuner.is_converged
    assert not manager.tuner.said

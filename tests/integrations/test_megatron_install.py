"""What installing into megatron-core asks for, refuses and reports."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types

import pytest
import torch
from megatron_parts import TransformerLayer, configured, overlapping

from megatron_offload import OffloadConfig, PipelineOffloadManager
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.errors import ConfigError, IntegrationError
from megatron_offload.integrations import megatron_core
from megatron_offload.run import launch as launching


def test_the_error_says_what_is_absent_and_how_to_get_it(monkeypatch):
    megatron_core.uninstall()
    monkeypatch.setitem(sys.modules, megatron_core._MODULE, None)
    said = r"megatron-core 0\.16 or later.* megatron\.core.*pip install megatron-core$"
    with pytest.raises(IntegrationError, match=said):
        megatron_core.install()
    assert not megatron_core.is_installed()


def test_calls_that_dont_say_their_pipeline_rank_get_megatrons(monkeypatch):
    """The first form of the call, which megatron-core 0.16 uses, doesn't say it."""
    from megatron.core import parallel_state

    from megatron_offload.fine_grained_activation_offload import PipelineOffloadManager

    def rank_of(*arguments):
        manager = PipelineOffloadManager()
        manager.init_model_chunk_offload_handler(*arguments)
        found = manager.engine.learner.pp_rank
        manager.abort()
        return found

    assert rank_of(1, None) == 0
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 3)
    megatron_core.install()
    try:
        assert rank_of(1, None) == 0, "no parallel state"
        monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
        assert rank_of(1, None) == 3
        assert rank_of(2, 1, None, 0, 0, 1.0) == 2, "whoever says it is believed"
    finally:
        megatron_core.uninstall()
    assert rank_of(1, None) == 0


def note(model):
    """Let a model be seen, as in its forward."""
    megatron_core._marking(lambda _: None, model)


def test_before_cuda_begins_the_manager_is_left_alone_until_the_first_forward(monkeypatch):
    """A job says its device later; until then each rank would take memory on the first."""
    monkeypatch.setattr(PipelineOffloadManager, "instance", None)
    config = OffloadConfig(prefetch_bytes="3MiB", backend="simulated")
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "is_initialized", lambda: False)
        megatron_core.install(config)
    try:
        assert PipelineOffloadManager.instance is None
        megatron_core.install()
        found = []
        model = configured(torch.nn.Linear(2, 2), offload_modules=["core_attn", "*.0", "layers.*"])
        note = functools.partial(
            megatron_core._marking,
            lambda _: found.append(PipelineOffloadManager.get_instance().config),
        )
        note(model)
        note(model)
        assert found == [config, config]
        assert PipelineOffloadManager.instance.tuner is not None
        PipelineOffloadManager.instance.configure(OffloadConfig(backend="simulated"))
        note(model)
        assert found[2] != config, "what the program says later stays"
    finally:
        megatron_core.uninstall()


@pytest.fixture
def installed():
    megatron_core.install(OffloadConfig(backend="simulated"))
    yield
    megatron_core.uninstall()


@pytest.mark.usefixtures("installed")
def test_layers_are_refused_where_only_their_parts_are_called():
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "bf16": True}
    options |= {"num_moe_experts": 2, "expert_model_parallel_size": 2}
    options |= {"moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True}
    options |= {"fine_grained_activation_offloading": True}
    assert TransformerConfig(**options, offload_modules=["mlp_fc1"]).offload_modules
    with pytest.raises(ConfigError, match="calls the parts of layers"):
        TransformerConfig(**options, offload_modules=["mlp_fc1", "layer"])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("granularity", [None, "selective"])
def test_inputs_of_layers_are_refused_where_no_layer_is_recomputed(granularity):
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    options |= {"fine_grained_activation_offloading": True, "offload_modules": ["layer_input"]}
    with pytest.raises(ConfigError, match="set recompute_granularity='full'"):
        TransformerConfig(**options, recompute_granularity=granularity)
    options["offload_modules"] = "core_attn"
    with pytest.raises(ConfigError, match=r"a list of names; write \['core_attn'\]"):
        TransformerConfig(**options, recompute_granularity=granularity)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("names", [["layer_input"], ["core_attn"], ["layer_input", "core_attn"]])
def test_names_that_can_move_nothing_under_full_recompute_are_reported(names, method, caplog):
    options = {"recompute_granularity": "full", "recompute_method": method}
    model = configured(offload_modules=names, **options)
    note(model)
    note(model)
    is_said = caplog.text.count("only 'layer_input' offloads anything")
    assert is_said == (method == "uniform" and "core_attn" in names)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("targets", "is_refused"), [(["1GiB"] * 2, True), (["1GiB"], False)])
def test_other_targets_than_pipeline_ranks_are_refused_in_the_first_forward(targets, is_refused):
    policy = {"kind": "memory_target", "memory_target": targets}
    config = OffloadConfig(backend="simulated", policy=policy)
    PipelineOffloadManager.get_instance().configure(config)
    refused = pytest.raises(ConfigError, match="2 memory targets are given for 1 pipeline ranks")
    with refused if is_refused else contextlib.nullcontext():
        note(configured(offload_modules=[]))


@pytest.mark.usefixtures("installed")
def test_layers_mark_what_they_were_built_to_mark_once_it_is_uninstalled():
    rows = [{"site": "core_attn", "layers": 1, "offload": 1}]
    PipelineOffloadManager.get_instance().configure(OffloadConfig(backend="simulated", rows=rows))
    model = configured(*map(TransformerLayer, (1, 2)), num_layers=2)
    note(model)
    assert not model[0].offload_core_attention
    megatron_core.uninstall()
    assert [layer.offload_core_attention for layer in model] == [True, True]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("evaluates", [False, True])
def test_names_under_which_nothing_is_saved_are_reported_once(evaluates, caplog):
    manager = PipelineOffloadManager.get_instance()
    model = configured(offload_modules=["core_attn", "expert_fc1"])
    for _ in range(4):
        with manager.step():
            for _ in range(2):
                note(model)
                x = start_group(manager, torch.ones(2, requires_grad=True), "core_attn")
                with manager:
                    x = x.exp()
                commit_group(manager, x, "core_attn").sum().backward()
        if evaluates:
            with torch.no_grad(), manager.step():
                note(model)
            evaluates = False
    _, *said = (record.args for record in caplog.records)
    assert said == [("expert_fc1",)]


@pytest.fixture
def overlapped():
    with overlapping():
        yield


@pytest.mark.usefixtures("installed", "overlapped")
@pytest.mark.parametrize("before", ["output", "other node", "saved"])
def test_what_a_part_of_a_layer_keeps_for_its_node_alone_is_freed(before):
    """Under Megatron's overlap each part keeps its output, the next computes on a detached one."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    try:
        from megatron.core.models.common.utils import TransformerLayerNode
    except ImportError:  # before 0.19
        from megatron.core.models.gpt.fine_grained_callables import TransformerLayerNode

    event = types.SimpleNamespace(wait=lambda stream: None, record=lambda stream: None)
    manager = PipelineOffloadManager.get_instance()
    manager.configure(OffloadConfig(backend="simulated", min_tensor_bytes=0))
    part = types.SimpleNamespace(before_detached=(), detached=())

    def grow(x):
        return x.exp() if before == "saved" else x * 1.5

    def normalize(x):
        x = start_group(manager, x, "norm")
        with manager:
            y = torch.nn.functional.layer_norm(x, (64,))
        residual = x if before == "output" else TransformerLayerNode.detach(part, x)
        return commit_group(manager, y, "norm", [residual])

    x = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.nn.functional.layer_norm(grow(x), (64,)).sum(), x)
    runs = (grow, normalize) if before == "output" else (lambda x: normalize(grow(x)),)
    nodes = [ScheduleNode(run, None, event) for run in runs]
    manager.begin_chunk()
    y = functools.reduce(lambda x, node: node.forward(x), nodes, x)
    manager.join_offloads()
    kept = nodes[0].output if before == "output" else part.before_detached[0]
    assert bool(kept.untyped_storage().size()) == (before == "saved")  # it is read
    gradient = torch.ones_like(y)
    for node in reversed(nodes):
        gradient = node.backward(gradient)
    manager.reset()  # it is the process's
    assert torch.equal(gradient, expected)


@pytest.fixture
def plugged(monkeypatch):
    """Import the plug-in anew in an environment; return the process's manager."""

    def plug(**environment):
        for name in ("CONFIG", "SET", "REPORT", "LOG"):
            monkeypatch.delenv(f"MEGATRON_OFFLOAD_{name}", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(f"MEGATRON_OFFLOAD_{name}", str(value))
        monkeypatch.delitem(sys.modules, "megatron_offload.auto", raising=False)
        importlib.import_module("megatron_offload.auto")
        return PipelineOffloadManager.get_instance()

    before = PipelineOffloadManager.instance
    PipelineOffloadManager.instance = None
    yield plug
    megatron_core.uninstall()
    PipelineOffloadManager.instance = before


def test_importing_the_plug_in_installs_by_the_environment_and_else_the_defaults(plugged, tmp_path):
    path = tmp_path / "offload.yaml"
    path.write_text("policy: {kind: ratio, ratio: 0.5}\nprefetch_bytes: 2MiB\n")
    settings = "policy.ratio=0.25 recompute=[norm]"
    manager = plugged(CONFIG=path, SET=settings, REPORT=tmp_path / "report", LOG="info")
    assert megatron_core.is_installed()
    assert manager.config.policy.ratio == 0.25
    assert manager.config.recompute == ("norm",)
    assert manager.config.prefetch_bytes == 2 << 20
    assert isinstance(manager.tuner, launching.ReportedSearch)
    megatron_core.uninstall()
    PipelineOffloadManager.instance = None
    assert plugged().config == OffloadConfig()
    assert megatron_core.is_installed()


@pytest.mark.parametrize(
    ("variable", "settings", "expected"),
    [
        ("SETS", "policy.kind=auto", r"variable MEGATRON_OFFLOAD_SETS; did you .*OAD_SET'"),
        ("SET", "modles=[x]", "unknown key MEGATRON_OFFLOAD_SET modles; did you mean 'modules'"),
        (
            "SET",
            "modules=[]",
            "^MEGATRON_OFFLOAD_SET modules: no name, so nothing would be offloaded",
        ),
    ],
)
def test_a_plug_in_that_is_wrongly_configured_stops_the_job(plugged, variable, settings, expected):
    with pytest.raises(ConfigError, match=expected):
        plugged(**{variable: settings})
    assert not megatron_core.is_installed()


def test_a_process_without_megatron_core_goes_on_without_offload(plugged, monkeypatch, caplog):
    def absent(name):
        raise IntegrationError("megatron-core 0.16 or later is needed")

    monkeypatch.setattr(megatron_core, "import_from_megatron", absent)
    plugged()
    assert "no offload in this process: megatron-core 0.16" in caplog.text
    assert not megatron_core.is_installed()

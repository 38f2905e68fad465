"""Megatron-core's own layers and schedules, with this package in the place of its offload.

The programs of `megatron_programs` run in one process for each version of megatron-core and each
order of imports.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from megatron_parts import TransformerLayer, configured, overlapping
from processes import found_by, path_to, run_python
from torch.utils.cpp_extension import get_default_build_root

from megatron_offload import OffloadConfig, PipelineOffloadManager
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.errors import ConfigError, IntegrationError
from megatron_offload.integrations import megatron_core

PROGRAM = Path(__file__).with_name("megatron_programs.py")

ATTENTION = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}
INPUTS = ("inputs", "inputs-of-two-layers", "inputs-in-shares")
BY_ROWS = {"core_attn": 6, "expert_fc1": 6, "moe_act": 6, "mlp_norm": 3}
ROWS = {
    "rows": BY_ROWS,
    "rows-overlapped": BY_ROWS,
    "rows-of-further-tokens": {"core_attn": 3, "mlp_act": 6},
}
MOVES = {
    "dense": ATTENTION,
    "names-beyond": ATTENTION | {"mlp_fc1", "**.linear_fc2"},
    "names-beyond-alone": {"mlp_fc1"},
    "moe": ATTENTION | {"expert_fc1", "moe_act"},
    "moe-recompute-act": {"expert_fc1", "moe_act"},
    "selective-recompute": {"attn_norm", "attn_proj", "mlp_norm"},
    **{case: {"layer_input"} for case in INPUTS},
    "inputs-of-some-layers": ATTENTION | {"layer_input", "mlp_fc1"},
    "evaluation": ATTENTION,
    "evaluation-with-grad": ATTENTION,
    "captured": ATTENTION,
    "captured-moe": ATTENTION | {"expert_fc1", "moe_act"},
    "captured-inputs": {"layer_input"},
    **{case: set(groups) for case, groups in ROWS.items()},
}
CAPTURED = [case for case in MOVES if "captured" in case]
BOTH = {"norm", "mlp_act"}
REMADE = {
    "none-again": set(),
    **dict.fromkeys(("by-default", "gelu", "gelu-fused", "gated-fused", "moe-gated-fused"), BOTH),
    "gated": {"norm"},  # by parts that have no name
    "moe-gated": {"norm"},
    "latent": BOTH,
}
STAYS = ["nothing-listed-is-large", "full-recompute"]
LATER_ONLY = {
    "half": ATTENTION,
    "kept-bytes": ATTENTION,
    "wait-at-commit": ATTENTION,
    "one-in-flight": ATTENTION,
    "delayed": {"expert_fc1", "moe_act"},
}
RUNS = {
    ("0.16", "imports-first"): [*MOVES, *STAYS, *REMADE],
    ("0.16", "installed-first"): ["dense", "moe", "selective-recompute"],
    ("later", "imports-first"): [*MOVES, *STAYS, *LATER_ONLY, "none", *REMADE],
    ("later", "installed-first"): ["dense", "moe", "selective-recompute"],
}


def drop_stale_locks():
    """Take away locks of runs that were killed while they compiled: others wait for them."""
    for lock in Path(get_default_build_root()).rglob("lock"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > 300:
                lock.unlink()


@functools.cache
def outcome(run):
    """Run a process; return what became of it."""
    version, order = run
    drop_stale_locks()
    return run_python(PROGRAM, order, *RUNS[run], path=path_to(version))


def finding(run):
    found = found_by(outcome(run))
    assert found["version"].startswith("0.16.") == (run[0] == "0.16")
    return found


def param(run, *case):
    marks = pytest.mark.slow if run[1] == "installed-first" else ()
    return pytest.param(run, *case, id="-".join((*run, *case)), marks=marks)


def programs(*cases):
    """Parametrise by run and case, of those runs that have the case."""
    pairs = [param(run, case) for run, known in RUNS.items() for case in cases if case in known]
    return pytest.mark.parametrize(("run", "case"), pairs)


by_run = pytest.mark.parametrize("run", [param(run) for run in RUNS])


@programs(*MOVES, *STAYS, *LATER_ONLY, "none", *REMADE)
def test_losses_and_gradients_are_those_without_offload_and_nothing_is_left(run, case):
    found = finding(run)["cases"][case]
    assert found["finite"]
    assert found["equal"]
    for step in found["steps"]:
        assert not any(step["left"].values())
        assert step["reloaded_bytes"] <= step["offloaded_bytes"]


@programs(*CAPTURED)
def test_a_step_of_megatrons_schedule_asks_for_nothing_that_a_capture_forbids(run, case):
    steps = finding(run)["cases"][case]["steps"]
    assert [step["is_captured"] for step in steps] == [False, False, True]
    assert steps[-1]["reloaded_bytes"] == steps[-2]["reloaded_bytes"] > 0


@programs(*MOVES, *LATER_ONLY)
def test_all_listed_groups_move_from_the_first_step_on(run, case):
    steps = finding(run)["cases"][case]["steps"]
    expected = {**MOVES, **LATER_ONLY}[case]
    assert set(steps[0]["names"]) == expected
    assert steps[0]["offloaded_bytes"] > 0
    assert steps[0]["summary"]
    assert set(steps[0]["summary"]) <= expected


@programs(*MOVES, "wait-at-commit", "one-in-flight", "delayed")
def test_every_learned_step_moves_the_same_bytes_of_the_same_names(run, case):
    """Inputs of checkpoints without output too, though Megatron saves detached copies of them."""
    found = finding(run)["cases"][case]["steps"]
    first, *steps = (step["offloaded_bytes"] for step in found)
    assert len(set(steps)) == 1
    assert 0 < steps[0] <= first, "the first can't know yet what something else keeps anyway"
    assert all(step["names"] == found[0]["names"] for step in found)


@programs(*INPUTS)
def test_of_a_checkpoint_hidden_states_leave_and_nothing_else(run, case):
    hidden_bytes = 16 * 2 * 32 * 4
    segments = 2 if case == "inputs-of-two-layers" else 4
    for step in finding(run)["cases"][case]["steps"]:
        assert step["groups"] == {"layer_input": 3 * segments}
        assert step["offloaded_bytes"] == 3 * segments * hidden_bytes


@programs("inputs-of-some-layers")
def test_layers_that_are_not_recomputed_have_the_groups_that_they_always_have(run, case):
    for step in finding(run)["cases"][case]["steps"]:
        assert set(step["groups"].values()) == {6}, "two layers of each kind, three microbatches"


@programs(*ROWS)
def test_marked_groups_are_those_of_the_layers_that_rows_name(run, case):
    found = finding(run)["cases"][case]
    for step in found["steps"][1:]:  # in the first a forward is watched
        assert step["groups"] == ROWS[case], "three microbatches of each layer"
    if "further" not in case:
        assert found["recomputed"] == [False, True, True, False]
    if case == "rows":  # two of 8 KiB in each core, and of a norm not its statistics
        summary = {
            "core_attn": 2 << 14,
            "expert_fc1": 1 << 14,
            "moe_act": 1 << 16,
            "mlp_norm": 4096,
        }
        assert found["steps"][-1]["summary"] == summary


@programs("rows", "rows-overlapped", "moe-recompute-act")
def test_what_megatron_recomputes_is_counted_where_rows_have_asked_for_it(run, case):
    sizes = {"rows": 4, "rows-overlapped": 2, "moe-recompute-act": 0}  # of an element
    expected = 2 * 3 * 2 * 16 * 2 * 64 * sizes[case]  # two experts for a token
    for step in finding(run)["cases"][case]["steps"]:
        assert step["recomputed"].get("moe_act", 0) == expected


@programs(*STAYS, "none")
def test_nothing_moves_where_nothing_should(run, case):
    assert [step["offloaded_bytes"] for step in finding(run)["cases"][case]["steps"]] == [0, 0, 0]


@programs("half")
def test_megatrons_fraction_reaches_the_policy(run, case):
    steps = finding(run)["cases"][case]["steps"]
    assert [step["kept"] for step in steps] == [12, 12, 12]  # of 24 that hold something
    assert steps[1]["offloaded_bytes"] < steps[0]["offloaded_bytes"]


@programs(*REMADE)
def test_each_unit_is_recomputed(run, case):
    for step in finding(run)["cases"][case]["steps"]:
        assert set(step["remade"]) == REMADE[case]


@by_run
def test_install_patches_every_reference_and_uninstall_restores_exactly(run):
    references = finding(run)["references"]
    assert references["num_shared"] >= 14
    for where in ("module", "reference", "class", "manager"):
        assert references[where], where
    assert references["changed"] == []
    assert references["added"] == []


# What can't be installed into.


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
    is_said = caplog.text.count("only 'layer_input' moves anything")
    assert is_said == (method == "uniform" and "core_attn" in names)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("targets", "is_refused"), [(["1GiB"] * 2, True), (["1GiB"], False)])
def test_other_targets_than_pipeline_ranks_are_refused_in_the_first_forward(targets, is_refused):
    policy = {"kind": "memory_target", "memory_target": targets}
    config = OffloadConfig(backend="simulated", policy=policy)
    PipelineOffloadManager.get_instance().configure(config)
    refused = pytest.raises(ConfigError, match="2 memory targets are given for 1 pipeline ranks")
    with refused if is_refused else contextlib.nullcontext():
        megatron_core._marking(lambda _: None, configured(offload_modules=[]))


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
    assert torch.equal(gradient, expected)

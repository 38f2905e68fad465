"""What a configuration asks of the engine is done, or refused."""

from __future__ import annotations

import pytest
import torch
from programs import check_steps, make_config, make_manager, make_model, one_forward_one_backward

from megatron_offload import OffloadActivations, offload_modules
from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate

ORDER = one_forward_one_backward(4, depth=2)


def test_what_is_not_enabled_records_and_moves_nothing_until_it_is_configured_again():
    model, manager = make_model(), make_manager()
    manager.configure(make_config(enabled=False), backend=manager.backend)
    manager.enable_offload()  # megatron-core's layers call it; it is no word of the user's
    for _ in range(2):
        check_steps(model, manager, ORDER)
        assert manager.last_step.num_groups == 0
        assert not manager.last_step.by_name
    assert manager.host_pool.stats.slab_bytes_total == 0
    manager.configure(make_config(), backend=manager.backend)
    check_steps(model, manager, ORDER)
    assert manager.last_step.offloaded_bytes > 0


def step_ends(offload):
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        loss = (x * x).tanh().square().sum()
    loss.backward()
    del loss
    return offload.end_step()


def test_groups_without_marks_stop_while_offload_is_disabled():
    offload = OffloadActivations(min_offload_size=0, config=make_config())
    offload.manager.disable_offload()
    assert not step_ends(offload)
    offload.manager.enable_offload()
    assert step_ends(offload)
    assert offload.last_step.offloaded_bytes > 0
    offload.close()


# Which groups are offloaded


def moved_names(manager, order=ORDER):
    model = make_model()
    check_steps(model, manager, order, 2)
    return {name for name, group in manager.last_step.by_name.items() if group.offloaded_bytes}


@pytest.mark.parametrize(
    ("settings", "moved"),
    [
        ({}, {"norm", "mlp"}),
        ({"modules": ("core_attn",)}, set()),
        ({"modules": ("core_attn", "ml*")}, {"mlp"}),
        ({"modules": ("*",)}, {"norm", "mlp"}),
        ({"policy": {"kind": "modules"}, "modules": ["*norm"]}, {"norm"}),
        ({"policy": {"kind": "modules"}}, {"norm", "mlp"}),
    ],
)
def test_groups_are_kept_whose_names_are_not_among_those_that_were_set(settings, moved):
    manager = make_manager(**settings)
    assert moved_names(manager) == moved
    reason = "its name is not among OffloadConfig.modules"
    for name, group in manager.last_step.by_name.items():
        assert set(group.kept_bytes_by_reason) == (set() if name in moved else {reason})


def test_a_name_that_no_group_has_is_reported_once(caplog):
    moved_names(make_manager(modules=("mlp_act", "ml*")))
    _, told = caplog.messages
    assert told.startswith("OffloadConfig.modules names 'mlp_act', and no group")


def test_a_share_is_one_of_the_groups_that_may_move():
    manager = make_manager(modules=("ml*",), fraction=0.5)
    assert moved_names(manager) == {"mlp"}
    found = manager.last_step.by_name["mlp"]
    assert found.kept_bytes * 2 == found.offloaded_bytes, "one of three in each chunk"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"fraction": 0.5, "policy": {"kind": "ratio", "ratio": 0.5}}, "fraction"),
        (
            {"delta_bytes_across_pp_ranks": 1, "policy": {"kind": "ratio", "ratio": 0.5}},
            "delta_bytes_across_pp_ranks",
        ),
        ({"fraction": 0.5, "policy": {"kind": "auto"}}, "'auto' says what is kept"),
    ],
)
def test_two_settings_that_say_different_things_are_refused(settings, key):
    with pytest.raises(ConfigError, match=key):
        validate(OffloadConfig, settings, "settings")


def test_a_dict_in_the_place_of_a_configuration_is_refused_and_nothing_has_changed():
    manager = make_manager()
    with pytest.raises(ConfigError, match=r"an OffloadConfig, not a dict; OffloadConfig\(\*\*"):
        manager.configure({"fraction": 0.5})
    assert moved_names(manager) == {"norm", "mlp"}


# What a caller's own configuration says, such as megatron-core's TransformerConfig


def chunk_of(config, **said):
    manager = make_manager()
    manager.configure(OffloadConfig(backend="simulated", **config), backend=manager.backend)
    chunk = manager.begin_chunk(pp_rank=2, **said)
    return (
        manager.learner.policy.fraction,
        manager.learner.policy.keep_bytes,
        chunk.rules.min_tensor_bytes,
        chunk.rules.min_tensor_elements,
    )


def test_what_was_set_wins_over_what_the_caller_says_and_that_over_the_defaults():
    said = {"fraction": 0.25, "delta_bytes_across_pp_ranks": 3, "min_tensor_elements": 7}
    assert chunk_of({}) == (1.0, 0, 1 << 20, 0)
    assert chunk_of({}, **said) == (0.25, 6, 0, 7)
    assert chunk_of({"fraction": 1.0}, **said) == (1.0, 6, 0, 7)
    assert chunk_of({"delta_bytes_across_pp_ranks": 0}, **said) == (0.25, 0, 0, 7)
    assert chunk_of({"min_tensor_bytes": 512}, **said) == (0.25, 6, 512, 0)
    assert chunk_of({"min_tensor_elements": 9}, **said) == (0.25, 6, 0, 9)
    assert chunk_of({"min_tensor_elements": 9, "min_tensor_bytes": 512}) == (1.0, 0, 512, 9)


def test_a_callers_share_of_nothing_is_no_word_against_a_ratio():
    manager = make_manager(policy={"kind": "ratio", "ratio": 1.0})
    model = make_model()
    manager.begin_chunk(fraction=0.0)
    x = model[0](torch.randn(16, 32, requires_grad=True), manager)
    x.sum().backward()
    manager.reset()
    assert manager.last_step.offloaded_bytes > 0


def test_a_module_of_the_models_own_is_named_by_a_pattern_in_a_configuration():
    with pytest.raises(ConfigError, match=r"meant by a pattern such as '\*encoder'"):
        validate(OffloadConfig, {"modules": ["encoder"]}, "settings")
    (pattern,) = validate(OffloadConfig, {"modules": ["*encoder"]}, "settings").modules
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2)})
    handle = offload_modules(model, [pattern], manager=make_manager())
    assert handle.groups == {"*encoder": ["encoder"]}

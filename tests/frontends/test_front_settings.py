"""What a front door is reported is followed, or refused with what to use instead, and is said."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from processes import run_python
from programs import make_config, make_manager
from torch import nn

from megatron_offload import (
    CPUOffload,
    OffloadActivations,
    OffloadConfig,
    get_act_offloading_ctx_manager,
)
from megatron_offload.errors import ConfigError, IntegrationError, StateError
from megatron_offload.frontends.around import _UNFOLLOWED, followed
from megatron_offload.integrations.transformer_engine import operation_groups
from megatron_offload.observe.verdicts import say_last

SOME = {
    "modules": ("core_attn",),
    "policy": {"kind": "ratio", "ratio": 0.5},
    "simulated": {"seed": 1},
    "backend": "simulated",
    "host_slab_bytes": 4096,
    "recompute": ("norm",),
    "rows": [{"site": "mlp", "offload": 2}],
}
"""Values where no number will do."""


DOORS = {
    "OffloadActivations": lambda config: OffloadActivations(config=config),
    "CPUOffload": lambda config: CPUOffload(0.5, "a tag", config),
    "operation_groups": operation_groups,
}


def config_with(key):
    return OffloadConfig(**{"backend": "simulated", key: SOME.get(key, 1)})


@pytest.mark.parametrize(
    ("door", "key"), [(door, key) for door in DOORS for key in _UNFOLLOWED[door]]
)
def test_what_a_door_cannot_follow_is_refused_and_the_way_out_is_named(door, key):
    with pytest.raises(ConfigError, match=rf"{door} can't follow OffloadConfig\.{key}: \w+"):
        DOORS[door](config_with(key))
    DOORS[door](OffloadConfig(backend="simulated", policy=None))  # which asks for nothing


@pytest.mark.parametrize("door", _UNFOLLOWED)
def test_a_door_takes_all_else(door):
    for key in OffloadConfig.model_fields.keys() - {*_UNFOLLOWED[door], "recompute"}:
        followed(door, config_with(key), None)


def moved_sizes(offload):
    """Return the sizes of what is offloaded of four tensors of 256 bytes to 16 KiB."""
    inputs = [torch.randn(size, requires_grad=True) for size in (64, 256, 1024, 4096)]
    manager = offload._groups.manager
    with offload:
        losses = [torch.exp(x).square().sum() for x in inputs]
    moved = {block.num_bytes for group in manager.decisions.committed for block in group.blocks()}
    sum(losses).backward()
    return moved


@pytest.mark.parametrize(
    ("settings", "smallest"),
    [({}, 256), ({"min_tensor_bytes": 4096}, 4096), ({"min_tensor_elements": 4096}, 4 * 4096)],
)
def test_the_smallest_size_in_the_configuration_is_what_moves(settings, smallest):
    config = OffloadConfig(backend="simulated", host_slab_bytes=1 << 20, **settings)
    assert min(moved_sizes(CPUOffload(1.0, "a tag", config))) == smallest
    if "min_tensor_bytes" in settings:
        assert min(moved_sizes(OffloadActivations(config=config))) == smallest


@pytest.mark.parametrize(
    ("key", "value", "argument", "other"),
    [
        ("min_tensor_bytes", 4096, "min_offload_size", 512),
        ("pin_memory", False, "use_pin_memory", False),
        ("copy_streams", False, "use_streams", False),
    ],
)
def test_a_set_key_counts_where_the_argument_is_left_out(key, value, argument, other):
    offload = OffloadActivations(config=make_config(**{key: value}))
    seen = {"min_offload_size": "min_tensor_size_bytes"}.get(argument, argument)
    assert getattr(offload, seen) == value
    if key != "min_tensor_bytes":
        assert getattr(offload.manager.config, key) == value
    if other != value:
        with pytest.raises(ConfigError, match=f"{argument} is {other}, and OffloadConfig.{key}"):
            OffloadActivations(config=make_config(**{key: value}), **{argument: other})
    OffloadActivations(config=make_config(**{key: value}), **{argument: value})


def test_a_context_that_does_nothing_can_be_asked_and_refuses_what_no_context_takes():
    model = nn.Linear(3, 3)
    with get_act_offloading_ctx_manager(model, False, config=OffloadConfig()) as entered:
        model(torch.ones(2, 3)).sum().backward()
    off = get_act_offloading_ctx_manager(model, False)
    assert entered is None
    assert off.last_step.offloaded_bytes == 0
    assert off.last_step.metrics()
    assert off.describe() == "nothing is offloaded: it is switched off"
    assert not off.end_step()
    off.close()
    with pytest.raises(TypeError, match="bogus"):
        get_act_offloading_ctx_manager(model, False, bogus=3)
    for make in (OffloadActivations, partial(get_act_offloading_ctx_manager, model)):
        with pytest.raises(TypeError, match=r"'min_size'; did you mean 'min_offload_size'\?$"):
            make(min_size=3)
    for other, said in ((None, "a NoneType"), ([1], "a list"), (nn.Linear, "the class")):
        with pytest.raises(ConfigError, match=f"nn.Module, and was given as {said}"):
            get_act_offloading_ctx_manager(other)
    with pytest.raises(ConfigError, match="enable_activation_offloading is True or False"):
        get_act_offloading_ctx_manager(model, OffloadConfig(enabled=False))


def test_a_closed_context_says_so_when_it_is_entered():
    offload = OffloadActivations()
    offload.close()
    with pytest.raises(StateError, match=r"close\(\) has given the memory .* make a new one"):
        offload.__enter__()
    with OffloadActivations():
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_cuda_device_that_is_not_there_is_reported():
    with pytest.raises(IntegrationError, match="needs a CUDA device and torch sees none"):
        OffloadActivations(config=OffloadConfig(backend="cuda"))


AUTO = {"kind": "auto", "measured_plans": 3}
ONE = {"kind": "auto", "measured_plans": 1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"policy": "modules"}, {"kind": "modules"}),
        ({"policy": "auto"}, {**AUTO, "most_slowdown_percent": 3.0}),
        ({"most_slowdown_percent": 5}, {**AUTO, "most_slowdown_percent": 5.0}),
        ({"policy": ONE, "most_slowdown_percent": 2}, {**ONE, "most_slowdown_percent": 2.0}),
        ({"memory_target": "22GiB"}, {**AUTO, "kind": "memory_target", "memory_target": 22 << 30}),
    ],
)
def test_a_policy_can_be_given_as_arguments(given, expected):
    context = OffloadActivations(config=OffloadConfig(backend="simulated"), **given)
    assert context.manager.config.policy.model_dump() == expected
    assert context.manager.config.backend == "simulated"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_fwd_stash_size": 0}, "max_fwd_stash_size must be at least 1"),
        ({"min_offload_size": -1}, "min_offload_size can't be negative"),
        ({"config": OffloadConfig(), "manager": make_manager()}, "not both"),
        ({"config": {"fraction": 0.5}}, "as an OffloadConfig, not as a dict; OffloadConfig"),
        ({"use_pin_memory": OffloadConfig()}, "use_pin_memory is True or False, not of type Off"),
        ({"use_streams": nn.Linear(1, 1)}, "use_streams is True or False, not of type Linear"),
        ({"policy": "auto", "memory_target": "1GiB"}, "'policy.memory_target' of kind 'auto'"),
        ({"most_slowdown_percent": 1, "memory_target": "1GiB"}, "slowdown_percent' of kind 'mem"),
        ({"policy": {"memory_target": "1GiB"}, "memory_target": "2GiB"}, "says it too"),
        ({"policy": "modules", "config": OffloadConfig(policy="auto")}, "config's policy and the"),
        ({"memory_target": "1GiB", "config": OffloadConfig(rows=[])}, "config's rows and the arg"),
        ({"policy": "auto", "manager": make_manager()}, "a manager is given"),
        ({"policy": 5}, "there is no kind '5'"),
        ({"most_slowdown_percent": True}, "a number is wanted .got True"),
        ({"policy": "module"}, "'modules'"),
        ({"most_slowdown_percent": -1}, "most_slowdown_percent"),
        ({"use_pin_memory": False, "manager": make_manager()}, "use_pin_memory is False"),
        ({"use_streams": False, "manager": make_manager()}, "use_streams is False"),
        ({"min_offload_size": 7, "manager": make_manager(min_tensor_bytes=5)}, "_size is 7, and"),
        ({"manager": make_manager(modules=("core_attn",))}, "modules"),
    ],
)
def test_arguments_of_another_type_or_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        OffloadActivations(**given)


PROGRAM = """
import torch
from megatron_offload import OffloadActivations, OffloadConfig
offload, net = OffloadActivations(config=OffloadConfig(policy="modules")), torch.nn.Linear(64, 64)
for _ in range(6):
    with offload:
        loss = torch.nn.Sequential(*[net] * 16)(torch.randn(512, 64)).sum()
    loss.backward()
"""


@pytest.mark.parametrize(
    ("settings", "plan", "last"),
    [
        ({"policy": "modules"}, "in a context, is offloaded from the first step", "off the device"),
        pytest.param(
            {"recompute": "layer"},
            "recompute: [layer] from the first step on, and nothing is offloaded",
            "of them off the device, 0 B on the host; 384.0 KiB recomputed",
            marks=pytest.mark.by_default,
        ),
        ({"rows": []}, "rows: []", "nothing is offloaded: no row says so"),
        ({"policy": "auto"}, "recomputed costs at most 3 % of a step", "there is no GPU here"),
        (
            {"policy": "auto", "backend": "simulated", "simulated": {"host_time": True}},
            "then what is offloaded and recomputed costs at most 3 % of a step",
            "has ended before it was found",
        ),
        (
            {"policy": {"kind": "memory_target", "memory_target": ["1GiB", "2GiB"]}},
            "recomputed lets at most 1.0 GiB, 2.0 GiB be reserved",
            "nothing is offloaded yet: the first steps",
        ),
        ({"enabled": False}, "nothing is offloaded: it is switched off", "it is switched off"),
    ],
)
def test_a_context_says_what_it_will_do_and_what_it_has_done(settings, plan, last, caplog):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    config = OffloadConfig(**settings)
    offload = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
    assert plan in repr(offload)
    assert plan in repr(offload.manager)
    with offload:
        loss = model(torch.randn(4096, 8)).sum()
    loss.backward()
    said, has_won = [plan in x for x in caplog.messages], "off the device" in last
    assert (said == [True]) is (has_won or "simulated" in settings), "what can't be isn't promised"
    say_last(offload.manager)
    assert last in caplog.text + offload.describe()
    assert ("in the last step at most " in caplog.text) is has_won


def test_a_program_says_its_plan_and_what_it_has_won_at_the_level_that_the_environment_names():
    said = run_python("-c", PROGRAM, MEGATRON_OFFLOAD_LOG="info").stderr
    plan, won, last = said.splitlines()
    assert "is offloaded from the first step on" in plan
    assert won.replace("in step 4", "in the last step") == last
    assert re.search(r": in the last step at most \d[.\d]* \S+ of activations were saved, \d", last)
    said, *_ = run_python("-c", PROGRAM, MEGATRON_OFFLOAD_LOG="debgu").stderr.splitlines()
    assert said == "MEGATRON_OFFLOAD_LOG is a level, and not 'debgu'; did you mean 'debug'?"


@pytest.mark.parametrize("is_dropped", [False, True])
def test_what_groups_have_at_their_peak_is_of_what_is_alive(is_dropped):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4096, 8)
    config = OffloadConfig(policy="modules")
    offload, peaks = get_act_offloading_ctx_manager(model, config=config), []
    for num_at_once in (1, 2, 1):
        losses = []
        for _ in range(num_at_once):
            with offload:
                losses.append((model(x) * torch.tensor(2.0)).sum())
            if is_dropped:
                losses = losses[:0]
        for loss in losses:
            loss.backward()
        offload.end_step()
        peaks.append(offload.last_step.peak_recorded_bytes)
    once = 2 * x.nbytes + 4  # what is too small to move counts, and what two save once
    assert peaks == [once, once if is_dropped else 2 * once, once]

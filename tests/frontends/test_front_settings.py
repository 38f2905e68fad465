"""What a front door is reported is followed, or refused with what to use instead."""

from __future__ import annotations

import pytest
import torch
from programs import make_config, make_manager

from megatron_offload import CPUOffload, OffloadActivations, OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.frontends.around import _UNFOLLOWED, followed
from megatron_offload.integrations.transformer_engine import (
    operation_groups,
    reset_operation_groups,
)

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


@pytest.fixture(autouse=True)
def _forget():
    yield
    CPUOffload.forget("a tag")
    reset_operation_groups()


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
    DOORS[door](OffloadConfig(backend="simulated"))


@pytest.mark.parametrize("door", _UNFOLLOWED)
def test_a_door_takes_all_else(door):
    for key in OffloadConfig.model_fields.keys() - {*_UNFOLLOWED[door], "recompute"}:
        followed(door, config_with(key), None)


def test_a_key_that_is_set_to_none_asks_for_nothing():
    CPUOffload(0.5, "a tag", OffloadConfig(policy=None, backend="simulated"))


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


def test_arguments_that_a_given_manager_contradicts_are_refused():
    for argument in ("use_pin_memory", "use_streams"):
        with pytest.raises(ConfigError, match=f"{argument} is False"):
            OffloadActivations(manager=make_manager(), **{argument: False})
    with pytest.raises(ConfigError, match="min_offload_size is 7"):
        OffloadActivations(min_offload_size=7, manager=make_manager(min_tensor_bytes=512))
    with pytest.raises(ConfigError, match="modules"):
        OffloadActivations(manager=make_manager(modules=("core_attn",)))

"""What a configuration asks of the engine is done, or refused."""

from __future__ import annotations

import pytest
import torch
from programs import (
    assert_same,
    make_config,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)

from megatron_offload import CPUOffload, OffloadActivations
from megatron_offload.config import OffloadConfig

ORDER = one_forward_one_backward(4, depth=2)


def test_making_a_configuration_means_on():
    assert OffloadConfig().enabled


def test_what_is_not_enabled_records_and_moves_nothing_until_it_is_configured_again():
    model, manager = make_model(), make_manager()
    expected = run_step(model, None, ORDER)
    manager.configure(make_config(enabled=False), backend=manager.backend)
    manager.enable_offload()  # megatron-core's layers call it; it is no word of the user's
    for _ in range(2):
        assert_same(expected, run_step(model, manager, ORDER))
        assert manager.last_step.num_groups == 0
        assert not manager.last_step.by_name
    assert manager.host_pool.stats.slab_bytes_total == 0
    manager.configure(make_config(), backend=manager.backend)
    assert_same(expected, run_step(model, manager, ORDER))
    assert manager.last_step.offloaded_bytes > 0


def test_an_explicit_copy_is_not_made_where_offload_is_not_enabled():
    manager = make_manager(enabled=False)
    chunk = manager._make_chunk(0, 0, 0)
    group = chunk.start_group("by hand")
    record = group.pack(torch.ones(64))
    manager.offload(group)
    assert manager.host_pool.stats.in_use_bytes == 0
    assert torch.equal(record.unpack(), torch.ones(64))


@pytest.mark.parametrize(
    "make",
    [
        lambda config: OffloadActivations(min_offload_size=0, config=config),
        lambda config: CPUOffload(1.0, tag="not enabled", config=config),
    ],
    ids=["OffloadActivations", "CPUOffload"],
)
def test_a_front_door_whose_configuration_is_not_enabled_moves_nothing(make):
    CPUOffload.forget("not enabled")
    offload = make(make_config(enabled=False))
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        with offload:
            loss = (x * x).tanh().square().sum()
        loss.backward()
        del loss
        offload.end_step()
    assert offload.last_step.offloaded_bytes == 0
    CPUOffload.forget("not enabled")


def test_groups_that_nobody_marks_stop_while_offload_is_disabled():
    offload = OffloadActivations(min_offload_size=0, config=make_config())
    x = torch.randn(64, 64, requires_grad=True)
    offload.manager.disable_offload()
    with offload:
        loss = (x * x).tanh().square().sum()
    loss.backward()
    del loss
    assert not offload.end_step()
    offload.manager.enable_offload()
    with offload:
        loss = (x * x).tanh().square().sum()
    loss.backward()
    del loss
    assert offload.end_step()
    assert offload.last_step.offloaded_bytes > 0
    offload.close()

"""What groups save counts once, moved or not, and what something else keeps is reported apart."""

from __future__ import annotations

import pytest
import torch
from programs import KIB, Times, in_group, make_manager
from torch import nn

from megatron_offload.observe.recorder import profile_step


def offload(manager, tensors, name):
    """Save ``tensors`` in one group; return its loss."""
    x = torch.zeros(1, requires_grad=True)
    return in_group(manager, lambda x: Times.apply(x, *tensors), x, name)


def record(manager, step, *, moves=False):
    with profile_step(manager, moves=moves) as recorded:
        manager.begin_chunk()
        step()
        manager.reset()
    return [(g.name, g.num_bytes, g.externally_referenced_bytes) for g in recorded.profile.groups]


@pytest.mark.parametrize("moves", [True, False])
def test_what_two_groups_share_counts_in_the_first(moves):
    manager = make_manager()

    def step():
        shared = torch.ones(1024)
        loss = offload(manager, [shared], "first")
        loss = loss + offload(manager, [shared, torch.ones(512)], "second")
        del shared
        loss.backward()

    found = record(manager, step, moves=moves)
    assert found == [("first", 4 * KIB, 0), ("second", 2 * KIB, 0)]
    if moves:
        assert found == [(g.name, g.num_bytes, 0) for g in manager.last_profile.groups]


def test_of_a_storage_that_is_saved_in_parts_each_group_counts_its_own():
    manager = make_manager()

    def step():
        both = torch.ones(2048)
        loss = offload(manager, [both[:1024]], "first")
        loss = loss + offload(manager, [both], "second")
        del both  # what is let go before backward can be freed
        loss.backward()

    assert record(manager, step) == [("first", 4 * KIB, 0), ("second", 4 * KIB, 0)]


@pytest.mark.parametrize("moves", [True, False])
def test_what_the_program_keeps_can_not_be_freed(moves):
    manager = make_manager(prefetch_bytes=0)

    def step():
        kept = torch.ones(1024)
        loss = offload(manager, [kept, torch.ones(512)], "group")
        loss = loss + offload(manager, [torch.ones(256)], "behind")
        loss.backward()
        assert float(kept.sum()) == 1024

    for _ in range(2):
        found = record(manager, step, moves=moves)
        assert found == [("group", 2 * KIB, 4 * KIB), ("behind", KIB, 0)]


def test_who_lets_go_before_the_last_group_that_shares_it_keeps_nothing():
    manager = make_manager()

    def step():
        kept = [torch.ones(1024)]
        loss = offload(manager, kept, "first")
        between = torch.zeros(1, requires_grad=True) * 1
        between.register_hook(lambda grad: kept.clear())
        loss = loss + between
        (loss + offload(manager, kept, "second")).backward()

    assert record(manager, step) == [("first", 4 * KIB, 0), ("second", 0, 0)]


def test_a_buffer_is_kept_by_its_module():
    manager = make_manager()
    module = nn.Module()
    module.register_buffer("table", torch.ones(1024))
    module.nothing = nn.Parameter(torch.ones(1))
    module.register_buffer("absent", None)

    def step():
        other = torch.ones(256)
        offload(manager, [module.table, other], "group").backward()

    assert record(manager, step) == [("group", 0, 5 * KIB)]

"""Which groups of a step need no record."""

from __future__ import annotations

import pytest

from megatron_offload.core.profile import GroupKey, GroupProfile, RecomputeUnit, StepProfile
from megatron_offload.core.skipping import skipped_groups


def step_of(*sizes, num_chunks=1, recomputed=None):
    """Return a step of chunks of groups of these sizes; ``recomputed`` are units by order."""
    groups = (
        GroupProfile(
            GroupKey(chunk, order), "g", size, recomputed=(recomputed or {}).get(order, ())
        )
        for chunk in range(num_chunks)
        for order, size in enumerate(sizes)
    )
    return StepProfile(tuple(groups), ())


def passing(profile, *moving, shared=(), limits=(1000, 1000), chunk=0):
    """Return the orders of what is skipped in a chunk where all stay but these orders."""
    kept = {group.key for group in profile.groups if group.key.order not in moving}
    pairs = [(GroupKey(0, a), GroupKey(0, b)) for a, b in shared]
    found = skipped_groups(profile, kept, pairs, *limits)
    assert all(found[key].key == key for key in found)
    return [key.order for key in found if key.chunk == chunk]


@pytest.mark.parametrize("chunk", [0, 1])
def test_what_is_kept_is_skipped_but_the_first_of_a_chunk_and_the_last_behind_what_moves(chunk):
    step = step_of(*[10] * 6, num_chunks=2)
    assert passing(step, chunk=chunk) == [1, 2, 3, 4, 5]
    assert passing(step, 1, limits=(20, 20), chunk=chunk) == [2, 3, 5]
    assert passing(step, 3, chunk=chunk) == [1, 2, 4]
    assert passing(step, *range(6), chunk=chunk) == []


def test_behind_what_moves_there_is_a_boundary_where_it_is_released_and_where_it_is_asked_for():
    step = step_of(*[10] * 12)
    assert passing(step, 2, limits=(30, 30)) == [1, 3, 4, 5, 7, 8, 9, 10, 11]
    assert passing(step, 2, limits=(20, 50)) == [1, 3, 4, 6, 7, 9, 10, 11]
    assert passing(step, 2, 6, limits=(30, 30)) == [1, 3, 4, 5, 7, 8, 9, 11]
    assert passing(step, 2, limits=(0, 0)) == [1, 4, 5, 6, 7, 8, 9, 10, 11]


def test_what_is_recomputed_is_recorded_and_so_is_what_it_is_made_from():
    unit = RecomputeUnit("gelu", 10, needs=(GroupKey(0, 1),))
    assert passing(step_of(*[10] * 6, recomputed={3: (unit,)})) == [2, 4, 5]


def test_what_shares_memory_with_what_is_recorded_is_recorded():
    step = step_of(*[10] * 8)
    assert passing(step, 3, shared=[(3, 4), (1, 3)]) == [2, 5, 6]
    assert passing(step, 3, shared=[(5, 6), (4, 5), (3, 4)]) == [1, 2], "and so on"
    assert passing(step, 3, shared=[(5, 6)]) == [1, 2, 4, 5, 6]

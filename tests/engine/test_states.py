"""The state table of a group."""

from __future__ import annotations

import pytest
from programs import make_manager

from megatron_offload.core.group import MOVES, GroupState
from megatron_offload.errors import StateError


def make_group():
    manager = make_manager()
    return manager.start_group(manager.begin_chunk(), "core_attn")


def paths_to(state):
    """Return one sequence of moves from RECORDING that ends in ``state``."""
    paths = {GroupState.RECORDING: []}
    frontier = [GroupState.RECORDING]
    while frontier:
        here = frontier.pop()
        for there in MOVES[here]:
            if there not in paths:
                paths[there] = [*paths[here], there]
                frontier.append(there)
    return paths[state]


@pytest.mark.parametrize("here", GroupState, ids=lambda s: s.name)
@pytest.mark.parametrize("there", GroupState, ids=lambda s: s.name)
def test_only_moves_in_the_table_are_made(here, there):
    assert set(MOVES) == set(GroupState)
    group = make_group()
    for state in paths_to(here):
        group.advance(state)
    if there in MOVES[here]:
        group.advance(there)
        assert group.state is there
        return
    with pytest.raises(StateError, match="core_attn") as error:
        group.advance(there)
    assert group.state is here, "a refused move must change nothing"
    assert f"from {here.name} to {there.name}" in str(error.value)

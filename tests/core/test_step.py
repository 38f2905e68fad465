"""What is decided at the boundaries of groups, with nothing behind it that could be offloaded.

And the state table of a group.
"""

from __future__ import annotations

import pytest

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import MOVES, Group, GroupState
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.core.step import StepDecisions
from megatron_offload.core.window import InFlightWindow
from megatron_offload.errors import StateError


class PlainGroup(Group):
    is_spent = False


class Paper:
    """Does what is asked for by writing it down."""

    def __init__(self, *limits, has_memory=True):
        self.budget = DeviceBudget(*limits)
        self.window = InFlightWindow(self.release, self.budget)
        self.decisions = StepDecisions(self, self.window, self.budget)
        self.has_memory = has_memory
        self.asked = []

    def note(self, group, state, what):
        group.advance(state)
        self.asked.append(f"{what} {group.key.order}")

    def keep(self, group, reason):
        self.note(group, GroupState.RESIDENT, f"keep ({reason.split()[0]})")

    def offload(self, group):
        self.window.add(group, group.num_bytes)
        self.asked.append(f"offload {group.key.order}")

    def release(self, group):
        if group.state is GroupState.OFFLOADING:
            self.asked.append(f"release {group.key.order}")

    def cancel(self, group, *, is_late):
        group.land(group.num_bytes)
        self.note(group, GroupState.RESIDENT, "late cancel" if is_late else "cancel")

    def reload(self, group, *, is_late):
        if is_late or self.has_memory:
            self.note(group, GroupState.RELOADING, "late reload" if is_late else "reload")
        return is_late or self.has_memory

    def forward(self, *sizes, **how):
        groups = []
        for order, num_bytes in enumerate(sizes):
            group = PlainGroup(GroupKey(0, order), "g", self.budget)
            group.num_bytes = num_bytes
            self.decisions.start(group)
            self.decisions.commit(group, **how)
            groups.append(group)
        return groups

    def backward(self, groups):
        for group in reversed(groups):
            self.decisions.enter_backward(group)
            self.decisions.leave_backward(group)

    def step(self, *sizes, profile=None, **how):
        self.asked.clear()
        self.decisions.begin_step(profile)
        groups = self.forward(*sizes, **how)
        self.backward(groups)
        self.window.drain()
        budget = self.budget
        assert (budget.inflight_bytes, budget.held_bytes) == (0, 0)
        return self.asked


def profile_of(*sizes):
    keys = [GroupKey(0, order) for order in range(len(sizes))]
    at = [sum(sizes[:order]) for order in range(len(sizes))]
    groups = tuple(map(GroupProfile, keys, "g" * len(sizes), sizes, at))
    ends = [sum(sizes) + sum(sizes[order + 1 :]) for order in range(len(sizes))]
    return StepProfile(groups, tuple(reversed(keys)), tuple(reversed(ends)))


def test_in_a_step_that_is_unknown_a_chunk_is_reloaded_from_its_end():
    assert Paper(10, 10).step(10, 10, 10) == [
        *("offload 0", "offload 1", "offload 2", "release 0"),
        *("late cancel 2", "cancel 1", "reload 0"),
    ]


def test_a_step_that_is_known_keeps_what_would_be_reloaded_at_once():
    asked = Paper(10, 10).step(10, 10, 10, 10, profile=profile_of(10, 10, 10, 10))
    assert [one for one in asked if one.startswith("keep")] == ["keep (needed) 3"]
    assert not any(one.startswith("late") for one in asked)


def test_who_has_to_move_moves_and_who_was_kept_is_kept():
    known = profile_of(10, 10)
    asked = Paper(10, 10).step(10, 10, profile=known, must_move=True)
    assert asked[:2] == ["offload 0", "offload 1"]
    assert Paper(10, 10).step(10, keep_reason="asked to") == ["keep (asked) 0"]
    assert Paper(10, 10).step(0) == [], "nothing to move"


def test_what_the_device_has_no_memory_for_is_left_until_its_backward():
    asked = Paper(0, 20, has_memory=False).step(10, 10, 10, must_move=True)
    assert [one for one in asked if "reload" in one] == ["late reload 0"]


def test_under_limits_that_were_set_the_clock_counts_from_the_first_backward_on():
    paper = Paper(20, 20)
    paper.decisions.begin_step(profile_of())
    (moved,) = paper.forward(10)
    paper.decisions.tick(100)
    assert moved.state is GroupState.OFFLOADING
    other = PlainGroup(GroupKey(1, 0), "g", paper.budget)
    paper.decisions.start(other)
    paper.decisions.commit(other)
    paper.decisions.enter_backward(other)
    paper.decisions.tick(1)
    assert moved.state is GroupState.ON_HOST


def test_a_graph_that_outlives_its_step_counts_for_nothing():
    paper = Paper(0, 10)
    paper.decisions.begin_step(None)
    groups = paper.forward(10, 10)
    paper.decisions.begin_step(None)
    paper.backward(groups)
    assert paper.asked[-2:] == ["late cancel 1", "late reload 0"]
    assert (paper.budget.held_bytes, paper.window.step_bytes) == (0, 0)
    assert paper.decisions.backward_order == []


@pytest.mark.parametrize("here", GroupState, ids=lambda s: s.name)
def test_only_moves_in_the_table_are_made(here):
    group = PlainGroup(GroupKey(0, 0), "core_attn", DeviceBudget())
    for there in MOVES[here]:
        group.state = here
        group.advance(there)
        assert group.state is there
    group.state = here
    for there in set(GroupState) - MOVES[here]:
        with pytest.raises(StateError, match=f"core_attn.* from {here.name} to {there.name}"):
            group.advance(there)
        assert group.state is here, "a refused move must change nothing"


def test_the_same_groups_of_other_sizes():
    assert profile_of(40, 20).has_groups_of(profile_of(1, 2))
    assert not profile_of(40, 20).has_groups_of(profile_of(40))


def test_limits_that_are_not_set_count_layers_without_rows_as_if_they_had_some():
    paper = Paper()
    paper.decisions.begin_step(profile_of(10))
    for _ in range(2):
        groups = paper.forward(10)
        for _ in range(15):
            paper.decisions.tick(10)
        for _ in range(15):
            paper.decisions.tick(10, is_backward=True)
        paper.backward(groups)
    assert (paper.budget.max_inflight_bytes, paper.budget.prefetch_bytes) == (20, 20)

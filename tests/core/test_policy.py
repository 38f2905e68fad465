"""Megatron's numbers (fraction, bytes per pipeline rank), and a share."""

from __future__ import annotations

import pytest

from megatron_offload.core.policy import KeepRules
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile


def make_profile(sizes=(100,) * 4):
    keys = [GroupKey(chunk, order) for chunk in range(2) for order in range(len(sizes))]
    return StepProfile(
        groups=tuple(GroupProfile(key, f"group{key.order}", sizes[key.order]) for key in keys),
        backward_order=tuple(reversed(keys)),
    )


@pytest.mark.parametrize(
    ("fraction", "num_kept"), [(1.0, 0), (0.99, 0), (0.75, 1), (0.5, 2), (0.25, 3), (0.0, 4)]
)
def test_a_fraction_keeps_the_last_groups_of_every_chunk(fraction, num_kept):
    kept = KeepRules(fraction=fraction).plan(make_profile())
    expected = {GroupKey(c, g) for c in range(2) for g in range(4 - num_kept, 4)}
    assert set(kept) == expected


@pytest.mark.parametrize(
    ("keep_bytes", "num_kept"), [(0, 0), (1, 1), (100, 1), (101, 2), (9999, 8)]
)
def test_bytes_to_keep_are_taken_from_what_backward_needs_first(keep_bytes, num_kept):
    profile = make_profile()
    kept = KeepRules(keep_bytes=keep_bytes).plan(profile)
    assert list(kept) == list(profile.backward_order[:num_kept])


def test_every_kept_group_has_a_reason_and_empty_ones_count_for_nothing():
    rules = KeepRules(fraction=0.5, keep_bytes=100)
    reasons = rules.plan(make_profile()).values()
    assert all(reasons)
    assert any("fraction that may be offloaded is 0.5" in reason for reason in reasons)
    assert any("100 bytes" in reason for reason in reasons)
    assert rules.plan(make_profile((0,) * 4)) == {}

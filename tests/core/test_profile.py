"""What a profile says of the steps to come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_offload.core.profile import GroupKey, GroupProfile, RecomputeUnit, StepProfile

KEYS = [GroupKey(0, index) for index in range(4)]


def make_profile(*, backward_at_bytes=(100, 100, 140, 160), sizes=(40, 20, 40, 0)):
    """Four groups of one chunk, the last of them empty; backward in reverse."""
    names = ("attn", "mlp", "attn", "mlp")
    clock = [sum(sizes[:index]) for index in range(4)]
    return StepProfile(
        groups=tuple(GroupProfile(*each) for each in zip(KEYS, names, sizes, clock, strict=True)),
        backward_order=tuple(reversed(KEYS)),
        backward_at_bytes=tuple(backward_at_bytes),
    )


@pytest.mark.parametrize(
    ("device_bytes", "kept", "expected"),
    [
        (39, (), {"attn": 80, "mlp": 20}),
        (40, (), {"attn": 40, "mlp": 20}),
        (60, (), {"attn": 40}),
        (100, (), {}),
        (59, (KEYS[2],), {"attn": 40, "mlp": 20}),  # what is kept lies between, too
        (60, (KEYS[2],), {"attn": 40}),
        (60, (KEYS[0],), {}),
    ],
)
def test_what_is_offloaded_when_backward_begins(device_bytes, kept, expected):
    assert make_profile().released_bytes(kept, device_bytes) == expected


def test_what_is_committed_after_the_first_backward_is_not_offloaded_yet():
    late = make_profile(backward_at_bytes=(50, 100, 140, 160))
    assert late.released_bytes((), 0) == {"attn": 40, "mlp": 20}


def test_what_was_recomputed_of_an_earlier_group_is_offloaded_too():
    made, kept = RecomputeUnit("norm", 7), RecomputeUnit("mlp_act", 9, is_recomputed=False)
    profile = make_profile(backward_at_bytes=(50, 100, 140, 160))
    groups = (group._replace(recomputed=(made, kept)) for group in profile.groups)
    away = replace(profile, groups=tuple(groups)).released_bytes((), 0)
    assert away == {"attn": 40 + 7, "mlp": 20 + 7}, "the others come after the first backward"


def test_the_same_groups_of_other_sizes():
    assert make_profile().has_groups_of(make_profile(sizes=(1, 2, 3, 4)))
    other = make_profile()
    fewer = StepProfile(other.groups[1:], other.backward_order)
    assert not other.has_groups_of(fewer)

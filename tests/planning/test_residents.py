"""Which groups stay on the device when there is room for some bytes at a time."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.planning.policy import choose_residents


def make_profile(spans, sizes=None):
    """Build a step from (commit, backward) times."""
    sizes = sizes or [1] * len(spans)
    keys = [GroupKey(0, index) for index in range(len(spans))]
    order = sorted(range(len(spans)), key=lambda index: spans[index][1])
    return StepProfile(
        groups=tuple(
            GroupProfile(keys[i], "g", sizes[i], committed_at_bytes=spans[i][0])
            for i in range(len(spans))
        ),
        backward_order=tuple(keys[i] for i in order),
        backward_at_bytes=tuple(spans[i][1] for i in order),
    )


def most_at_once(profile, chosen):
    ends = dict(zip(profile.backward_order, profile.backward_at_bytes, strict=True))
    kept = [g for g in profile.groups if g.key in chosen]
    return max(
        (
            sum(o.num_bytes for o in kept if o.committed_at_bytes <= at <= ends[o.key])
            for at in (g.committed_at_bytes for g in kept)
        ),
        default=0,
    )


def random_spans(seed, count):
    rng = random.Random(seed)
    starts = [rng.randrange(30) for _ in range(count)]
    return [(start, start + rng.randrange(1, 20)) for start in starts], rng


def test_the_shortest_lived_stay():
    profile = make_profile([(0, 100), (1, 9), (10, 20), (21, 90), (22, 30)])
    assert choose_residents(profile, 1) == {GroupKey(0, i) for i in (1, 2, 4)}


def test_no_room_keeps_nothing_and_plenty_keeps_all():
    profile = make_profile([(0, 100), (1, 9)], [3, 5])
    assert choose_residents(profile, 0) == frozenset()
    assert choose_residents(profile, 2) == frozenset()
    assert choose_residents(profile, 8) == {GroupKey(0, 0), GroupKey(0, 1)}


def test_groups_without_a_backward_or_without_bytes_do_not_count():
    profile = make_profile([(0, 5), (1, 4)], [0, 1])
    without = StepProfile(profile.groups, profile.backward_order[1:], profile.backward_at_bytes[1:])
    assert choose_residents(without, 10) <= {GroupKey(0, 1)}
    assert choose_residents(profile, 10) == {GroupKey(0, 1)}


@pytest.mark.parametrize("seed", range(30))
def test_the_room_is_never_exceeded(seed):
    spans, rng = random_spans(seed, 60)
    profile = make_profile(spans, [rng.randrange(1, 9) for _ in spans])
    for room in (1, 5, 13, 40):
        assert most_at_once(profile, choose_residents(profile, room)) <= room


@pytest.mark.parametrize("seed", range(20))
def test_for_one_size_no_choice_keeps_more(seed):
    spans, _ = random_spans(seed, 9)
    profile = make_profile(spans)
    keys = [group.key for group in profile.groups]
    for room in (1, 2, 3):
        best = max(
            len(chosen)
            for count in range(len(keys) + 1)
            for chosen in itertools.combinations(keys, count)
            if most_at_once(profile, set(chosen)) <= room
        )
        assert len(choose_residents(profile, room)) == best

"""Megatron's numbers (module list, fraction, bytes per pipeline rank), and a share."""

from __future__ import annotations

import pytest
from problems import profiles

from megatron_offload.core.policy_config import RatioConfig
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.planning.policy import ModulesPolicy, kept_by_rule


def make_profile(chunks=2, groups=4, num_bytes=100):
    keys = [GroupKey(c, g) for c in range(chunks) for g in range(groups)]
    return StepProfile(
        groups=tuple(GroupProfile(key, f"group{key.order}", num_bytes) for key in keys),
        backward_order=tuple(reversed(keys)),
    )


@pytest.mark.parametrize(
    ("fraction", "num_kept"), [(1.0, 0), (0.99, 0), (0.75, 1), (0.5, 2), (0.25, 3), (0.0, 4)]
)
def test_a_fraction_keeps_the_last_groups_of_every_chunk(fraction, num_kept):
    kept = ModulesPolicy(fraction=fraction).plan(make_profile())
    expected = {GroupKey(c, g) for c in range(2) for g in range(4 - num_kept, 4)}
    assert set(kept) == expected


@pytest.mark.parametrize(
    ("keep_bytes", "num_kept"), [(0, 0), (1, 1), (100, 1), (101, 2), (9999, 8)]
)
def test_bytes_to_keep_are_taken_from_what_backward_needs_first(keep_bytes, num_kept):
    profile = make_profile()
    kept = ModulesPolicy(keep_bytes=keep_bytes).plan(profile)
    assert list(kept) == list(profile.backward_order[:num_kept])


def test_empty_groups_count_for_nothing():
    profile = make_profile(num_bytes=0)
    assert ModulesPolicy(fraction=0.5, keep_bytes=100).plan(profile) == {}


def test_every_kept_group_has_a_reason():
    kept = ModulesPolicy(fraction=0.5, keep_bytes=100).plan(make_profile())
    assert all(kept.values())
    assert any("fraction 0.5" in reason for reason in kept.values())
    assert any("100 bytes" in reason for reason in kept.values())


def test_modules_that_are_not_listed_are_kept():
    profile = make_profile()
    kept = ModulesPolicy(modules=("group[01]", "other")).plan(profile)
    assert {key.order for key in kept} == {2, 3}


def test_later_ranks_keep_more():
    policy, num_kept = ModulesPolicy(delta_bytes_across_pp_ranks=100), []
    for profile in profiles(ranks=3, microbatches=4):
        kept = kept_by_rule(policy, profile)
        assert kept == ModulesPolicy(keep_bytes=100 * profile.run.pp_rank).plan(profile)
        num_kept.append(len(kept))
    assert num_kept == [0, 1, 1]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_a_ratio_moves_that_share_of_the_bytes_to_within_a_group(ratio):
    for profile in profiles(ranks=2, virtual=2):
        kept = kept_by_rule(RatioConfig(kind="ratio", ratio=ratio), profile)
        assert all(kept.values())
        sizes = [group.num_bytes for group in profile.groups]
        moved = [group.num_bytes for group in profile.groups if group.key not in kept]
        assert 0 <= ratio * sum(sizes) - sum(moved) < max(sizes)
        assert moved == sizes[: len(moved)], "the first in the order of the step"

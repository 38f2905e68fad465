"""From measured profiles back to a step: waiting is no work, and what was measured is reloaded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from job_profiles import profiles_of
from problems import make_job, random_job

from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import (
    GroupTimes,
)
from megatron_offload.errors import ConfigError
from megatron_offload.planning.files import parse_profile, to_json
from megatron_offload.planning.job import NO_OFFLOAD, RankSettings, UnitWork
from megatron_offload.planning.policy import ModulesPolicy
from megatron_offload.planning.profiled_job import (
    check_profiles,
    job_from_profiles,
    job_of,
    measured_peak_bytes,
    schedule_of,
)
from megatron_offload.planning.schedule import Pass, PassKind, Schedule, make_schedule
from megatron_offload.planning.simulate import settings_of, simulate


def test_what_no_profile_can_tell_is_refused():
    job = make_job()
    timed = profiles_of(job)
    untimed = [replace(profile, times=()) for profile in timed]
    with pytest.raises(ConfigError, match="no times"):
        job_from_profiles(untimed, job.schedule, job.machine)
    with pytest.raises(ConfigError, match="the profile has 4 chunks, the schedule 6"):
        job_from_profiles(timed, make_schedule("1f1b", 2, 6), job.machine)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_profile_of_a_job_says_agrees_with_the_simulator(seed):
    job = random_job(random.Random(seed))
    step = simulate(job, None)
    for profile, rank in zip(profiles_of(job), step.ranks, strict=True):
        assert profile.step_us == pytest.approx(step.step_us, rel=1e-12)
        parse_profile(to_json(profile), "it")
        assert measured_peak_bytes(profile) == rank.peak_reserved_bytes


def disturbed(profile, chunk, us):
    """Return a profile in which the host was away in the first forward of a chunk."""
    first = next(i for i, group in enumerate(profile.groups) if group.key.chunk == chunk)
    began_us = profile.times[first].started_us
    times = (GroupTimes(*(at + us * (at > began_us) for at in one)) for one in profile.times)
    return replace(profile, times=tuple(times), step_us=profile.step_us + us)


def test_an_absent_host_in_half_of_the_microbatches_makes_no_step_longer():
    job = make_job(ranks=1, microbatches=4)
    (profile,) = profiles_of(job)
    longer = disturbed(disturbed(profile, 1, 1e5), 2, 3e5)
    again = job_of([longer], job.schedule, job.machine)
    assert simulate(again).step_us == pytest.approx(simulate(job).step_us, rel=1e-6)


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_job_of_profiles_has_their_peaks_and_takes_their_time(virtual):
    job = make_job(ranks=2, virtual=virtual, microbatches=4)
    again = job_of(profiles_of(job), job.schedule, job.machine)
    before, after = simulate(job), simulate(again)
    assert after.step_us == pytest.approx(before.step_us, rel=0.02)
    for one, two in zip(before.ranks, after.ranks, strict=True):
        assert two.peak_reserved_bytes == one.peak_reserved_bytes


def with_first_recomputed(job):
    stages = (x.with_recompute(None if at < 2 else ()) for at, x in enumerate(job.stages))
    return replace(job, stages=tuple(stages))


def test_what_some_virtual_stages_have_recomputed_is_not_taken_for_always_there():
    job = make_job(ranks=2, virtual=2, microbatches=4)
    groups = (
        replace(group, units=(UnitWork("norm", group.num_bytes // 2, 1.0),))
        for group in job.stages[0].groups
    )
    stage = replace(job.stages[0], groups=tuple(groups))
    seen = with_first_recomputed(replace(job, stages=(stage,) * len(job.stages)))
    again = with_first_recomputed(job_of(profiles_of(seen), seen.schedule, seen.machine))
    for one, two in zip(simulate(seen).ranks, simulate(again).ranks, strict=True):
        assert 0 < one.recomputed_bytes == two.recomputed_bytes
        assert two.peak_reserved_bytes == one.peak_reserved_bytes


def test_what_something_else_holds_of_a_group_never_moves():
    (profile,) = profiles_of(make_job(ranks=1))
    held = tuple(group._replace(externally_referenced_bytes=5) for group in profile.groups)
    again = job_from_profiles([replace(profile, groups=held)], schedule_of([profile]), Machine())
    assert [work.kept_bytes for work in again.stages[0].groups if work.is_marked] == [5] * 5


@pytest.mark.parametrize("job", [make_job(ranks=3, microbatches=6), make_job(name="gpipe")])
def test_a_schedule_is_what_was_seen(job):
    assert schedule_of(profiles_of(job)).ranks == job.schedule.ranks


@pytest.mark.parametrize("group_size", [2, 4])
def test_virtual_stages_are_interleaved_1f1b_or_refused(group_size):
    schedule = make_schedule("interleaved", 2, 4, 2, group_size)
    job = replace(make_job(virtual=2), schedule=schedule)
    assert schedule_of(profiles_of(job)) == schedule
    breadth_first = [  # as torch's ScheduleLoopedBFS
        [Pass(stage, PassKind.FORWARD, m) for stage in (rank, rank + 2) for m in range(4)]
        + [Pass(stage, PassKind.BACKWARD, m) for stage in (rank + 2, rank) for m in range(4)]
        for rank in range(2)
    ]
    other = Schedule("breadth first", 4, 4, tuple(map(tuple, breadth_first)))
    with pytest.raises(ConfigError, match="rank 0 runs its virtual stages in another order"):
        schedule_of(profiles_of(replace(job, schedule=other)))


def test_ranks_that_have_seen_other_numbers_of_microbatches_are_refused():
    first, second = (profiles_of(make_job(microbatches=number)) for number in (4, 6))
    with pytest.raises(ConfigError, match="different numbers of microbatches"):
        schedule_of([first[0], second[1]])


def test_memory_that_leaves_out_what_moved_is_refused():
    moved = [replace(one, offloaded_bytes=9) for one in profiles_of(make_job())]
    with pytest.raises(ConfigError, match=r"rank 0 .* moved 9 bytes, which its memory doesn't"):
        job_of(moved, make_schedule("1f1b", 2, 4), Machine())


def test_a_rank_that_moves_nothing_has_no_engine_and_what_is_kept_does_not_move():
    job = make_job(ranks=4, virtual=2, microbatches=8)
    policy, default = ModulesPolicy(modules=("mlp_*",)), RankSettings(recompute=())
    settings = []
    for profile in profiles_of(job):
        everything = {group.key for group in profile.groups}
        assert settings_of(profile, everything, default) == NO_OFFLOAD
        settings.append(settings_of(profile, policy.plan(profile)))
    step = simulate(job, settings)
    for rank, result in zip(settings, step.ranks, strict=True):
        assert not set(result.moved) & rank.kept
    assert step.ranks[0].moved


@pytest.mark.parametrize("chosen", [[0], [0, 1, 1], [1]])
def test_one_profile_of_each_rank_is_needed(chosen):
    profiles = profiles_of(make_job())
    with pytest.raises(ConfigError, match=f"got those of {', '.join(map(str, chosen))}$"):
        check_profiles([profiles[index] for index in chosen])


def test_profiles_come_in_any_order_but_from_one_run():
    profiles = profiles_of(make_job())
    assert check_profiles(profiles[::-1]) == tuple(profiles)
    other = replace(profiles[1], run=profiles[1].run._replace(num_microbatches=8))
    with pytest.raises(ConfigError, match="of different runs"):
        check_profiles([profiles[0], other])

"""What a rank's streams have to do, before there is any time."""

from __future__ import annotations

from megatron_offload.core.trace import ByteCount
from megatron_offload.planning.job import (
    GroupWork,
    Job,
    RankSettings,
    StageWork,
    UnitWork,
)
from megatron_offload.planning.job_rows import with_units
from megatron_offload.planning.replay import OpKind, replay
from megatron_offload.planning.schedule import Pass, Schedule, make_schedule


def work(num_bytes, **more):
    return GroupWork("g", num_bytes, 1.0, 2.0, **more)


def one_rank(*groups, num_microbatches=1):
    return Job(make_schedule("gpipe", 1, num_microbatches), (StageWork(groups),), (0,))


def kinds(program):
    return "".join(OpKind(kind).name[0] for kind in program.kinds)


def test_chunks_and_groups_that_the_engine_does_not_see_take_no_position():
    unseen = work(5, is_marked=False)
    order = [(0, "F"), (1, "F"), (1, "B"), (0, "B")]
    passes = tuple(Pass(stage, kind, 0) for stage, kind in order)
    schedule = Schedule("any", 2, 1, (passes,))
    job = Job(schedule, (StageWork((unseen,)), StageWork((unseen, work(7)))), (0,))
    labels = replay(job, 0, RankSettings(), records=True).labels
    assert {label for label, _ in labels} == {"", "g[chunk 0, group 0]"}
    assert replay(job, 0, None).peak_device_bytes == 5 + 5 + 7


def test_a_group_leaves_is_released_and_is_reloaded():
    job = one_rank(work(10), work(10), work(10))
    program = replay(job, 0, RankSettings(max_inflight_bytes=10, prefetch_bytes=0))
    # Compute, Offload, compute, offload and Await of the first, compute (the last stays), await;
    # then backward: Compute, Reload of the one before, await, compute, and so on.
    assert kinds(program) == "COCOACACRACRAC"
    assert program.offloaded_bytes == program.reloaded_bytes == 20
    assert program.peak_host_bytes == 20


def test_labels_and_memory_are_kept_only_where_they_are_asked_for():
    job = one_rank(work(10), work(10))
    plain, recorded = (replay(job, 0, RankSettings(), records=flag) for flag in (False, True))
    assert plain.labels == plain.memory == []
    assert len(recorded.labels) == len(recorded.kinds)
    assert recorded.labels[0] == ("g[chunk 0, group 0]", False)
    _, last = recorded.memory[-1]
    assert (last[ByteCount.HELD], last[ByteCount.HOST], last[ByteCount.INFLIGHT]) == (0, 0, 0)
    assert (kinds(plain), kinds(recorded)) == ("C", "CCCC"), "no observer lies in between"


def test_what_is_recomputed_is_there_in_its_own_forward_and_backward_alone():
    norm = (UnitWork("norm", 6, 0.5),)
    job = one_rank(work(10, units=norm), work(1000, is_marked=False))
    job = with_units(job, {"norm", "other"})
    program = replay(job, 0, None, records=True)
    assert program.peak_device_bytes == 1004
    assert program.arguments == [1.0, 1.0, 2.0, 2.5]
    assert (program.recomputed_bytes, program.recompute_us) == (6, 0.5)
    alone = replay(with_units(one_rank(work(10, units=norm)), {"norm"}), 0, None)
    assert alone.peak_device_bytes == 10
    moving = replay(job, 0, RankSettings(max_inflight_bytes=0, prefetch_bytes=0))
    assert moving.offloaded_bytes == 4


def test_what_it_is_made_from_is_reloaded_before():
    units = (UnitWork("act", 10, 0.5, ("g",)),)
    job = one_rank(work(10), work(20, units=units), work(10, is_marked=False))
    settings = RankSettings(max_inflight_bytes=0, prefetch_bytes=0)
    # The second's backward makes from the first group what it needs, so both are reloaded before.
    assert kinds(replay(with_units(job, {"act"}), 0, settings)) == "COACOARC" + "RAAC"
    assert kinds(replay(job, 0, settings)) == "COACOARC" + "ACRAC"

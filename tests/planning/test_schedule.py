"""Schedules as data: the published orders, and what can't run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from problems import PIPELINE

from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.description import job_from_model
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork
from megatron_offload.planning.job_rows import with_rows
from megatron_offload.planning.model import ModelDescription
from megatron_offload.planning.schedule import Pass, make_schedule, steady_schedule
from megatron_offload.planning.simulate import simulate

NAMES = ("gpipe", "1f1b", "interleaved")


def words(schedule, rank):
    return " ".join(f"{one.stage}{one.kind}{one.microbatch}" for one in schedule.ranks[rank])


def test_small_schedules_are_the_published_ones():
    assert words(make_schedule("gpipe", 2, 3), 1) == "1F0 1F1 1F2 1B0 1B1 1B2"
    schedule = make_schedule("1f1b", 3, 4)
    assert words(schedule, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert words(schedule, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert words(schedule, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert words(make_schedule("interleaved", 2, 2, 2), 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert words(make_schedule("interleaved", 2, 4, 2), 1) == (
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


def make(name, num_ranks, num_virtual, factor):
    if name == "interleaved":
        return make_schedule(name, num_ranks, num_ranks * factor, num_virtual)
    return make_schedule(name, num_ranks, 3 * factor - 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_whole_and_can_run(name, num_ranks):
    for num_virtual, factor in itertools.product(
        (1, 2, 4) if name == "interleaved" else (1,), (1, 2, 3, 6)
    ):
        schedule = make(name, num_ranks, num_virtual, factor)
        wanted = itertools.product(
            range(schedule.num_stages), "FB", range(schedule.num_microbatches)
        )
        found = [one for passes in schedule.ranks for one in passes]
        assert len(found) == len(set(found))
        assert set(found) == {Pass(*one) for one in wanted}
        stage = StageWork((GroupWork("g", 0, 1.0, 2.0),))
        job = Job(schedule, (stage,) * schedule.num_stages, (0,) * num_ranks)
        work_us = 3 * schedule.num_stages * schedule.num_microbatches
        assert sum(rank.compute_us for rank in simulate(job).ranks) == work_us


@pytest.mark.parametrize(
    ("num_ranks", "num_virtual", "num_microbatches", "group_size"),
    [
        *((2, 2, 2, None), (4, 2, 8, None), (4, 3, 12, None)),
        *((2, 2, 5, 3), (4, 2, 10, 6), (3, 3, 10, 7), (2, 4, 7, 5)),
    ],
)
def test_interleaved_is_megatron_core_s_own(num_ranks, num_virtual, num_microbatches, group_size):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    size = group_size or num_ranks
    table = schedules.get_schedule_table(num_microbatches, num_virtual, size)
    schedule = make_schedule("interleaved", num_ranks, num_microbatches, num_virtual, group_size)
    stage = StageWork((GroupWork("g", 0, 1.0, 2.0),))
    job = Job(schedule, (stage,) * schedule.num_stages, (0,) * num_ranks)
    assert simulate(job).step_us > 0, "no rank waits for ever"
    for rank in range(num_ranks):
        forwards = [one for one in schedule.ranks[rank] if one.kind == "F"]
        assert [(one.microbatch, one.stage // num_ranks) for one in forwards] == table
        backwards = [one for one in schedule.ranks[rank] if one.kind == "B"]
        assert [
            (one.microbatch, num_virtual - 1 - one.stage // num_ranks) for one in backwards
        ] == table
        total = num_microbatches * num_virtual
        warmup = min(2 * (num_ranks - rank - 1) + (num_virtual - 1) * size, total)
        kinds = [one.kind for one in schedule.ranks[rank]]
        first = kinds.index("B")
        assert first == min(warmup + 1, total)
        assert schedule.stages_of(rank) == tuple(range(rank, num_ranks * num_virtual, num_ranks))


def test_1f1b_is_torch_s_own():
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for num_ranks, num_microbatches in ((4, 8), (3, 3)):
        schedule = make_schedule("1f1b", num_ranks, num_microbatches)
        for rank in range(num_ranks):
            num_warmup = min(num_microbatches, num_ranks - rank - 1)
            operations = torch_schedules._get_1f1b_rank_ops(
                1,
                num_ranks,
                num_warmup,
                num_microbatches - num_warmup,
                num_warmup,
                rank,
                lambda step, rank=rank: rank,
                lambda step, rank=rank: rank,
            )
            original = [str(one) for one in operations if one is not None]
            assert original == words(schedule, rank).split()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("1f1b", 2, 2, 2), "no virtual stages"),
        (("interleaved", 4, 6, 2), "4 leave 2; give more microbatches"),
        (("interleaved", 4, 10, 2, 3), "10 microbatches in groups of at least its 4 ranks"),
        (("interleaved", 4, 10, 2, 12), "another microbatch_group_size_per_vp_stage"),
        (("interleaved", 4, 3, 2), "4 leave 3; give more microbatches"),
        (("1f1b", 4, 8, 1, 4), "no virtual stages, got 1, in groups of 4"),
        (("gpipe", 10_000, 10_000), "at most"),
    ],
)
def test_sizes_that_no_schedule_has(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        make_schedule(*arguments)


@pytest.mark.parametrize("num_microbatches", [64, 200, 203])
@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 12, "virtual_stages": 3},
        {"layers": 13, "virtual_stages": 1, "stage_layers": [3, 6, 4], "pipeline_parallel": 3},
        {"pipeline_parallel": 1, "virtual_stages": 1},
        {"layers": 16, "pipeline_parallel": 8, "virtual_stages": 1},
    ],
)
def test_a_long_step_is_known_by_its_first_and_last_groups(changes, num_microbatches):
    if changes["virtual_stages"] > 1:
        num_microbatches -= num_microbatches % 2
    data = {**PIPELINE, "hidden": 4096, "ffn": 16384, "heads": 32, **changes}
    model = validate(ModelDescription, data | {"num_microbatches": num_microbatches}, "model")
    job = job_from_model(model, Machine())
    name = "interleaved" if model.virtual_stages > 1 else "1f1b"
    sizes = model.pipeline_parallel, num_microbatches, model.virtual_stages
    whole = replace(job, schedule=make_schedule(name, *sizes))
    num_passes = sum(map(len, job.schedule.ranks))
    assert num_passes < sum(map(len, whole.schedule.ranks)) / 2
    everywhere = RowConfig(site="layer", layers="0-99", offload="all")
    some = RowConfig(site="mlp", layers="0,2,4,6", offload="all")
    for rows in ((), (some,), (everywhere, RowConfig(site="norm", recompute=True))):
        short, exact = (simulate(with_rows(x, rows), RankSettings()) for x in (job, whole))
        assert short.step_us == pytest.approx(exact.step_us, rel=1e-3)
        for one, other in zip(short.ranks, exact.ranks, strict=True):
            assert one.peak_reserved_bytes == other.peak_reserved_bytes
            assert one.peak_host_bytes == other.peak_host_bytes
            assert one.offloaded_bytes == other.offloaded_bytes
            assert one.recomputed_bytes == other.recomputed_bytes
            assert one.compute_us == pytest.approx(other.compute_us)
            lost_us, other_us = sum(one.stall_us.values()), sum(other.stall_us.values())
            assert lost_us == pytest.approx(other_us, rel=0.01, abs=2e-3 * exact.step_us)


def test_as_many_microbatches_as_there_may_be_take_no_longer():
    short, long = (steady_schedule("interleaved", 4, number, 2) for number in (40, 100_000))
    assert short.ranks == long.ranks
    assert (short.num_repeats, long.num_repeats) == (7, 24_997)

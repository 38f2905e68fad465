"""Two ranks that plan together: they measure alike, and an error on one is an error on all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from programs import make_config
from virtual_clock import RUN, VirtualJob

from megatron_offload.autotune.plan_run import check_plan
from megatron_offload.errors import ConfigError
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.plan_file import parse_plan, plan_to_json
from megatron_offload.planning.schedule import make_schedule


def run(rank, folder):
    """Be one rank; leave what it has seen in ``rank_<rank>.json``."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    seen = {name: case(rank) for name, case in CASES.items()}
    dist.destroy_process_group()
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))


def checked(rank, *, marked=None, **policy):
    """Return a check of a plan for both ranks, and the program whose steps it looks at."""
    job = VirtualJob(1.0).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    shape = RUN._replace(pp_rank=rank, pp_size=2, rank=rank)
    job.manager.learner.pp_rank = marked
    section = make_config(policy={"machine": "default", **policy}).policy
    schedule = make_schedule("gpipe", 2, RUN.num_microbatches)
    profile = replace(recorded.profile, run=shape)
    return job, check_plan(job.manager, profile, section, schedule=schedule)


def taken(job, check, step):
    """Take all steps of a check; return the plan that stays, and what was said."""
    said = []
    while not check.is_over:
        with check.step() as measured:
            job.step()
        step(measured)
        said.append(check.note())
    return plan_to_json(check.plan), len(job.manager.learner.kept), said


def slowest_counts(rank):
    """The plan is slow on the second rank alone, and of another length on each."""
    job, check = checked(rank, kind="auto", measured_plans=1)

    def slow(measured):
        measured.step_us += 5000.0 * rank * bool(job.moved_bytes[-1])

    return taken(job, check, slow)


def fullest_counts(rank):
    """The second rank alone reserves more than it should."""
    job, check = checked(rank, kind="memory_target", target_bytes=150_000, measured_plans=1)

    def full(measured):
        measured.reserved_bytes = 145_000 + 15_000 * rank

    return taken(job, check, full)


def error_of(rank, **keys):
    try:
        checked(rank, **keys)
    except ConfigError as error:
        return type(error).__name__, str(error)
    raise AssertionError


def no_target(rank):
    return error_of(rank, kind="memory_target", target_bytes=1024)


def another_place(rank):
    return error_of(rank, kind="auto", marked=0)


CASES = {case.__name__: case for case in (slowest_counts, fullest_counts, no_target, another_place)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank has seen, case by case; read-only."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(run, (folder,), 2, start_method="spawn")
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["slowest_counts", "fullest_counts"])
def test_both_follow_one_plan_by_the_number_of_the_worse(seen, case):
    (plan, _, said), (other_plan, _, other_said) = (rank[case] for rank in seen)
    assert (plan, said) == (other_plan, other_said)
    found = parse_plan(plan, "it")
    for rank, rank_plan in zip(seen, found.ranks, strict=True):
        assert rank[case][1] == len(rank_plan.kept)
    if case == "slowest_counts":  # by the second rank alone, whatever moves
        assert found.moved_bytes == 0
        assert said[-1].endswith("no plan was fast enough")
    else:
        assert [rank.measured_peak_bytes for rank in found.ranks] == [145_000, 160_000]
        assert "9.77 KiB more than wanted stay reserved" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("no_target", "TargetError", "can't be brought under 1 B"),
        ("another_place", "ConfigError", "rank 1: its profile is of pipeline rank 1"),
    ],
)
def test_an_error_on_one_rank_is_the_same_on_all(seen, case, kind, text):
    first, second = (rank[case] for rank in seen)
    assert first == second
    assert first[0] == kind
    assert text in first[1]

"""Ranks that agree through the job's store: real processes, some of which fall silent."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from virtual_clock import VirtualJob

from megatron_offload.autotune.agree import Ranks, stand_aside
from megatron_offload.autotune.loop import tune

NUM_RANKS = 3
TIMEOUT_S = 3.0
PLANNING_S = 10.0
"""A plan of a job takes two of them where nothing else runs."""


def join(said):
    return "+".join(said)


def all_speak(rank):
    """Everyone asks twice, some when others have not come yet."""
    time.sleep(0.2 * rank)
    ranks = Ranks("all", TIMEOUT_S)
    first = ranks.ask(f"a{rank}", join)
    time.sleep(0.05 * rank)
    return sorted(first.split("+")), sorted(ranks.ask(f"b{rank}", join).split("+")), ranks.is_alone


def one_is_silent(rank):
    """One has come and never asks; the others go on alone, once they have waited."""
    ranks = Ranks("silent", TIMEOUT_S)
    dist.barrier()
    if rank == NUM_RANKS - 1:
        return None
    began_s = time.monotonic()
    answers = [ranks.ask("x", join), ranks.ask("mine", join)]
    return answers, ranks.is_alone, time.monotonic() - began_s < 3 * TIMEOUT_S


def one_stands_aside(rank):
    """One has nothing to say, whenever it says so; it is there again in the end."""
    is_aside = rank == NUM_RANKS - 1
    began_s = time.monotonic()
    if is_aside:
        time.sleep(TIMEOUT_S / 6)
        stand_aside()
        answer = None
    else:
        answer = Ranks("aside", TIMEOUT_S).ask("x", join)
    took_s = time.monotonic() - began_s
    dist.barrier()
    if is_aside:
        stand_aside(-1)
    return answer, took_s < TIMEOUT_S


def no_answer_for_all(rank):
    ranks = Ranks("none", TIMEOUT_S)
    dist.barrier()
    return ranks.ask("x", lambda said: "" if len(said) > 1 else "own"), ranks.ask("y", join)


def one_of_each_kind(rank):
    ranks = Ranks("kinds", TIMEOUT_S)
    return [ranks.is_first_of(kind) for kind in ("even" if rank % 2 == 0 else "odd", f"{rank}")]


def a_job(rank, *, steps):
    """Take so many steps with a loop; return what has become of it."""
    job = VirtualJob(0.1)
    loop = tune(job.manager, timeout_s=PLANNING_S)
    for _ in range(steps):
        job.step()
    kept = sorted(map(tuple, job.manager.learner.kept))
    return loop.is_settled, kept, loop.plan.moved_bytes if loop.plan else None


def replicas_settle_alike(rank):
    """All are replicas of one pipeline rank, with a plan of the same data."""
    return a_job(rank, steps=12)


def one_ends_early(rank):
    """One rank ends behind the first plan; the others keep it, and go on."""
    return a_job(rank, steps=5 if rank == 1 else 12)


def one_has_no_groups(rank):
    """One rank's steps have no groups; the others have a plan as soon as ever."""
    job = VirtualJob(0.1)
    loop = tune(job.manager, timeout_s=10 * PLANNING_S)
    if rank == 1:
        job.manager.disable_offload()
    began_s = time.monotonic()
    for _ in range(12):
        job.step()
    return loop.is_settled, time.monotonic() - began_s < 5 * PLANNING_S


CASES = {
    case.__name__: case
    for case in (
        *(all_speak, one_is_silent, one_stands_aside, no_answer_for_all, one_of_each_kind),
        *(replicas_settle_alike, one_ends_early, one_has_no_groups),
    )
}


def run(rank, folder):
    """Be one rank; leave what it has seen in ``rank_<rank>.json``."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    seen = {}
    for name, case in CASES.items():
        seen[name] = case(rank)
        dist.barrier()
    dist.destroy_process_group()
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank has seen, case by case; read-only."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(run, (folder,), NUM_RANKS, start_method="spawn")
    files = (folder / f"rank_{rank}.json" for rank in range(NUM_RANKS))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_all_are_told_what_the_first_has_answered_to_all(seen):
    for rank in seen:
        assert rank["all_speak"] == [["a0", "a1", "a2"], ["b0", "b1", "b2"], False]


@pytest.mark.slow
def test_whoever_waits_for_a_silent_one_goes_on_alone(seen):
    for rank in seen[:-1]:
        assert rank["one_is_silent"] == [[None, "mine"], True, True]


@pytest.mark.slow
def test_nobody_waits_for_one_who_stands_aside(seen):
    *others, aside = (rank["one_stands_aside"] for rank in seen)
    assert others == [["x+x", True]] * (NUM_RANKS - 1)
    assert aside == [None, True]


@pytest.mark.slow
def test_where_there_is_no_answer_for_all_each_has_its_own(seen):
    assert [rank["no_answer_for_all"] for rank in seen] == [[None, "y"]] * NUM_RANKS


@pytest.mark.slow
def test_of_each_kind_one_is_the_first(seen):
    evens, odds, each = [], [], []
    for number, rank in enumerate(seen):
        first, own = rank["one_of_each_kind"]
        (odds if number % 2 else evens).append(first)
        each.append(own)
    assert (sorted(evens), odds, each) == ([False, True], [True], [True] * NUM_RANKS)


@pytest.mark.slow
def test_replicas_settle_on_one_plan(seen):
    found = [rank["replicas_settle_alike"] for rank in seen]
    assert found[0] == found[1] == found[2]
    is_settled, kept, moved_bytes = found[0]
    assert is_settled
    assert kept
    assert moved_bytes > 0


@pytest.mark.slow
def test_when_one_ends_early_the_others_keep_their_plan(seen):
    first, early, last = (rank["one_ends_early"] for rank in seen)
    assert not early[0]
    assert first[0]
    assert last[0]
    assert first[1:] == early[1:] == last[1:]


@pytest.mark.slow
def test_a_rank_without_groups_lets_the_others_plan_at_once(seen):
    found = [rank["one_has_no_groups"] for rank in seen]
    assert found == [[True, True], [False, True], [True, True]]

"""Ranks that agree through the job's store: some come late, fall silent or die; nobody waits."""

from __future__ import annotations

import itertools
import math
import random
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from layered_job import LayeredJob, PlainLayer, auto

from megatron_offload.autotune import agree
from megatron_offload.autotune.agree import Ranks

NUM_RANKS = 3


@pytest.fixture
def store(monkeypatch):
    """The store of a job whose ranks are all in this thread: what waits for another fails."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    job = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: NUM_RANKS,
        PrefixStore=dist.PrefixStore,
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
    )
    monkeypatch.setattr(agree, "dist", job)
    numbers = itertools.count()  # each rank counts for itself
    monkeypatch.setattr(agree, "_numbers", (number // NUM_RANKS for number in numbers))
    return store


def play(*comes, asks=None, dies=(math.inf,) * NUM_RANKS, num_steps=120):
    """Let ranks take steps together, and ask; return what each is reported, and behind how many."""
    ranks, asking, told = {}, {}, [None] * NUM_RANKS
    for step in range(num_steps):
        for rank, (first, last) in enumerate(zip(comes, dies, strict=True)):
            if step == first:
                ranks[rank] = Ranks()
            if rank in ranks and step == (asks or comes)[rank]:
                asking[rank] = ranks[rank].ask(str(rank), "+".join)
            if rank in asking and told[rank] is None and step < last:
                found = next(asking[rank])
                told[rank] = None if found is None else (found, step - (asks or comes)[rank])
    return told


@pytest.mark.parametrize(
    ("comes", "dies", "expected"),
    [
        ((0, 0, 0), (), [("0+1+2", 4)] * 3),
        ((0, 5, 2), (), [("0+2+1", 9)] * 3),  # by place, which is the order in which they come
        ((0, 40, 1), (), [("0+2", 11)] * 3),  # too late to be heard, not to be told
        ((0, math.inf, 1), (), [("0+2", 11), None, ("0+2", 11)]),
        ((0, 0, 0), (math.inf, 2, math.inf), [("0+1+2", 4), None, ("0+1+2", 4)]),
        ((0, 0, 0), (1, math.inf, math.inf), [None, ("", 64), ("", 64)]),
        ((0, 0, 0), (3, math.inf, math.inf), [None, ("0+1+2", 4), ("0+1+2", 4)]),
    ],
)
def test_all_who_live_are_reported_the_same_behind_as_many_steps(store, comes, dies, expected):
    assert play(*comes, dies=dies or (math.inf,) * NUM_RANKS) == expected


def test_one_who_comes_and_never_asks_holds_nobody_up(store):
    never = (0, math.inf, 0)
    assert play(0, 0, 0, asks=never) == [("0+2", 11), None, ("0+2", 11)]


def test_of_each_kind_one_is_the_first_and_the_second_question_is_another(store):
    ranks = [Ranks() for _ in range(NUM_RANKS)]
    assert [one.is_first_of("kind") for one in ranks] == [True, False, False]
    for question in ("a", "b"):
        asking = [one.ask(question, "+".join) for one in ranks]
        told = [None]
        while told == [None]:
            told = list({next(one) for one in asking})
        assert told == ["+".join(question * NUM_RANKS)]


@pytest.mark.parametrize("whose", ["what a rank says", "the answer"])
def test_what_is_too_large_is_never_put_into_the_store(store, whose):
    text = random.Random(0).randbytes(6 << 20).hex()
    said = [text if whose == "what a rank says" and rank == 1 else "x" for rank in range(NUM_RANKS)]
    asking = [Ranks().ask(one, lambda said: text) for one in said]
    told = [None] * NUM_RANKS
    while None in told:
        told = [next(one) for one in asking]
    assert told == [""] * NUM_RANKS
    for key in ("0/1", "0/2", "0/answer"):
        assert len(store.get(f"megatron_offload/rows/0/{key}")) < 100


# Ranks that look for rows.


@pytest.fixture
def layered_jobs(store):
    return [LayeredJob(0.001, policy=auto(20)) for _ in range(NUM_RANKS)]


def rows_found_at(jobs, late=0, most_steps=150):
    """Let ranks take steps of any lengths together; return when each has found its rows."""
    found = [None] * len(jobs)
    draw = random.Random(0)
    for number in range(most_steps):
        for rank, job in enumerate(jobs):
            if (rank < NUM_RANKS - 1 or number >= late) and None in found:
                job.step(draw.choice((8, 16, 24)))
                if found[rank] is None and job.search.is_converged:
                    found[rank] = len(job.steps)
    return found


@pytest.mark.parametrize("late", [0, 3])
def test_replicas_find_the_same_rows_behind_as_many_steps(layered_jobs, late):
    steps = rows_found_at(layered_jobs, late)
    assert len(set(steps)) == 1
    rows = [job.manager.rows for job in layered_jobs]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0]


def test_a_rank_to_which_other_rows_seem_best_follows_those_of_all(layered_jobs):
    jobs = [LayeredJob(1.0, policy=auto(900), us_per_row=us) for us in (10.0, 0.1, 10.0)]
    rows_at = [[], [], []]
    for _ in range(90):
        for job, own in zip(jobs, rows_at, strict=True):
            job.step()
            own.append((job.search._kind, job.manager.rows))
    assert all(job.search.is_converged for job in jobs)
    assert rows_at[0] == rows_at[1] == rows_at[2], "a rerun may hold collectives"
    assert jobs[0].manager.rows


def test_a_rank_with_another_model_follows_rows_of_its_own(layered_jobs):
    layered_jobs[1] = LayeredJob(0.001, num_layers=3, policy={"kind": "auto"})
    assert None not in rows_found_at(layered_jobs)
    assert layered_jobs[0].manager.rows == layered_jobs[2].manager.rows
    assert len({job.search.said.partition(" free up to")[0] for job in layered_jobs}) == 1
    for job in layered_jobs:
        assert job.manager.rows
        assert job.step() <= 1.2 * 16 * 10.0 * 3 * len(job.net.layers)


def test_where_numbers_count_within_each_stage_a_rank_says_its_own_rows(layered_jobs):
    layered_jobs[1] = LayeredJob(0.05, layer=PlainLayer, num_layers=3, policy=auto(20))
    assert None not in rows_found_at(layered_jobs)
    assert layered_jobs[0].manager.rows != layered_jobs[1].manager.rows
    for job in layered_jobs:
        assert job.search.said.startswith(f"rows: [{', '.join(map(str, job.manager.rows))}]")


def test_a_rank_that_can_not_follow_rows_holds_all_of_them_off(layered_jobs, monkeypatch):
    monkeypatch.setattr(layered_jobs[2].search, "_find", lambda: None)
    search = layered_jobs[2].search
    search._search = search._agree(refusal="it is too full")
    search._bare_tokens = 1
    assert None not in rows_found_at(layered_jobs)
    for job in layered_jobs:
        assert "it is too full" in job.search.said
        assert not job.manager.rows


@pytest.mark.parametrize("fails", ["at once", "later", "too large"])
def test_without_a_store_or_an_answer_no_rank_follows_rows(layered_jobs, monkeypatch, fails):
    def gone(*_):
        raise dist.DistNetworkError("the store is gone")

    if fails == "too large":
        monkeypatch.setattr(agree, "_MOST_BYTES", 20)
    else:
        where = (agree.dist, "PrefixStore") if fails == "at once" else (agree.Ranks, "_hear")
        monkeypatch.setattr(*where, gone)
    assert None not in rows_found_at(layered_jobs)
    why = "no plan came" if fails == "too large" else "the store is gone"
    for number, job in enumerate(layered_jobs):
        assert job.manager.rows == ()
        assert why in job.search.said or (fails == "later" and number)

"""When streams do what a program says, op by op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_offload.planning.job import GroupWork, Job, Machine, StageWork
from megatron_offload.planning.program import OpKind, RankProgram
from megatron_offload.planning.schedule import gpipe, one_f_one_b
from megatron_offload.planning.simulate import simulate
from megatron_offload.planning.streams import PIPELINE, RELEASE, RELOAD, run_streams

KB = 1000
MACHINE = Machine(1.0, 1.0, 1.0, 100.0, None, None, p2p_latency_us=5.0, p2p_gbps=1.0)
JOB = Job(gpipe(1, 1), (StageWork(()),), (0,), MACHINE)


def run(*ops, copy_bytes=(), after=None, machine=MACHINE):
    program = RankProgram(copy_bytes=list(copy_bytes), after=after or {})
    for kind, argument in ops:
        program.kinds.append(kind)
        program.arguments.append(argument)
    ranks, _ = run_streams(replace(JOB, machine=machine), [program], records=False)
    return ranks[0]


def test_copies_of_one_queue_follow_one_another():
    rank = run(
        (OpKind.OFFLOAD, 0),
        (OpKind.OFFLOAD, 1),
        (OpKind.COMPUTE, 50.0),
        (OpKind.AWAIT, 1),
        copy_bytes=(100 * KB, 30 * KB),
    )
    assert rank.end_us == pytest.approx(130)
    assert rank.stall_us == pytest.approx({RELEASE: 80, RELOAD: 0, PIPELINE: 0})


def test_a_copy_begins_where_it_was_issued_and_no_sooner():
    ops = [(OpKind.COMPUTE, 40.0), (OpKind.RELOAD, 0), (OpKind.COMPUTE, 10.0), (OpKind.AWAIT, 0)]
    rank = run(*ops, copy_bytes=[100 * KB])
    assert (rank.end_us, rank.compute_us) == pytest.approx((140, 50))
    assert rank.stall_us[RELOAD] == pytest.approx(90)


def test_what_is_over_is_not_waited_for():
    ops = [(OpKind.OFFLOAD, 0), (OpKind.COMPUTE, 200.0), (OpKind.AWAIT, 0)]
    assert run(*ops, copy_bytes=[100 * KB]).stall_us[RELEASE] == 0


def test_a_copy_into_a_place_that_is_taken_waits_for_the_reload_that_empties_it():
    ops = [(OpKind.RELOAD, 0), (OpKind.OFFLOAD, 1), (OpKind.OFFLOAD, 2), (OpKind.AWAIT, 2)]
    sizes = (100 * KB, 70 * KB, 10 * KB)
    assert run(*ops, copy_bytes=sizes).end_us == pytest.approx(80)
    assert run(*ops, copy_bytes=sizes, after={1: 0}).end_us == pytest.approx(180)


def test_a_rate_that_changes_on_the_way_counts_from_there_on():
    # Alone 1 GB/s, together half of it each: 50 kB alone, 100 kB of each together, then 50 alone.
    machine = replace(MACHINE, both_gbps=0.5)
    ops = [(OpKind.OFFLOAD, 0), (OpKind.COMPUTE, 50.0), (OpKind.RELOAD, 1), (OpKind.AWAIT, 0)]
    sizes = (150 * KB, 150 * KB)
    assert run(*ops, copy_bytes=sizes, machine=machine).end_us == pytest.approx(250)
    both = [*ops, (OpKind.AWAIT, 1)]
    assert run(*both, copy_bytes=sizes, machine=machine).end_us == pytest.approx(300)


def test_messages_take_their_latency_and_their_bytes_and_gradients_go_back_as_large():
    work = (GroupWork("g", 0, 100.0, 200.0),)
    stages = (StageWork(work, output_bytes=20 * KB), StageWork(work, output_bytes=999 * KB))
    job = Job(one_f_one_b(2, 1), stages, (0, 0), MACHINE)
    simulation = simulate(job)
    assert simulation.step_us == pytest.approx(600 + 2 * 25)
    assert simulation.ranks[0].stall_us[PIPELINE] == pytest.approx(300 + 2 * 25)


def test_who_sends_goes_on_at_once():
    slow = replace(MACHINE, p2p_latency_us=1000.0)
    stage = StageWork((GroupWork("g", 0, 100.0, 200.0),))
    first = simulate(Job(one_f_one_b(2, 4), (stage, stage), (0, 0), slow), record=True).ranks[0]
    forwards = [span for span in first.trace.of("compute") if span.kind != "stall"]
    assert (forwards[0].start_us, forwards[1].start_us) == (0, 100)

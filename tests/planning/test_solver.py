"""Both ways to choose: within the target, few bytes, nothing that comes straight back."""

from __future__ import annotations

import itertools
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import highspy
import pytest
from problems import MIB, random_problem

from megatron_offload.errors import ConfigError
from megatron_offload.planning import solver
from megatron_offload.planning.cover import Item, Problem
from megatron_offload.planning.footprint import Footprint
from megatron_offload.planning.greedy import solve_greedy
from megatron_offload.planning.profile_file import load_profile
from megatron_offload.planning.solver import solve

PROFILES = Path(__file__).parents[2] / "docs" / "benchmarks" / "h200" / "profiles_c"
NUM_SEEDS = 300
CHUNK = 50


def peak_when_replayed(problem, moved):
    """Go through the rows one by one, with no arithmetic of the package's own."""
    peak = 0
    for row, memory_bytes in enumerate(problem.memory_bytes):
        live = sum(
            problem.items[position].num_bytes
            for position in moved
            if problem.items[position].first_row <= row < problem.items[position].end_row
        )
        peak = max(peak, memory_bytes - live + min(live, problem.device_bytes))
    return peak


def bytes_of(problem, moved):
    return sum(problem.items[position].num_bytes for position in moved)


@pytest.mark.sampled
@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, CHUNK))
def test_both_keep_the_target_and_the_greedy_one_moves_little_more(first_seed):
    for seed in range(first_seed, first_seed + CHUNK):
        problem = random_problem(seed)
        exact, greedy = solve(problem), solve_greedy(problem)
        assert exact.method == "exact", seed
        for found in (exact, greedy):
            assert peak_when_replayed(problem, found.moved) <= problem.target_bytes, seed
            assert found.moved_bytes == bytes_of(problem, found.moved), seed
            assert found.moved <= set(problem.movable), seed
        assert exact.moved_bytes <= greedy.moved_bytes <= 1.1 * exact.moved_bytes, seed


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_moves_fewer_bytes(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 30) for _ in range(9)]
    items = []
    for size in sizes:
        first = rng.randrange(6)
        items.append(Item(size, first, rng.randint(first + 1, 7), 0.0, 1e9))
    memory = tuple(rng.randint(20, 40) + sum(sizes) // 3 for _ in range(7))
    problem = Problem(tuple(items), memory, 0, rng.choice([0, 10]), 50.0)
    least_bytes = problem.least_peak_bytes()
    problem = replace(problem, target_bytes=rng.randint(least_bytes, max(memory)))
    fewest = min(
        bytes_of(problem, moved)
        for number in range(len(items) + 1)
        for moved in itertools.combinations(range(len(items)), number)
        if peak_when_replayed(problem, moved) <= problem.target_bytes
    )
    assert solve(problem).moved_bytes == fewest


@pytest.mark.parametrize("seed", range(30))
def test_a_higher_target_never_moves_more_bytes(seed):
    problem = random_problem(seed + 5000)
    least_bytes, most_bytes = problem.least_peak_bytes(), max(problem.memory_bytes)
    moved_bytes = [
        solve(
            replace(problem, target_bytes=least_bytes + (most_bytes - least_bytes) * step // 6)
        ).moved_bytes
        for step in range(7)
    ]
    assert moved_bytes == sorted(moved_bytes, reverse=True)
    assert moved_bytes[-1] == 0, "without a need nothing moves"


@pytest.mark.parametrize("choose", [solve, solve_greedy])
def test_a_target_below_the_lowest_is_refused_with_what_is_missing(choose):
    problem = random_problem(3)
    least_bytes = problem.least_peak_bytes()
    problem = replace(problem, target_bytes=least_bytes - 7)
    with pytest.raises(ConfigError, match=rf"still takes {least_bytes} bytes, 7 more"):
        choose(problem)


@pytest.mark.parametrize("choose", [solve, solve_greedy])
def test_what_comes_straight_back_stays(choose):
    """One of two alike has the time for both copies, to the microsecond; the other lacks one."""
    copies_us = 2 * 1000 * MIB / 50e3
    items = (
        Item(1000 * MIB, 0, 1, 0.0, copies_us - 1.0),
        Item(1000 * MIB, 0, 1, 0.0, copies_us + 1.0),
    )
    problem = Problem(items, (3000 * MIB,), 2000 * MIB, 0, 50.0)
    assert problem.movable == (1,)
    assert choose(problem).moved == {1}
    with pytest.raises(ConfigError):
        choose(replace(problem, target_bytes=2000 * MIB - 1))


def test_memory_of_moved_groups_on_the_device_is_counted():
    """To bring 8 down to 6 with 2 for copies on their way, 4 must move, not 2."""
    items = tuple(Item(2, 0, 1, 0.0, 1e6) for _ in range(4))
    problem = Problem(items, (8,), 6, 2, 50.0)
    assert len(solve(problem).moved) == len(solve_greedy(problem).moved) == 2
    assert problem.peak_bytes({0, 1}) == 6
    assert problem.peak_bytes({0}) == 8


def waited_bytes(problem, moved):
    """Run both queues: what is joined while more than the room is in them is waited for."""
    per_us = problem.link_gbps * 1e3
    room_bytes = max(problem.device_bytes / 2, max(item.num_bytes for item in problem.items))
    total = 0.0
    for time_of in (lambda item: item.committed_us, lambda item: -item.backward_us):
        queue_bytes, before_us = 0.0, -math.inf
        for item in sorted((problem.items[position] for position in moved), key=time_of):
            emptied_bytes = per_us * (time_of(item) - before_us)
            before_us = time_of(item)
            queue_bytes = max(0.0, queue_bytes - emptied_bytes) + item.num_bytes
            total += max(0.0, queue_bytes - room_bytes)
            queue_bytes = min(queue_bytes, room_bytes)
    return total


@pytest.mark.parametrize("seed", range(15))
def test_of_choices_with_as_few_bytes_one_waits_least(seed):
    rng = random.Random(seed)
    size, num = 100 * MIB, 9
    copy_us = size / 10e3
    items = tuple(
        Item(size, 0, 1, rng.uniform(0, 6) * copy_us, rng.uniform(20, 26) * copy_us)
        for _ in range(num)
    )
    num_moved = rng.randint(3, 7)
    problem = Problem(items, (num * size,), (num + 2 - num_moved) * size, 2 * size, 10.0)
    moved = solve(problem).moved
    assert len(moved) == num_moved
    least = min(
        waited_bytes(problem, choice) for choice in itertools.combinations(range(num), num_moved)
    )
    # The search leaves so much, and less risk is worth a thousandth of what moves.
    assert waited_bytes(problem, moved) <= 1.05 * least + 1.2e-3 * num_moved * size


@pytest.mark.parametrize("is_first", [False, True])
def test_of_two_alike_the_one_that_is_needed_later_moves(is_first):
    copies_us = 2 * 1000 * MIB / 50e3
    items = [Item(1000 * MIB, 0, 1, 0.0, 1.2 * copies_us), Item(1000 * MIB, 0, 1, 0.0, 1e7)]
    if is_first:
        items.reverse()
    problem = Problem(tuple(items), (3000 * MIB,), 2000 * MIB, 0, 50.0)
    assert solve(problem).moved == {0 if is_first else 1}


def test_the_same_problem_gets_the_same_choice_and_nothing_is_printed(capfd):
    for seed in range(20):
        problem = random_problem(seed)
        assert solve(problem) == solve(problem)
        assert solve_greedy(problem) == solve_greedy(problem)
    assert capfd.readouterr() == ("", "")


@pytest.mark.sampled
@pytest.mark.parametrize("pp_rank", [0, 1, 2])
@pytest.mark.parametrize("target", [22, 24, 26])
def test_the_search_begins_with_the_greedy_choice_and_ends_near_the_fewest_bytes(pp_rank, target):
    """Of a step of four H200s, whose fewest bytes ten seconds don't always prove."""
    rank = Footprint.of(load_profile(PROFILES / f"profile_{pp_rank}.json"))
    problem = rank.problem(target * 2**30, 3 * 2**30, 25.0)
    quick = solve_greedy(problem).moved
    program = solver._Program(problem, 10.0)
    fewest, is_proven = program.fewest_bytes(quick)
    info = program._highs.getInfo()
    assert info.mip_node_count <= solver._FEWEST_NODES
    assert info.mip_gap <= 0.01
    assert problem.bytes_of(fewest) <= problem.bytes_of(quick)
    found = solve(problem)
    assert found.method == ("exact" if is_proven else "best found")
    assert found.moved_bytes <= problem.bytes_of(fewest)
    assert peak_when_replayed(problem, found.moved) <= problem.target_bytes


@pytest.mark.parametrize("seed", range(6))
def test_sizes_without_a_common_divisor_keep_the_target_too(seed):
    """Numbers of ten digits, which a program in floating point can't hold to the last byte."""
    rng = random.Random(seed)
    items = []
    for _ in range(14):
        first = rng.randrange(12)
        size, end_row = 2 * rng.randint(10**8, 10**9) + 1, rng.randint(first + 1, 13)
        items.append(Item(size, first, end_row, float(first), 1e6))
    memory = Problem(tuple(items), (0,) * 13, 0, 0, 50.0).live_bytes(range(14)).tolist()
    problem = Problem(tuple(items), tuple(memory), 0, 10**9, 50.0)
    least_bytes = problem.least_peak_bytes()
    targets = [least_bytes + (max(memory) - least_bytes) * step // 5 for step in range(6)]
    found = [solve(replace(problem, target_bytes=target)) for target in targets]
    greedy = [solve_greedy(replace(problem, target_bytes=target)) for target in targets]
    for target, one, other in zip(targets, found, greedy, strict=True):
        assert peak_when_replayed(problem, one.moved) <= target
        assert one.method == "exact"
        # Demands are rounded up.
        assert one.moved_bytes <= other.moved_bytes + 14 * 2**-14 * 2e9


def test_without_highspy_the_error_names_the_extra(monkeypatch):
    problem = next(one for one in map(random_problem, range(100)) if one.demand_bytes.any())
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ConfigError, match=r"megatron-offload\[plan\]"):
        solve(problem)


def test_a_program_that_uses_highs_with_threads_of_its_own_takes_nothing_from_it():
    """HiGHS keeps the number of threads of its first run in each thread of the host's."""
    problem = random_problem(0)

    def another_then_this():
        other = highspy.Highs()
        other.silent()
        other.setOptionValue("threads", 2)
        other.addBinary(obj=1.0)
        other.run()
        assert other.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return solve(problem)

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(another_then_this).result()
    assert found.method == "exact"
    assert found == solve(problem)

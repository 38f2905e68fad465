"""The search for the distances of release and prefetch."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron_offload.autotune.distances import Adaptation, StepObservation
from megatron_offload.planning.plan import Distances

LEAST, MOST = 10, 1000
START = Distances(100, 100)


def search(seen_of, *, start=START, least=LEAST, most=MOST, steps=60):
    """Return the adaptation after many steps, and the distances that each of them had."""
    adaptation, asked = Adaptation(start, least, most), []
    for _ in range(steps):
        asked.append(adaptation.distances)
        frozen = adaptation.is_frozen
        assert adaptation.follow(seen_of(asked[-1])) == adaptation.distances
        assert not frozen or (adaptation.is_frozen and adaptation.distances == asked[-1])
    assert adaptation.is_frozen
    return adaptation, asked


def late_below(wanted_bytes):
    """Groups come late while less is prefetched than is wanted."""
    return lambda d: StepObservation(max(0, wanted_bytes - d.prefetch_bytes), 0)


def test_distances_that_are_right_stay_and_are_frozen_after_three_steps():
    adaptation = Adaptation(START, LEAST, MOST)
    for number in range(3):
        assert not adaptation.is_frozen, number
        assert adaptation.follow(StepObservation(0, 0)) == START
    assert adaptation.is_frozen


@pytest.mark.parametrize("wanted_bytes", [101, 150, 400, 700])
def test_late_reloads_are_fetched_farther_ahead_until_none_is_late(wanted_bytes):
    adaptation, _ = search(late_below(wanted_bytes))
    assert wanted_bytes <= adaptation.distances.prefetch_bytes < 1.5 * wanted_bytes
    assert adaptation.distances.max_inflight_bytes == START.max_inflight_bytes


@pytest.mark.parametrize("prefetch_bytes", [1, 40, 53])
def test_one_trial_has_room_for_one_more_group(prefetch_bytes):
    """A group comes back whatever the distance is; farther means two of them."""
    group_bytes = 40
    adaptation = Adaptation(Distances(150, prefetch_bytes), group_bytes, 200)
    assert adaptation.follow(StepObservation(1, 0)) == (120, 2 * group_bytes)


def test_what_does_not_help_is_taken_back_and_not_tried_again():
    adaptation, asked = search(lambda d: StepObservation(7, 0))
    assert adaptation.distances == START
    assert len(set(asked)) == 2, "one trial"


def test_waiting_for_copies_to_the_host_delays_the_release():
    adaptation, _ = search(lambda d: StepObservation(0, 0, release_stall_us=max(0, 300 - d[0])))
    assert 300 <= adaptation.distances.max_inflight_bytes < 450
    assert adaptation.distances.prefetch_bytes == START.prefetch_bytes


def test_copies_for_nothing_are_released_sooner_unless_that_makes_others_wait():
    adaptation, _ = search(lambda d: StepObservation(0, max(0, d.max_inflight_bytes - 40)))
    assert LEAST <= adaptation.distances.max_inflight_bytes <= 40
    adaptation, _ = search(lambda d: StepObservation(0, d[0], release_stall_us=max(0, 70 - d[0])))
    assert adaptation.distances.max_inflight_bytes == 100, "at 66 there would be stalls"


def test_where_both_want_room_the_other_gives_some_but_never_its_least():
    adaptation, asked = search(late_below(5000), least=50, most=300)
    assert adaptation.distances == Distances(50, 250)
    assert all(sum(each) <= 300 and min(each) >= 50 for each in asked)


def test_noise_in_stalls_is_no_improvement():
    rng = random.Random(5)
    adaptation, asked = search(lambda d: StepObservation(0, 0, 1000 * rng.uniform(0.98, 1.0), 0))
    assert adaptation.distances == START
    assert len(set(asked)) == 2


@pytest.mark.parametrize("seed", range(60))
def test_whatever_steps_show_it_ends_within_bounds_and_never_goes_in_circles(seed):
    rng = random.Random(seed)
    least, most = rng.randint(1, 50), rng.randint(200, 1000)
    start = Distances(rng.randint(least, 100), rng.randint(least, 100))

    def seen_of(distances):
        counts = rng.randint(0, 3), rng.randint(0, 3)
        return StepObservation(*counts, rng.random() * 9, rng.random() * 9)

    _, asked = search(seen_of, start=start, least=least, most=most)
    assert all(sum(each) <= most and min(each) >= least for each in asked)
    changes = [each for before, each in pairwise(asked) if each != before]
    tried = set(changes) - {start}
    assert len(tried) <= 12
    assert len(changes) <= 2 * len(tried), "each trial is taken back once at most"

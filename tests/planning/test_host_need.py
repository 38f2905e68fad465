"""What is unpinned, and when: need, not noise."""

from __future__ import annotations

import itertools

import pytest

from megatron_offload.planning.host_need import HostNeed

SLAB = 10


class Pool:
    """Pins what a step needs, in slabs, and gives back what it is told to."""

    def __init__(self, *, overhead=1.0, slab=SLAB):
        self.need = HostNeed(SLAB)
        self.overhead = overhead
        self.slab = slab
        self.pinned = 0
        self.cuts = []
        self.num_steps = 0

    def run(self, peaks, *, at_once=False):
        for peak in peaks:
            self.num_steps += 1
            wanted = -(-int(peak * self.overhead) // self.slab) * self.slab
            self.pinned = max(self.pinned, wanted)
            keep = self.need.keep_bytes(peak, self.pinned, at_once=at_once)
            if keep is None:
                continue
            self.cuts.append(self.num_steps)
            while self.pinned - self.slab >= keep:
                self.pinned -= self.slab
            self.need.note_cut(keep, self.pinned, at_once=at_once)


def test_what_no_step_of_the_window_needed_goes():
    pool = Pool()
    pool.run([1000] * 20)
    assert pool.cuts == []
    pool.run([500] * 7)
    assert pool.pinned == 1000
    pool.run([500])
    assert pool.pinned == 500
    pool.run([500] * 100)
    assert pool.cuts == [28], "once"


def test_a_first_step_that_needed_more_does_not_count_for_long():
    pool = Pool()
    pool.run([1000] + [600] * 8)
    assert pool.pinned == 600


def test_the_largest_of_the_window_stays():
    pool = Pool()
    pool.run([1000] * 8 + [500, 500, 700, 500, 500, 500, 500, 500])
    assert pool.pinned == 700


@pytest.mark.parametrize(("before", "after"), [(1000, 905), (20, 11)])
def test_little_is_left_alone(before, after):
    pool = Pool()
    pool.run([before] * 8 + [after] * 50)
    assert pool.cuts == []


def test_alternating_steps_unpin_nothing():
    pool = Pool()
    pool.run(itertools.islice(itertools.cycle([1000, 400]), 200))
    pool.run(itertools.islice(itertools.cycle([1000] + [400] * 7), 200))
    assert pool.cuts == []


@pytest.mark.parametrize("period", [9, 20, 100])
def test_a_need_that_keeps_coming_back_soon_stays(period):
    pool = Pool()
    pool.run(itertools.islice(itertools.cycle([1000] + [400] * (period - 1)), 5000))
    assert len(pool.cuts) <= 5
    assert pool.cuts[-1] < 2500
    assert pool.pinned == 1000


def test_growing_steps_unpin_nothing():
    pool = Pool()
    pool.run(range(100, 2000, 10))
    assert pool.cuts == []


def test_memory_that_is_not_in_one_piece_is_learned_once():
    pool = Pool(overhead=1.5)
    pool.run([1000] * 100)
    assert len(pool.cuts) == 1
    assert pool.pinned == 1500
    pool.run([400] * 100)
    assert pool.pinned == 600, "and is a share of what is used"


def test_slabs_too_large_to_go_are_tried_once():
    pool = Pool(slab=800)
    pool.run([1600] * 8 + [900] * 50)
    assert len(pool.cuts) == 1
    assert pool.pinned == 1600
    pool.run([700] * 50)
    assert pool.pinned == 800


def test_at_once_the_last_step_alone_counts():
    pool = Pool()
    pool.run([1000])
    pool.run([800, 790, 785], at_once=True)
    assert pool.pinned == 790
    assert pool.need.num_steps == 8
    pool.run([800])
    assert pool.need.num_steps == 8, "what was cut at the start says nothing about returning needs"

"""Which groups of a step are recorded as one."""

from __future__ import annotations

from megatron_offload.core.joining import Started, joined_groups
from megatron_offload.core.profile import GroupKey


def joined(sizes, *, inside=(), alone=(), ends=(), chunks=None, enough_bytes=30):
    """Return the runs of places of those that are recorded as one."""
    chunks = chunks or [0] * len(sizes)
    keys = [GroupKey(chunk, place) for place, chunk in enumerate(chunks)]
    started = [
        Started(keys[place], f"g{place}", size, place in inside, place not in alone)
        for place, size in enumerate(sizes)
    ]
    found = joined_groups(started, {keys[place] for place in ends}, enough_bytes)
    runs = []
    for place, key in enumerate(keys):
        follows = runs and found.get(keys[runs[-1][-1]]) == (key, f"g{place}")
        if follows:
            runs[-1].append(place)
        else:
            runs.append([place])
    assert sum(map(len, runs)) - len(runs) == len(found)
    return [run for run in runs if len(run) > 1]


def test_neighbours_are_joined_until_they_have_enough():
    assert joined([10] * 8) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert joined([10, 10, 50, 10, 10]) == [[0, 1, 2], [3, 4]]
    assert joined([30, 30, 30]) == []
    assert joined([10] * 4, enough_bytes=0) == []
    assert joined([0, 0, 10, 30]) == [[0, 1, 2, 3]]
    assert joined([0, 30, 0, 40, 10]) == [], "what holds nothing would put off the other's end"


def test_a_group_goes_with_what_is_inside_of_it_or_not_at_all():
    assert joined([10, 10, 10, 10, 10], inside=[1, 2]) == [[0, 1, 2], [3, 4]]
    assert joined([10, 10, 10, 10, 10], inside=[2, 3]) == [[0, 1, 2, 3]]
    assert joined([30, 20, 10, 10], inside=[1]) == [[0, 1], [2, 3]], "no more than twice enough"
    assert joined([30, 20, 20, 10, 10], inside=[1, 2]) == [[3, 4]], "more than two"
    assert joined([10, 10, 10, 10], inside=[1, 2], alone=[2]) == []


def test_what_may_not_join_is_between_others():
    assert joined([10] * 6, alone=[2]) == [[0, 1], [3, 4, 5]]
    assert joined([10] * 6, alone=[0, 3]) == [[1, 2], [4, 5]]


def test_behind_what_somebody_asked_for_begins_another():
    assert joined([10] * 6, ends=[0]) == [[1, 2, 3], [4, 5]]
    assert joined([10] * 6, ends=[1, 4]) == [[0, 1], [2, 3, 4]]


def test_another_chunk_begins_another():
    assert joined([10] * 6, chunks=[0, 0, 1, 1, 0, 0]) == [[0, 1], [2, 3], [4, 5]]

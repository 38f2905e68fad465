"""Points of memory against time: what is best of them, and a file that is read strictly."""

from __future__ import annotations

import json
import random

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.report.tradeoff import TradeOffPoint, frontier, read_tradeoff, write_tradeoff


def point(peak_bytes, percent, **more):
    values = {"peak_bytes": peak_bytes, "step_time_percent": percent, **more}
    return TradeOffPoint(**{"label": f"{peak_bytes} at {percent}", **values})


def beats_or_equals(one, other):
    fits = one.peak_bytes <= other.peak_bytes
    return fits and one.step_time_percent <= other.step_time_percent


def test_the_frontier_holds_what_nothing_beats():
    random_numbers = random.Random(7)
    for _ in range(200):
        points = [
            point(random_numbers.randrange(20), float(random_numbers.randrange(20)))
            for _ in range(random_numbers.randrange(12))
        ]
        best = frontier(points)
        pairs = [(p.peak_bytes, p.step_time_percent) for p in best]
        assert pairs == sorted(set(pairs))
        for one in points:
            assert one in best or any(beats_or_equals(other, one) for other in best)
        for one in best:
            assert all(beats_or_equals(one, x) for x in points if beats_or_equals(x, one))


def test_a_file_comes_back_as_it_was(tmp_path):
    points = (point(3, 0.1), point(2, 1 / 3, is_predicted=True, is_plan=True))
    write_tradeoff(tmp_path / "tradeoff.json", "reserved memory", points)
    found = read_tradeoff(tmp_path / "tradeoff.json")
    assert (found.memory, found.points) == ("reserved memory", points)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"points": []}, "points"),
        ({"point": []}, "did you mean 'points'"),
        ({"points": [{"label": "x", "peak_bytes": -1, "step_time_percent": 0}]}, "peak_bytes"),
        ({"points": [{"label": "x", "peak_bytes": 1, "step_time_percent": "1e999"}]}, "percent"),
        ({"points": [{"label": "x" * 201, "peak_bytes": 1, "step_time_percent": 1}]}, "label"),
        ({"points": [{"labl": "x", "peak_bytes": 1, "step_time_percent": 1}]}, "mean 'label'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, change, expected):
    path = tmp_path / "tradeoff.json"
    path.write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=expected):
        read_tradeoff(path)


def test_a_list_is_no_tradeoff(tmp_path):
    path = tmp_path / "tradeoff.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        read_tradeoff(path)

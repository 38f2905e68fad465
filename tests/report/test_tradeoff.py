"""Points of memory against time: what is best of them, and a file that is read strictly."""

from __future__ import annotations

import json
import random

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import read_model
from megatron_offload.report.tradeoff import TradeOff, TradeOffPoint, frontier, write_tradeoff


def point(peak_bytes, percent, **more):
    values = {"peak_bytes": peak_bytes, "step_time_percent": percent, **more}
    return TradeOffPoint(**{"label": f"{peak_bytes} at {percent}", **values})


def test_the_frontier_holds_what_nothing_beats():
    random_numbers = random.Random(7)
    for _ in range(200):
        pairs = [
            (random_numbers.randrange(20), float(random_numbers.randrange(20)))
            for _ in range(random_numbers.randrange(12))
        ]
        best = frontier(point(*pair) for pair in pairs)
        unbeaten = {
            (peak, percent)
            for peak, percent in pairs
            if not any(a <= peak and b <= percent and (a, b) != (peak, percent) for a, b in pairs)
        }
        assert [(p.peak_bytes, p.step_time_percent) for p in best] == sorted(unbeaten)


def test_a_file_comes_back_as_it_was(tmp_path):
    points = (point(3, 0.1), point(2, 1 / 3, is_predicted=True, is_plan=True))
    write_tradeoff(tmp_path / "tradeoff.json", "reserved memory", points)
    found = read_model(TradeOff, tmp_path / "tradeoff.json")
    assert (found.memory, found.points) == ("reserved memory", points)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ([1], "must hold a mapping"),
        ({"points": []}, "points"),
        ({"points": [{"label": "x", "peak_bytes": 1, "step_time_percent": "1e999"}]}, "percent"),
        ({"points": [{"labl": "x", "peak_bytes": 1, "step_time_percent": 1}]}, "mean 'label'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, change, expected):
    path = tmp_path / "tradeoff.json"
    path.write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=expected):
        read_model(TradeOff, path)

"""Points of memory against time: a file that is read strictly."""

from __future__ import annotations

import json

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import read_model, write_model
from megatron_offload.report.tables import TradeOff, TradeOffPoint


def test_a_file_comes_back_as_it_was(tmp_path):
    point = TradeOffPoint(label="x", peak_bytes=2, step_time_percent=1 / 3, kind="plan")
    given = TradeOff(memory="reserved memory", points=(point,))
    write_model(tmp_path / "tradeoff.json", given)
    assert read_model(TradeOff, tmp_path / "tradeoff.json") == given


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ([1], "must hold a mapping"),
        ({"memory": "m", "points": []}, "points"),
        ({"points": [{"label": "x", "peak_bytes": 1, "step_time_percent": "1e999"}]}, "percent"),
        ({"points": [{"labl": "x", "peak_bytes": 1, "step_time_percent": 1}]}, "mean 'label'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, change, expected):
    path = tmp_path / "tradeoff.json"
    path.write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=expected):
        read_model(TradeOff, path)

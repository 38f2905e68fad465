"""Old names are read for one version."""

from __future__ import annotations

import argparse
import json
import warnings

import pytest

from megatron_offload.cli.options import add_flags, read_options
from megatron_offload.cli.plan import Given
from megatron_offload.config import OffloadConfig
from megatron_offload.core.trace import Span, StepTrace, read_traces, write_traces
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.stats import GroupStats, StepStats
from megatron_offload.errors import ConfigError
from megatron_offload.files.renames import RENAMED, current_name
from megatron_offload.files.strict_model import validate
from megatron_offload.integrations.megatron_search import MegatronSearch
from megatron_offload.train.records import RankStep


@pytest.fixture(autouse=True)
def _nothing_warned():
    current_name.cache_clear()


@pytest.mark.parametrize(
    ("made", "old"),
    [
        (GroupStats("mlp", recomputed_bytes=7), "remade_bytes"),
        (StepStats(num_cancelled_offloads=7), "num_early_returns"),
        (StepStats(externally_referenced_bytes=7), "held_elsewhere_bytes"),
        (StepStats(peak_released_bytes=7), "peak_away_bytes"),
    ],
)
def test_attribute_old_name_warns_once(made, old):
    with pytest.warns(DeprecationWarning, match=f"'{old}' is now '{RENAMED[old]}'") as caught:
        assert getattr(made, old) == 7
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(made, old) == 7


def test_search_old_name_is_read():
    search = MegatronSearch(PipelineOffloadManager(OffloadConfig(policy="auto")))
    with pytest.warns(DeprecationWarning, match="is_converged"):
        assert search.is_settled is search.is_converged is False


def test_metric_old_name_is_read():
    stats = StepStats()
    stats.by_name["mlp"].recomputed_bytes = 7
    for old, said in (("remade", "'offload/remade_bytes'"), ("recomputed", "all_counters=True")):
        with pytest.warns(DeprecationWarning, match=said):
            assert stats.metrics()[f"offload/{old}_bytes"] == 7
        assert f"offload/{old}_bytes" not in stats.metrics()


def test_policy_old_key_is_read():
    with pytest.warns(DeprecationWarning, match="'target_bytes' is now 'memory_target'"):
        config = OffloadConfig(policy={"kind": "memory_target", "target_bytes": "2GiB"})
    assert config.policy.memory_target == 2 << 30
    with pytest.raises(ConfigError, match=r"'policy\.memory_target': there is no unit"):
        OffloadConfig(policy={"kind": "memory_target", "target_bytes": "2Gi B"})


@pytest.mark.parametrize(
    ("old", "now"),
    [("--device-target=2GiB", "memory_target"), ("--max-cost=5%", "most_slowdown_percent")],
)
def test_flag_old_name_is_read(old, now):
    parser = argparse.ArgumentParser()
    add_flags(parser, Given)
    with pytest.warns(DeprecationWarning, match=old.partition("=")[0]):
        given = read_options(Given, parser, [old])
    assert getattr(given, now) in ((2 << 30,), 5)


def test_trainer_flag_old_name_is_current():
    with pytest.warns(DeprecationWarning, match="target_bytes"):
        assert current_name("--offload.policy.target_bytes") == "--offload.policy.memory_target"


def test_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="'StepStats' has no attribute 'remade_byte'"):
        _ = StepStats().remade_byte
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("remade_byte", "peak_away_bytes_by_name"):  # the latter is no metric
            with pytest.raises(KeyError, match=f"offload/{name}"):
                _ = StepStats().metrics()[f"offload/{name}"]


def test_record_old_keys_load():
    step = {"rank": 0, "pp_rank": 0, "dp_rank": 0, "loss": 1.0, "grad_norm": 1.0}
    with pytest.warns(DeprecationWarning, match="remade_bytes"):
        read = validate(RankStep, {**step, "step_time_s": 1.0, "remade_bytes": 7}, "it")
    assert read.recomputed_bytes == 7


def test_trace_old_kind_loads(tmp_path):
    span = Span("compute", "recompute", "mlp", 0.0, 1.0)
    write_traces(tmp_path / "trace.json", [StepTrace(0, spans=[span])])
    data = json.loads((tmp_path / "trace.json").read_text())
    for event in data["traceEvents"]:
        event.update({"cat": "remake"} if event["ph"] == "X" else {})
    (tmp_path / "trace.json").write_text(json.dumps(data))
    assert read_traces(tmp_path / "trace.json")[0].spans == [span]

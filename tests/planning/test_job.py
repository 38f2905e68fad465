"""What describes a step is checked when it is made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from megatron_offload.core.machine import Machine
from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork
from megatron_offload.planning.schedule import make_schedule

WORK = GroupWork("mlp", 10, 1.0, 2.0)
STAGE = StageWork((WORK,))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_bytes", -1), ("forward_us", math.nan), ("backward_us", math.inf)],
)
def test_a_group_that_can_not_be_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"group 'mlp'.*{field}"):
        replace(WORK, **{field: value})


def test_a_machine_has_some_bandwidth_and_may_have_no_latency():
    assert Machine(p2p_latency_us=0.0).p2p_latency_us == 0.0
    for field in ("d2h_gbps", "both_gbps", "node_gbps", "node_d2h_gbps", "gpus_per_node"):
        with pytest.raises(ValidationError, match=field):
            Machine(**{field: 0})


def test_settings_are_not_negative():
    with pytest.raises(ConfigError, match="prefetch_bytes"):
        RankSettings(prefetch_bytes=-1)


@pytest.mark.parametrize(
    ("stages", "static_bytes", "said"),
    [
        ((STAGE,), (0, 0), "2 stages, and 1 are described"),
        ((STAGE, STAGE), (0,), "2 ranks, static_bytes are given for 1"),
        ((STAGE, STAGE), (0, -1), "negative"),
    ],
)
def test_a_job_fits_its_schedule(stages, static_bytes, said):
    with pytest.raises(ConfigError, match=said):
        Job(make_schedule("1f1b", 2, 2), stages, static_bytes)

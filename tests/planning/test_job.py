"""What describes a step is checked when it is made."""

from __future__ import annotations

import pytest

from megatron_offload.core.machine import Machine
from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import GroupWork, Job, StageWork
from megatron_offload.planning.schedule import make_schedule

WORK = GroupWork("mlp", 10, 1.0, 2.0)
STAGE = StageWork((WORK,))


def test_a_machine_has_some_bandwidth_and_may_have_no_latency():
    assert Machine(p2p_latency_us=0.0).p2p_latency_us == 0.0
    for field in ("d2h_gbps", "both_gbps", "node_gbps", "node_d2h_gbps", "gpus_per_node"):
        with pytest.raises(ConfigError, match=field):
            Machine(**{field: 0})


@pytest.mark.parametrize(
    ("stages", "static_bytes", "said"),
    [
        ((STAGE,), (0, 0), "2 stages, and 1 are described"),
        ((STAGE, STAGE), (0,), "2 ranks, static_bytes are given for 1"),
    ],
)
def test_a_job_fits_its_schedule(stages, static_bytes, said):
    with pytest.raises(ConfigError, match=said):
        Job(make_schedule("1f1b", 2, 2), stages, static_bytes)

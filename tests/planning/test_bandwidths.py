"""Bandwidths that a plan rests on: the slowest GPU's; all are checked."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.machine.profile import CopyRates, Machine, MachineProfile


def machine(*gpus):
    """Return a machine whose GPUs have the given rates, in the order of `CopyRates`."""
    rates = [CopyRates(**dict(zip(CopyRates.model_fields, one, strict=True))) for one in gpus]
    return MachineProfile(measured_at=datetime.now(UTC), gpus=rates).machine()


def test_of_one_machine_the_slowest_gpu_counts_and_the_sum_of_all():
    found = machine((50, 54, 45, 44, 20, 30), (49, 55, 46, 47, 21, 29))
    assert found == Machine(
        d2h_gbps=49,
        h2d_gbps=54,
        both_gbps=44,
        node_gbps=100,
        node_d2h_share=0.41,
        node_d2h_gbps=None,
        node_h2d_gbps=None,
        gpus_per_node=2,
    )


def test_a_machine_has_some_bandwidth_and_may_have_no_latency():
    assert Machine(p2p_latency_us=0.0).p2p_latency_us == 0.0
    for field in ("d2h_gbps", "both_gbps", "node_gbps", "node_d2h_gbps", "gpus_per_node"):
        with pytest.raises(ConfigError, match=field):
            Machine(**{field: 0})

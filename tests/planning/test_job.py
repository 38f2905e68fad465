"""What describes a machine is checked when it is made."""

from __future__ import annotations

import pytest

from megatron_offload.core.machine import Machine
from megatron_offload.errors import ConfigError


def test_a_machine_has_some_bandwidth_and_may_have_no_latency():
    assert Machine(p2p_latency_us=0.0).p2p_latency_us == 0.0
    for field in ("d2h_gbps", "both_gbps", "node_gbps", "node_d2h_gbps", "gpus_per_node"):
        with pytest.raises(ConfigError, match=field):
            Machine(**{field: 0})

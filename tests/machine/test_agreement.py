"""What ranks measure of their machines: real ranks, and devices that pass for GPUs."""

from __future__ import annotations

import json

import agreement_worker
import pytest
import torch.multiprocessing as mp

from megatron_offload.machine import job_ranks
from megatron_offload.machine.job_ranks import JobRanks, gather

# Ranks of a job.


def test_a_process_alone_is_its_own_job():
    ranks = JobRanks()
    assert (ranks.turn, ranks.num_turns) == (0, 1)
    assert ranks.gather("word") == gather("word") == ["word"]
    ranks.meet()


def test_a_machine_is_known_by_its_kernel_and_else_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(job_ranks.platform, "node", lambda: "some-host")
    assert JobRanks(root=tmp_path).machines == ["some-host"]
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("6f1e\n")
    assert JobRanks(root=tmp_path).machines == ["6f1e"]


@pytest.mark.slow
def test_ranks_measure_in_turn_and_fail_together(tmp_path):
    for name in ("one", "machine_0", "machine_1"):
        boot = tmp_path / name / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text(f"{name}\n")
    mp.start_processes(agreement_worker.run, (tmp_path,), 2, start_method="spawn")
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    for gbps, seen in ((25, first), (10, second)):
        assert seen["one"] == seen["two"] == [pytest.approx(gbps), pytest.approx(2 * gbps)]
        assert seen["no_pins"].startswith("rank 1: ")
        assert "pinning failed" in seen["no_pins"]

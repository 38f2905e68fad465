"""What ranks measure of their machines: real ranks, and devices that pass for GPUs."""

from __future__ import annotations

import json

import agreement_worker
import pytest
import torch.multiprocessing as mp
from fake_gpus import FakeGpu, copy_little

from megatron_offload.machine import job_ranks
from megatron_offload.machine.bandwidth import BandwidthError, measure_machines
from megatron_offload.machine.job_ranks import JobRanks, gather


def test_memory_of_the_device_goes_back_but_for_what_the_allocator_had_cached(monkeypatch):
    copy_little(monkeypatch)
    gpu = FakeGpu()
    ((profile,),) = measure_machines(gpu)
    assert profile.rates.d2h_gbps == pytest.approx(25)
    assert profile.rates.node_h2d_gbps == pytest.approx(50)
    assert gpu.reserved_bytes() == 1000
    unpinnable = FakeGpu(pins=False)
    with pytest.raises(BandwidthError, match=r"rank 0: .*pinning failed"):
        measure_machines(unpinnable)
    assert unpinnable.reserved_bytes() == 1000


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
def test_all_ranks_learn_the_same_and_keep_no_memory(tmp_path):
    for name in ("one", "machine_0", "machine_1"):
        boot = tmp_path / name / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text(f"{name}\n")
    mp.start_processes(agreement_worker.run, (tmp_path,), 2, start_method="spawn")
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["one"] == [[pytest.approx(25), pytest.approx(10)]]
    assert first["two"] == [[pytest.approx(25)], [pytest.approx(10)]]
    assert first["no_pins"].startswith("rank 1: ")
    assert "pinning failed" in first["no_pins"]
    assert first["left_bytes"] == 0
    assert first["planned"]["machine"]["d2h_gbps"] == pytest.approx(10)
    assert first["planned"]["machine"]["node_gbps"] == pytest.approx(3 * (25 + 10))
    assert first["planned"]["machine"]["gpus_per_node"] == 2
    assert first["planned"]["origin"] == "measured now, 2 GPUs at once"

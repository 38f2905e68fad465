"""What ranks take their machines' bandwidths to be: real ranks, and devices that pass for GPUs."""

from __future__ import annotations

import json

import agreement_worker
import pytest
import torch.multiprocessing as mp
from fake_gpus import FakeGpu, copy_little

from megatron_offload.machine import examine, job_ranks
from megatron_offload.machine.agreement import agree_on_machines
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.job_ranks import JobRanks, gather
from megatron_offload.machine.profile import MachineProfile


@pytest.fixture
def agree(tmp_path, monkeypatch):
    """Return a call that agrees alone, on a machine that lies in the test's folder."""
    copy_little(monkeypatch)

    def agree(backend, cache="cache"):
        device = backend.describe()
        return agree_on_machines(backend, device, cache=tmp_path / cache, root=tmp_path)

    return agree


def test_a_machine_is_measured_once(agree):
    gpu, later = FakeGpu(), FakeGpu()
    first, second = agree(gpu), agree(later)
    assert gpu.num_copies > 0
    assert later.num_copies == 0
    assert (first.is_new, second.is_new) == (True, False)
    assert second.profiles == first.profiles
    assert second.path == first.path
    assert MachineProfile.model_validate_json(first.path.read_text()) == first.profiles[0]
    (profile,) = first.profiles
    assert profile.gpus[0].rates.d2h_gbps == pytest.approx(25)
    assert profile.gpus[0].rates.node_h2d_gbps == pytest.approx(50)


def test_memory_of_the_device_goes_back_but_for_what_the_allocator_had_cached(agree):
    gpu = FakeGpu()
    agree(gpu)
    assert gpu.reserved_bytes() == 1000
    unpinnable = FakeGpu(pins=False)
    with pytest.raises(BandwidthError, match=r"rank 0: .*pinning failed"):
        agree(unpinnable, "other")
    assert unpinnable.reserved_bytes() == 1000
    gpu = FakeGpu(bus="5e")
    gpu.empty_device = lambda num_bytes: super(FakeGpu, gpu).empty_device(num_bytes)
    gpu.cached_bytes = 5000
    agree(gpu)
    assert gpu.reserved_bytes() == 5000


@pytest.mark.parametrize("change", ["GPU", "driver"])
def test_another_machine_than_the_one_that_was_measured_is_measured(
    agree, tmp_path, change, monkeypatch
):
    agree(FakeGpu())
    if change == "driver":
        monkeypatch.setattr(examine, "driver_version", lambda: "535.54")
    gpu = FakeGpu(bus="5e" if change == "GPU" else "3b")
    assert agree(gpu).is_new
    assert gpu.num_copies > 0
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    ("spoil", "warning"),
    [
        (lambda text: text[:-5], "can't be read"),
        (lambda text: text.replace('"kernel": "', '"kernel": "x'), "of another machine"),
    ],
)
def test_a_file_that_is_no_good_is_measured_anew_with_a_warning(agree, caplog, spoil, warning):
    path = agree(FakeGpu()).path
    path.write_text(spoil(path.read_text()))
    assert not caplog.records
    again = agree(FakeGpu(gbps=7))
    assert again.is_new
    assert warning in caplog.text
    assert MachineProfile.model_validate_json(path.read_text()).gpus[
        0
    ].rates.d2h_gbps == pytest.approx(7)


def test_a_file_that_can_t_be_written_costs_a_warning(agree, caplog, tmp_path):
    (tmp_path / "file").write_text("mine")
    machines = agree(FakeGpu(), "file/cache")
    assert machines.path is None
    assert machines.is_new
    assert "not kept: can't write" in caplog.text
    assert (tmp_path / "file").read_text() == "mine"


# Ranks of a job.


def test_a_process_alone_is_its_own_job():
    ranks = JobRanks()
    assert (ranks.rank, ranks.turn, ranks.num_turns) == (0, 0, 1)
    assert ranks.gather("word") == ranks.of_my_machine(["word"]) == gather("word") == ["word"]
    ranks.meet()


def test_a_machine_is_known_by_its_kernel_and_else_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(job_ranks.platform, "node", lambda: "some-host")
    assert JobRanks(root=tmp_path).machines == ["some-host"]
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("6f1e\n")
    assert JobRanks(root=tmp_path).machines == ["6f1e"]


@pytest.mark.parametrize(
    ("rank", "turn", "mine"), [(0, 0, [0, 2, 3]), (1, 0, [1]), (2, 1, [0, 2, 3]), (3, 2, [0, 2, 3])]
)
def test_turns_are_by_machine_in_the_order_of_ranks(rank, turn, mine):
    ranks = JobRanks()
    ranks.rank, ranks.machines = rank, ["a", "b", "a", "a"]
    assert (ranks.turn, ranks.num_turns) == (turn, 3)
    assert ranks.of_my_machine([0, 1, 2, 3]) == mine


# Two real ranks.


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of two ranks has seen; read-only."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("one", "machine_0", "machine_1"):
        boot = folder / name / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text(f"{name}\n")
    mp.start_processes(agreement_worker.run, (folder,), 2, start_method="spawn")
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


SITUATIONS = {
    # whether all ranks copy, how often each warns, and what they then know
    "measured": (True, [0, 0], [[25, 10]]),
    "kept": (False, [0, 0], [[25, 10]]),
    "broken": (True, [1, 0], [[25, 10]]),
    "two": (True, [0, 0], [[25], [10]]),
    "one_lacks": (True, [0, 0], [[25], [10]]),
    "two_kept": (False, [0, 0], [[25], [10]]),
    "no_pins": (False, [0, 1], None),
    "unwritable": (True, [1, 0], [[25, 10]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_all_ranks_learn_the_same_and_keep_no_memory(seen, situation):
    copies, num_warnings, rates = SITUATIONS[situation]
    first, second = (rank[situation] for rank in seen)
    agreed = first["agreed"]
    assert agreed == second["agreed"]
    assert first["own"]["left_bytes"] == second["own"]["left_bytes"] == 0
    assert [each["own"]["num_copies"] > 0 for each in (first, second)] == [copies, copies]
    assert [len(each["own"]["warnings"]) for each in (first, second)] == num_warnings
    if rates is None:
        assert "rank 1: " in agreed["error"]
        assert "pinning failed" in agreed["error"]
        return
    assert agreed["is_new"] == copies
    found = [[gpu["rates"]["d2h_gbps"] for gpu in one["gpus"]] for one in agreed["profiles"]]
    assert [pytest.approx(each) for each in rates] == found
    assert (agreed["path"] is None) == (situation == "unwritable")


def test_ranks_of_one_machine_leave_one_profile_and_of_two_each_its_own(seen):
    agreed = seen[0]["measured"]["agreed"]
    (profile,) = agreed["profiles"]
    addresses = [gpu["pci_address"] for gpu in profile["identity"]["gpus"]]
    assert addresses == ["0000:00:00.0", "0000:01:00.0"]
    assert seen[0]["kept"]["agreed"] == {**agreed, "is_new": False}
    assert "machine_0/cache" in seen[1]["two"]["agreed"]["path"]
    assert "can't be read" in seen[0]["broken"]["own"]["warnings"][0]


def test_ranks_with_other_rates_plan_with_the_same(seen):
    planned = [rank["planned"] for rank in seen]
    assert planned[0] == planned[1]
    assert planned[0]["machine"]["d2h_gbps"] == pytest.approx(10)
    assert planned[0]["machine"]["node_gbps"] == pytest.approx(3 * (25 + 10))
    assert planned[0]["machine"]["ranks_per_node"] == 2
    assert planned[0]["origin"].startswith("measured now, 2 GPUs at once, kept in ")

"""Ranks of a job: alone, and over machines; `test_agreement` has real ones."""

from __future__ import annotations

import pytest

from megatron_offload.machine import job_ranks
from megatron_offload.machine.job_ranks import JobRanks, gather


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

"""How many ranks share a host: as their launcher says, or as they count themselves in the store."""

from __future__ import annotations

import socket
from datetime import timedelta
from unittest.mock import Mock
from weakref import WeakKeyDictionary

import pytest
import torch.distributed as dist

from megatron_offload.errors import ConfigError
from megatron_offload.machine import job_ranks
from megatron_offload.machine.job_ranks import num_local_ranks


@pytest.mark.parametrize("name", job_ranks._LOCAL_SIZES)
def test_each_launcher_says_how_many_ranks_share_a_host(name):
    slurm = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert num_local_ranks({**slurm, name: "4"}) == num_local_ranks({name: "3,4(x12),2"}) == 4
    assert num_local_ranks({name: "4", "LOCAL_WORLD_SIZE": "2"}) == 2
    assert num_local_ranks(slurm) == num_local_ranks({name: "large"}) == num_local_ranks({}) == 1


@pytest.mark.parametrize("text", ["0", "-2", "two", "", " 8", "8.0", "1_0", "²", "9" * 5000])
def test_an_unreadable_local_world_size_is_an_error(text):
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE must be an integer of 1 or more"):
        num_local_ranks({"LOCAL_WORLD_SIZE": text})


def test_ranks_that_no_launcher_counts_count_themselves_and_wait_for_none(monkeypatch):
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=10))  # what waits for another rank fails
    job = Mock(DistError=dist.DistError, **{"get_world_size.return_value": 4})
    job.distributed_c10d._get_default_store = lambda: store
    monkeypatch.setattr(job_ranks, "dist", job)

    def ask(host, known):
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setattr(job_ranks, "_counted", known)
        return num_local_ranks({"SLURM_STEP_TASKS_PER_NODE": "1"})

    ranks = [(host, WeakKeyDictionary()) for host in "aabb"]
    assert [ask(*rank) for rank in ranks] == [4, 4, 2, 2], "who isn't known may be on this host"
    assert [ask(*rank) for rank in ranks] == [2, 2, 2, 2]
    assert [*ranks[0][1].values()] == [2], "the store isn't asked again"
    more = [ask("c", WeakKeyDictionary()) for _ in range(6)]
    assert more[-1] == 4, "a file's counts may be of jobs before"
    store = Mock(**{"add.side_effect": dist.DistNetworkError("the first rank has exited")})
    assert ask("a", WeakKeyDictionary()) == 4
    job.get_backend.return_value = "fake"
    assert ask("a", WeakKeyDictionary()) == 1

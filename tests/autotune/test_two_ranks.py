"""Two ranks that plan together: they measure alike, and an error on one is an error on all."""

from __future__ import annotations

import json

import pytest
import torch.multiprocessing as mp
from autotune import two_ranks

from megatron_offload.planning.plan_file import parse_plan


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank has seen, case by case; read-only."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(two_ranks.run, (folder,), 2, start_method="spawn")
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["slowest_counts", "fullest_counts"])
def test_both_follow_one_plan_by_the_number_of_the_worse(seen, case):
    (plan, _, said), (other_plan, _, other_said) = (rank[case] for rank in seen)
    assert (plan, said) == (other_plan, other_said)
    found = parse_plan(plan, "it")
    for rank, rank_plan in zip(seen, found.ranks, strict=True):
        assert rank[case][1] == len(rank_plan.kept)
    if case == "slowest_counts":  # by the second rank alone, whatever moves
        assert found.moved_bytes == 0
        assert said[-1].endswith("no plan was fast enough")
    else:
        assert [rank.measured_peak_bytes for rank in found.ranks] == [190_000, 210_000]
        assert "9.77 KiB more than wanted stay reserved" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("no_target", "TargetError", "can't be brought under 1 B"),
        ("another_place", "ConfigError", "rank 1: its profile is of pipeline rank 1"),
    ],
)
def test_an_error_on_one_rank_is_the_same_on_all(seen, case, kind, text):
    first, second = (rank[case] for rank in seen)
    assert first == second
    assert first[0] == kind
    assert text in first[1]

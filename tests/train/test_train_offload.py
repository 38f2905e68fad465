"""What a run does with what its steps have found, on the virtual clock."""

from __future__ import annotations

import pytest
from virtual_clock import VirtualJob

from megatron_offload.autotune.loop import tune
from megatron_offload.planning.files import load_plan
from megatron_offload.train.loop import keep_plan


@pytest.mark.parametrize("is_owner", [True, False])
def test_the_plan_that_stays_is_said_once_and_written_by_the_first_rank(tmp_path, is_owner):
    job = VirtualJob(0.1)
    loop = tune(job.manager)
    output = tmp_path if is_owner else None
    said = []
    for _ in range(14):
        was_planning = not loop.is_settled
        job.step()
        if was_planning and loop.is_settled:
            said.append(keep_plan(loop, output))
    assert said == [loop.said]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"] * is_owner
    if is_owner:
        assert load_plan(tmp_path / "plan.json") == loop.plan

"""How the device budget is shared by what leaves and what is reloaded."""

from __future__ import annotations

from megatron_offload.core.budget import DeviceBudget


def test_limits_that_are_not_set_follow_the_step():
    budget = DeviceBudget()
    budget.add_saved(100, 100, is_learned=False)
    budget.add_saved(700, 700, is_learned=False)
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == (700, 2 * 700)
    for _ in range(19):
        budget.add_saved(800, 800, is_learned=True)
    assert budget.max_inflight_bytes == budget.prefetch_bytes == 16000 // 8
    budget.begin_step()
    budget.add_saved(1, 1, is_learned=True)
    assert budget.total_bytes == 4000, "the peak of a step holds for those after it"
    budget.begin_step(is_learned=False)
    budget.add_saved(1, 1, is_learned=False)
    assert budget.total_bytes == 3 * 800, "of one that is learned anew, the largest group alone"


def test_what_is_kept_counts_for_a_share_of_the_step_and_not_as_the_largest_group():
    budget = DeviceBudget()
    for _ in range(20):
        budget.add_saved(800, 0, is_learned=True)
    budget.add_saved(0, 100, is_learned=True)
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == (2000, 2000)
    budget = DeviceBudget()
    budget.add_saved(800, 800, is_learned=False)
    assert budget.total_bytes == 3 * 800
    budget.learn(largest_bytes=100)
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == (100, 200)


def test_one_group_may_always_be_reloaded():
    budget = DeviceBudget(0, 0)
    assert budget.may_prefetch(1)
    assert not budget.may_keep(1)
    budget.held_bytes = 1
    assert not budget.may_prefetch(1)


def test_the_default_is_that_of_steps_since_the_restart_whatever_those_before_have_saved():
    budget = DeviceBudget()
    for _ in range(20):
        budget.add_saved(800, 800, is_learned=True)
    budget.begin_step()
    budget.restart()  # half is recomputed from here on, say
    for _ in range(10):
        budget.add_saved(400, 400, is_learned=True)
    budget.learn(400)
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == (500, 800)

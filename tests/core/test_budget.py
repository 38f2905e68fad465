"""How the device budget is shared by what leaves and what is reloaded."""

from __future__ import annotations

from programs import KIB, make_manager, make_model, one_forward_one_backward, run_step

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.engine.observer import Observer

ORDER = one_forward_one_backward(8, depth=6)


class Counts(Observer):
    """Looks at the budget's two counts at every boundary."""

    def __init__(self, budget):
        self.budget = budget
        self.seen = []

    def boundary_passed(self, group):
        self.seen.append((self.budget.inflight_bytes, self.budget.held_bytes))


def watch(manager):
    """Return a list that gets the budget's two counts at every boundary."""
    manager.observers.append(counts := Counts(manager.budget))
    return counts.seen


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


def test_while_the_pipeline_fills_copies_take_the_room_that_nothing_needs_yet():
    model = make_model()
    manager = make_manager(max_inflight_bytes=8 * KIB, prefetch_bytes=16 * KIB)
    for _ in range(2):
        run_step(model, manager, ORDER)
    counts = watch(manager)
    run_step(model, manager, ORDER)
    num_groups = len(manager.learner.profile.groups) // 8
    filling = counts[: 4 * num_groups]  # the first four of six forwards
    assert not any(held for _, held in filling), "nothing of it is needed soon"
    assert max(inflight for inflight, _ in filling) > 8 * KIB
    assert max(held for _, held in counts) > 8 * KIB, "later it is reloaded ahead of its use"


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

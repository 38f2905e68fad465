"""How the device budget is shared by what leaves and what is reloaded."""

from __future__ import annotations

import pytest
from programs import KIB, check_steps, make_manager, make_model, one_forward_one_backward, run_step

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


@pytest.mark.parametrize(
    ("given", "in_warmup"),
    [((None, None), True), ((None, 5), True), ((5, None), False), ((5, 5), False)],
)
def test_the_clock_runs_until_the_first_backward_only_where_limits_follow_the_step(
    given, in_warmup
):
    budget = DeviceBudget(*given)
    assert budget.clock_runs, "before any step"
    budget.begin_step()
    assert budget.clock_runs == in_warmup
    budget.is_warming_up = False
    assert budget.clock_runs


def test_one_group_may_always_be_reloaded():
    budget = DeviceBudget(0, 0)
    assert budget.may_prefetch(1)
    assert not budget.may_keep(1)
    budget.held_bytes = 1
    assert not budget.may_prefetch(1)


@pytest.mark.parametrize("inflight_bytes", [0, 8 * KIB, 24 * KIB])
@pytest.mark.parametrize("prefetch_bytes", [16 * KIB, 40 * KIB])
def test_both_kinds_are_within_the_total(inflight_bytes, prefetch_bytes):
    manager = make_manager(max_inflight_bytes=inflight_bytes, prefetch_bytes=prefetch_bytes)
    counts = watch(manager)
    check_steps(make_model(), manager, ORDER, 3)
    assert max(inflight + held for inflight, held in counts) <= inflight_bytes + prefetch_bytes


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


def test_what_is_needed_at_once_is_not_offloaded():
    model = make_model()
    manager = make_manager(max_inflight_bytes=40 * KIB, prefetch_bytes=40 * KIB)
    order = [("F", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2), ("B", 0)]
    for _ in range(2):
        run_step(model, manager, order)
    num_bytes = {group.key: group.num_bytes for group in manager.learner.profile.groups}
    of_chunk = [sum(n for key, n in num_bytes.items() if key.chunk == c) for c in range(3)]
    assert 2 * of_chunk[1] <= 80 * KIB, "forward and backward of a chunk are within the total"
    assert manager.last_step.offloaded_bytes == of_chunk[0]
    assert manager.last_step.num_cancelled_offloads == manager.last_step.num_late_reloads == 0


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

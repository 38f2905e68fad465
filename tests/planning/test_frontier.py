"""The frontier of moves, beside the best of all plans where those can be counted."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_offload.core.row_config import ranges
from megatron_offload.planning.frontier import KEEP, Action, frontier


def or_nothing(layers):
    return {number: (KEEP, *actions) for number, actions in layers.items()}


def plans_of(layers, *link_bytes, again=()):
    """Return the frontier, of which each plan frees more than the one before and takes longer."""
    plans = frontier([or_nothing(layers), *again], *link_bytes)
    for before, after in itertools.pairwise(plans):
        assert after.freed_bytes > before.freed_bytes
        assert after.us > before.us
    return plans


def some_actions(draw, most):
    number = draw.randint(1, most)
    return tuple(
        Action(((f"site{place}", "recompute"),), draw.randint(1, 100), draw.uniform(0.5, 40.0))
        for place in range(number)
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_frees_as_much_for_less_but_for_one_move(seed):
    draw = random.Random(seed)
    kinds = [some_actions(draw, 4) for _ in range(2)]
    layers = {number: draw.choice(kinds) for number in range(5)}
    plans = plans_of(layers)
    every = [
        (sum(one.freed_bytes for one in chosen), sum(one.us for one in chosen))
        for chosen in itertools.product(*((KEEP, *actions) for actions in layers.values()))
    ]
    for plan in plans:
        assert plan.freed_bytes == sum(one.freed_bytes for one in plan.actions.values())
        assert plan.us == pytest.approx(sum(one.us for one in plan.actions.values()))
        least = min(us for freed_bytes, us in every if freed_bytes >= plan.freed_bytes)
        move_us = max(action.us for actions in kinds for action in actions)
        assert plan.us <= least + move_us
    assert plans[-1].freed_bytes == max(freed_bytes for freed_bytes, _ in every)


def copying_actions(draw, most):
    def action(place):
        freed_bytes = draw.randint(1, 100)
        if draw.random() < 0.5:
            return Action(((f"site{place}", "recompute"),), freed_bytes, draw.uniform(5.0, 40.0))
        return Action(((f"site{place}", 1),), freed_bytes, draw.uniform(0.1, 1.0), freed_bytes)

    return tuple(action(place) for place in range(draw.randint(1, most)))


@pytest.mark.parametrize("seed", range(30))
def test_no_more_is_offloaded_than_can_be_copied_before_it_is_needed(seed):
    draw = random.Random(seed)
    kinds = [copying_actions(draw, 4) for _ in range(2)]
    layers = {number: draw.choice(kinds) for number in range(5)}
    link_bytes = {number: draw.randint(10, 60) * (4 - number) for number in layers}
    plans = plans_of(layers, link_bytes)

    def fits(chosen):
        sizes = [one.copied_bytes for one in chosen]
        return all(sum(sizes[place:]) <= link_bytes[place] for place in layers)

    every = [*itertools.product(*((KEEP, *actions) for actions in layers.values()))]
    can = [(sum(x.freed_bytes for x in chosen)) for chosen in every if fits(chosen)]
    assert all(fits([plan.actions[number] for number in layers]) for plan in plans)
    most_bytes = max(action.freed_bytes for actions in kinds for action in actions)
    assert plans[-1].freed_bytes >= max(can) - most_bytes


def test_the_link_is_left_to_what_can_not_be_recomputed():
    """Attention offloaded alone, as where it holds collectives; MLPs either way."""
    attention = Action((("attention", "all"),), 20, 1.0, 20)
    mlp = Action((("mlp", "all"),), 60, 1.0, 60)
    again = Action((("mlp", "recompute"),), 60, 9.0)
    both = (
        Action(x.parts + attention.parts, *map(sum, zip(x[1:], attention[1:], strict=True)))
        for x in (mlp, again)
    )
    layers = dict.fromkeys(range(8), (attention, mlp, again, *both))
    plans = plans_of(layers, {number: 20 * (8 - number) for number in layers})
    assert plans[-1].freed_bytes == 8 * 80
    assert plans[-1].us == pytest.approx(8 * 10.0)


def with_functions(draw, most):
    """What may be done with a layer, and the same where functions run again, which copies less."""
    own, size = copying_actions(draw, most), draw.randint(1, 40)
    unit = ("norm", "recompute")
    with_units = (
        Action((unit, *x.parts), x.freed_bytes + size // 2, x.us + 3.0, x.copied_bytes // 2)
        for x in own
    )
    return own, (Action((unit,), size, 3.0), *with_units)


@pytest.mark.parametrize("seed", range(30))
def test_functions_run_again_in_all_layers_or_in_none(seed):
    draw = random.Random(seed)
    pairs = [with_functions(draw, 3), with_functions(draw, 3), (copying_actions(draw, 2), ())]
    both = {number: draw.choice(pairs) for number in range(4)}
    layers = {number: own for number, (own, _) in both.items()}
    again = or_nothing(layers) | {number: own for number, (_, own) in both.items() if own}
    plans = plans_of(layers, again=[again])
    for plan in plans:
        assert any(
            all(action in actions[number] for number, action in plan.actions.items())
            for actions in (or_nothing(layers), again)
        )
    most = (
        sum(max(one.freed_bytes for one in own) for own in actions.values())
        for actions in (layers, again)
    )
    assert plans[-1].freed_bytes == max(most)


@pytest.mark.parametrize("us", [0.0, -1.0])
def test_the_first_plan_does_nothing_whatever_is_said_to_take_no_time(us):
    free, dear = Action((("layer", "recompute"),), 5, us), Action((("mlp", 1),), 4, 2.0, 4)
    plans = frontier([or_nothing({0: (free,), 1: (dear,)})], {0: 9, 1: 9})
    assert plans[0].rows() == ()
    assert [plan.freed_bytes for plan in plans] == [0, 5, 9]


def test_what_is_done_at_first_is_the_first_plan_and_no_other():
    norm = Action((("norm", "recompute"),), 5, 1.0)
    slow = Action((("norm", "recompute"), ("mlp", "recompute")), 10, 2.0)
    assert [plan.actions for plan in frontier([{0: (norm, slow)}])] == [{0: norm}, {0: slow}]


def test_layers_run_again_as_a_whole_beside_others_whose_functions_do():
    act = Action((("mlp_act", "recompute"),), 5, 1.0)
    layer = Action((("layer", "recompute"),), 20, 30.0)
    again = [dict.fromkeys(range(2), (act, layer))]
    plans = plans_of(dict.fromkeys(range(2), (layer,)), again=again)
    assert [plan.freed_bytes for plan in plans] == [0, 10, 20, 25, 40]
    assert [plan.us for plan in plans] == [0.0, 2.0, 30.0, 31.0, 60.0]


def test_what_the_last_layer_saves_is_recomputed_where_it_can_not_be_copied_in_time():
    offload, rerun = Action((("mlp", "all"),), 8, 0.1, 8), Action((("mlp", "recompute"),), 8, 3.0)
    plan = plans_of(dict.fromkeys(range(3), (offload, rerun)), {0: 20, 1: 10, 2: 0})[-1]
    assert [*plan.actions.values()] == [offload, offload, rerun]


def test_what_frees_more_takes_the_place_of_what_was_there():
    mlp = Action((("mlp", "recompute"),), 4, 1.0)
    layer = Action((("layer", "recompute"),), 6, 2.0)
    plans = plans_of(dict.fromkeys(range(2), (mlp, layer)))
    assert [plan.freed_bytes for plan in plans] == [0, 4, 8, 10, 12]
    assert [str(row) for row in plans[3].rows()] == [
        "{layers: 0, site: layer, recompute: true}",
        "{layers: 1, site: mlp, recompute: true}",
    ]


def test_layers_that_are_alike_are_one_row():
    both = Action((("mlp", "recompute"), ("attention", 2)), 4, 1.0)
    plan = plans_of(dict.fromkeys((0, 1, 2, 7), (both,)))[-1]
    assert [str(row) for row in plan.rows()] == [
        '{layers: "0-2,7", site: mlp, recompute: true}',
        '{layers: "0-2,7", site: attention, offload: 2}',
    ]


def test_a_model_of_which_nothing_can_be_freed_has_one_plan():
    (plan,) = plans_of({0: (), 1: ()})
    assert plan.rows() == ()


@pytest.mark.parametrize(
    ("numbers", "expected"), [([3], "3"), ([5, 3, 4], "3-5"), ([0, 2, 3, 9], "0,2-3,9")]
)
def test_numbers_are_written_as_rows_take_them(numbers, expected):
    assert ranges(numbers) == expected

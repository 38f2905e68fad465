"""Which plans stages follow one after the other, on steps that take and reserve what is made up."""

from __future__ import annotations

import itertools

import pytest

from megatron_offload.core.policy_config import AutoConfig
from megatron_offload.core.row_config import UNITS
from megatron_offload.planning.frontier import KEEP, Action
from megatron_offload.planning.row_choice import NOTHING, RowChoice, Slowdown, Stage

MIB = 1 << 20
BARE_US = 1000.0


def layers(num_layers=8, us=10.0, size=MIB, copied=0):
    action = Action((("mlp", 1 if copied else "recompute"),), size, us, copied)
    return [dict.fromkeys(range(num_layers), (KEEP, action))]


def stage(**sizes):
    num_layers = sizes.pop("num_layers", 8)
    given = {"bare_bytes": 100 * MIB, "reserved_bytes": 100 * MIB, **sizes}
    return Stage(layers(num_layers, given.pop("us", 10.0)), **given)


def searched(choice, percent_of, reserved_of=lambda name, stage: 0, num_steps=32):
    """Ask for plans until one is final; return why, and what was tried."""
    tried = []
    while True:
        is_final, text = choice.next()
        places = {name: one.place for name, one in choice.stages.items()}
        if is_final:
            return text, tried
        tried.append(places)
        assert len(tried) < 20
        percent = percent_of(choice)
        found = Slowdown(percent, percent - 0.1, percent + 0.1)
        reserved = {name: reserved_of(name, one) for name, one in choice.stages.items()}
        assert choice.note(found, reserved, num_steps)


def auto(percent):
    return AutoConfig(kind="auto", most_slowdown_percent=percent)


def slowest_us(choice):
    return max(one.plan.us for one in choice.stages.values())


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 10.0])
def test_what_steps_take_is_kept_to_whatever_was_predicted(factor):
    choice = RowChoice(auto(5), {"a": stage(num_layers=60, us=2.0, bare_bytes=60 * MIB)}, BARE_US)
    text, tried = searched(choice, lambda one: factor * slowest_us(one) / BARE_US * 100)
    percent = factor * slowest_us(choice) / BARE_US * 100
    assert percent <= 5
    assert percent >= 2.5 or len(tried) == 3
    assert "at most 5 % is wanted" in text


def test_stages_take_moves_that_cost_as_much_as_the_slowest_s():
    stages = {"slow": stage(us=40.0), "quick": stage(us=10.0), "empty": Stage([{}])}
    choice = RowChoice(auto(10), stages, BARE_US)
    searched(choice, lambda one: slowest_us(one) / BARE_US * 100)
    places = {name: one.place for name, one in stages.items()}
    assert places == {"slow": 2, "quick": 8, "empty": 0}


@pytest.mark.parametrize(
    ("percent", "error", "num_steps", "is_followed"),
    [
        (1.5, 0.5, 2, True),
        (2.4, 0.8, 2, True),  # beside 2 % that were predicted
        (3.5, 1.0, 20, False),
        (9.0, 1.5, 2, False),  # whatever was predicted
        (14.0, 3.5, 2, False),  # even if it is doubtful
        (1.0, 4.0, 40, False),  # as it isn't known
    ],
)
def test_steps_go_on_until_it_is_clear_whether_the_limit_is_kept(
    percent, error, num_steps, is_followed
):
    choice = RowChoice(auto(3), {"a": stage(num_layers=2)}, BARE_US)
    assert not choice.next()[0]
    assert choice.stages["a"].place == 2, "2 % are predicted"
    found = Slowdown.of(percent, error)
    while not choice.note(found, {"a": 0}, 2):
        num_steps -= 2
    assert num_steps == 2
    assert choice.next()[0] or not is_followed
    assert (choice.stages["a"].place == 2) == is_followed


@pytest.mark.parametrize(
    ("percent", "us", "place"),
    [
        (0.0, 1.0, 8),  # 0.8 % are predicted, and nothing speaks against it
        (0.0, 2.0, 7),  # 1.6 % and its error are more than the limit
        (0.0, 10.0, 1),
        (5.0, 10.0, 1),
        (8.0, 10.0, 0),  # one error above the limit, whatever was predicted
        (0.0, 30.0, 0),
    ],
)
def test_where_steps_say_too_little_a_plan_is_followed_that_is_far_below_the_limit(
    percent, us, place
):
    own = stage(us=us, bare_bytes=8 * MIB)
    choice = RowChoice(auto(3), {"a": own}, BARE_US)
    assert not choice.next()[0]
    first = own.place
    while not choice.note(Slowdown.of(percent, 4.0), {"a": 0}, 2):
        assert not choice.is_blind
    assert choice.is_blind
    assert choice.next()[0] == (place in (0, first)), "another is tried, and not measured"
    assert own.place == place


def test_where_slow_steps_spoke_against_a_plan_the_least_is_tried_before_nothing():
    own = stage(num_layers=2, bare_bytes=8 * MIB)
    choice = RowChoice(auto(3), {"a": own}, BARE_US)
    for place, percent, error in ((2, 9.0, 2.8), (1, 0.5, 0.4)):
        assert not choice.next()[0]
        assert own.place == place
        while not choice.note(Slowdown.of(percent, error), {"a": 0}, 2):
            pass
    assert choice.next()[0]
    assert own.place == 1


def test_the_first_plan_copies_no_more_than_memory_is_ready_for():
    for ready_bytes, expected in ((3.5 * MIB, 3), (0, 8)):
        own = Stage(layers(copied=MIB), bare_bytes=8 * MIB, ready_bytes=ready_bytes)
        choice = RowChoice(auto(9), {"a": own}, BARE_US)
        assert not choice.next()[0]
        assert own.place == expected, "where nothing is ready, it is waited for"
        choice.note(Slowdown.of(1.0, 0.1), {"a": 0}, 2)
        assert choice.next()[0] == (expected == 8)
        assert own.place == 8


def test_a_plan_is_for_forwards_that_need_more_than_the_longest_does_with_it():
    tokens = [100, 50, 50, 30]
    own = stage(num_layers=10, us=8.0, bare_bytes=10 * MIB, tokens=tokens, saved_bytes=10 * MIB)
    for number, plan in enumerate(own.plans):
        least = plan.min_tokens
        expected = 98 - 9.8 * number if 0 < number < 7 else 0
        assert expected - 1 < least <= expected, "those that are for all forwards say nothing of it"
        share = sum(x for x in tokens if x >= least) / sum(tokens)
        assert plan.us == pytest.approx(share * number * 8.0)
        assert {row.min_tokens for row in plan.rows()} == ({least} if number else set())
    for site in ("norm", "model", "mlp.experts", "moe_act"):
        what = "all" if site == "model" else "recompute"
        action = Action(((site, what),), MIB, 1.0)
        alone = Stage([{0: (KEEP, action)}], bare_bytes=2 * MIB, tokens=tokens, saved_bytes=2 * MIB)
        assert alone.plans[-1].freed_bytes == MIB
        assert alone.plans[-1].min_tokens == 0, site


def test_each_stage_keeps_its_own_target_by_the_lightest_plan_that_does():
    stages = {
        "full": stage(target_bytes=97 * MIB, num_inflight=1.0),
        "deep": stage(target_bytes=97 * MIB, num_inflight=4.0),
        "small": stage(target_bytes=97 * MIB, reserved_bytes=90 * MIB, bare_bytes=90 * MIB),
    }
    choice = RowChoice(None, stages, BARE_US)
    text, _ = searched(
        choice,
        lambda one: 1.0,
        lambda name, one: int(one.bare_bytes - one.num_inflight * one.plan.freed_bytes),
        num_steps=8,
    )
    assert {name: one.place for name, one in stages.items()} == {"full": 5, "deep": 1, "small": 0}
    assert "at most 97.00 MiB is wanted" in text


def test_where_no_plan_keeps_a_target_the_quickest_that_frees_as_much_as_any_is_followed():
    own = stage(target_bytes=90 * MIB)
    choice = RowChoice(None, {"a": own}, BARE_US)
    _, tried = searched(choice, lambda _: 1.0, lambda *_: 95 * MIB if own.place < 6 else 93 * MIB)
    assert [one["a"] for one in tried] == [8]
    own.tried = {place: (None, size * MIB) for place, size in ((5, 95), (6, 93), (8, 93))}
    assert own.next_place()[:2] == (6, True)


def test_what_is_refused_is_in_no_plan_from_then_on():
    own = (Action((("mlp", "recompute"),), MIB, 1.0), Action((("mlp", 1),), MIB, 9.0, MIB))
    choice = RowChoice(auto(50), {"a": Stage([{0: (KEEP, *own)}], bare_bytes=MIB)}, BARE_US)
    choice.next()
    assert choice.stages["a"].plan.actions[0].parts == (("mlp", "recompute"),)
    choice.refuse({"a": [("mlp", "recompute")]})
    assert choice.next() == (False, "")
    assert choice.stages["a"].plan.actions[0].parts == (("mlp", 1),)
    choice.refuse({"a": [("mlp", 1)]})
    assert choice.next() == (True, NOTHING)


def test_functions_of_which_one_is_refused_run_again_in_no_layer_that_has_it():
    norm, both = (
        Action(tuple((x, "recompute") for x in own), MIB, 1.0) for own in (UNITS[:1], UNITS)
    )
    mlp = Action((*both.parts, ("mlp", "recompute")), 2 * MIB, 9.0)
    own = Stage([dict.fromkeys(range(2), (KEEP,)), {0: (norm,), 1: (both, mlp)}])
    assert own.plans[-1].actions == {0: norm, 1: mlp}
    own.refuse([("mlp_act", "recompute")])
    assert [plan.actions for plan in own.plans[1:]] == [{0: norm, 1: KEEP}]


def test_a_thousand_ranks_of_sixteen_stages_choose_at_once():
    stages = {str(one): stage(num_layers=8, us=10.0 + one) for one in range(16)}
    choice = RowChoice(auto(5), stages, BARE_US)
    searched(choice, lambda one: slowest_us(one) / BARE_US * 100)
    places = [one.place for one in stages.values()]
    assert all(x >= y for x, y in itertools.pairwise(places))


def test_no_more_than_is_trusted_is_hoped_for_where_nothing_is_measured():
    policy = AutoConfig(kind="auto", most_slowdown_percent=1, measured_plans=0)
    choice = RowChoice(policy, {"a": stage(num_layers=1, us=12.0, bare_bytes=8 * MIB)}, BARE_US)
    assert choice.next()[0], "1.2 % are predicted"
    assert choice.stages["a"].place == 0
    measured = {"a": stage(num_layers=1, us=12.0, bare_bytes=8 * MIB)}
    choice = RowChoice(auto(1), measured, BARE_US)
    assert not choice.next()[0]
    assert choice.stages["a"].place == 1, "it may take less"

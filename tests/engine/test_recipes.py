"""What a cheap function made is dropped, and recomputed in backward: every bit as it was."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from programs import TIMINGS, assert_nothing_left, assert_same, in_group, make_manager, twice
from recipe_programs import TENSOR_BYTES, WIDTH, check, make, of, one_group, rows, run, save

from megatron_offload.recompute.arguments import taken_apart


def dropout_of_norm(x):
    return F.dropout(F.layer_norm(x, (WIDTH,)), 0.3)


def norm_then_linear(manager, x):
    """A norm with dropout in one group, what uses it in the next, and an activation there."""
    weight = torch.full((WIDTH, WIDTH), 0.1).requires_grad_()
    y = in_group(manager, lambda x: make(manager, dropout_of_norm, x), x, "norm")

    def mlp(y):
        return make(manager, F.gelu, y @ weight) @ weight

    return x + in_group(manager, mlp, y, "mlp")


BUDGETS = [
    {},
    {"checking": True},
    {"max_inflight_bytes": 2 * TENSOR_BYTES, "prefetch_bytes": 3 * TENSOR_BYTES},
    {"host_memory_bytes": 0},
]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("settings", BUDGETS, ids=str)
def test_what_is_recomputed_has_the_same_bits(timing, settings):
    stats = check(make_manager(timing, **settings), norm_then_linear)
    assert stats.by_name["mlp"].recomputed_bytes == 2 * TENSOR_BYTES
    assert stats.refused_recipe_bytes == {}


def test_the_summary_counts_what_is_recomputed_until_its_backward():
    manager = make_manager()
    for _ in range(3):
        for _ in range(2):  # one after the other: both are never away at once
            manager.begin_chunk()
            norm_then_linear(manager, rows() * 1.0).sum().backward()
        manager.reset()
        assert manager.last_step.recomputed_bytes == 2 * 2 * TENSOR_BYTES
        assert manager.last_step.peak_released_bytes_by_name["mlp"] >= 2 * TENSOR_BYTES
        stats = manager.last_step
        assert stats.peak_released_bytes < stats.offloaded_bytes + stats.recomputed_bytes
        assert manager.host_pool.alone.total_bytes == 0
    with manager.step():
        norm_then_linear(manager, rows() * 1.0)  # a backward that never comes
    assert manager.host_pool.alone.total_bytes == 0


def test_what_it_is_made_of_is_reloaded_before_it():
    def forward(manager, x):
        y = in_group(manager, lambda x: make(manager, F.gelu, save(x, x)), x, "source")
        z = y * 1.0
        for name in ("between", "between"):
            z = in_group(manager, lambda z: save(z, z.detach() * 1.0), z, name)
        z = in_group(manager, lambda z: save(z, y), z, "user")
        return in_group(manager, lambda z: save(z, z.detach() * 1.0), z, "last")

    manager = make_manager("eager", prefetch_bytes=2 * TENSOR_BYTES)
    stats = check(manager, forward)
    source, *_, user, _ = manager.learner.profile.groups
    assert (source.num_bytes, user.num_bytes) == (2 * TENSOR_BYTES, 0)
    assert user.needs == (source.key,)
    assert stats.recomputed_bytes_by_unit == {"by_hand": TENSOR_BYTES}
    # By the order of backwards alone those between would take the room.
    assert stats.by_name["source"].num_late_reloads == 0
    assert stats.by_name["source"].reloaded_bytes == 2 * TENSOR_BYTES


def test_what_needs_a_gradient_needs_it_when_it_is_recomputed():
    """A product of matrices has another kernel where the smaller of the two needs none."""

    def asks(*given):
        return given[0] * (2 if all(x.requires_grad for x in given) else 3)

    @one_group
    def forward(manager, x):
        weights = torch.ones(WIDTH, requires_grad=True), torch.nn.Parameter(torch.ones(WIDTH))
        return save(save(x, x), make(manager, asks, x, *weights))

    assert check(make_manager(min_tensor_bytes=1024), forward).recomputed_bytes == TENSOR_BYTES


def test_recipes_in_a_row_are_followed_three_deep():
    """Each saves its input. The fourth can't be made of nothing but recipes, so it is offloaded."""

    @one_group
    def forward(manager, x):
        y = x * 1.0
        for function in (torch.cos, torch.sin, torch.atan, torch.cos, torch.sin):
            y = make(manager, function, y)
        return save(y, y)

    @one_group
    def unsaved(manager, x):
        y = x.detach()
        for function in (torch.cos, torch.exp, torch.tanh):
            y = make(manager, function, y)
        return save(save(x, x), y)

    for timing in TIMINGS:
        stats = check(make_manager(timing, checking=True), forward)
        assert stats.recomputed_bytes == 4 * TENSOR_BYTES
        assert stats.refused_recipe_bytes == {"more than 3 recipes in a row": TENSOR_BYTES}
        assert check(make_manager(timing, checking=True), unsaved).recomputed_bytes == TENSOR_BYTES


def test_two_consumers_share_what_is_recomputed():
    calls = []

    def counted(x):
        calls.append(x)
        return x.cos()

    def forward(manager, x):
        y = in_group(manager, lambda x: make(manager, counted, save(x, x)), x, "maker")
        z = in_group(manager, lambda y: save(y, y) + save(y, y.t()).sum(), y, "one")
        return in_group(manager, lambda z: save(z, y[2:], y), z, "two")

    manager = make_manager(checking=True)
    expected = run(None, forward)
    calls.clear()
    assert_same(expected, run(manager, forward))
    assert manager.last_step.recomputed_bytes == TENSOR_BYTES
    assert len(calls) == 3  # in forward twice, to compare them, and in backward


def test_each_stream_recomputes_for_itself():  # none is ordered behind what another has made
    calls = []

    def counted(x):
        calls.append(x)
        return x.cos()

    manager = make_manager(begins_chunk=True)
    x = rows()
    y = in_group(manager, lambda x: make(manager, counted, save(x, x)), x, "maker")
    one = in_group(manager, lambda y: save(y, y), y, "one")
    two = in_group(manager, lambda y: save(y, y), y, "two")
    del y  # else it is read as it is
    expected = torch.autograd.grad(one.sum(), x, retain_graph=True)
    side = manager.backend.side_stream
    side.wait_event(manager.backend.compute_stream().record_event())
    with manager.backend.computing_on(side):
        assert_same(expected, torch.autograd.grad(two.sum(), x))
    assert len(calls) == 4  # in forward twice, and once on each
    manager.reset()


def test_autocast_of_the_forward_is_that_of_backward():
    def forward(manager, x):
        with torch.autocast("cpu", torch.bfloat16):
            weight = torch.full((WIDTH, WIDTH), 0.1, requires_grad=True)
            y = of(lambda x: F.gelu(F.linear(x, weight)))(manager, x)
        with torch.autocast("cpu", torch.float16):  # another one, and in backward none
            return of(torch.nn.Linear(WIDTH, WIDTH, device="cpu").requires_grad_(False))(manager, y)

    manager = make_manager(checking=True)
    torch.manual_seed(0)
    assert check(manager, forward).recomputed_bytes == TENSOR_BYTES


@contextmanager
def other_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("switch", "context"),
    [
        (torch.is_grad_enabled, nullcontext),
        (torch.is_grad_enabled, torch.no_grad),
        (lambda: torch.backends.mkldnn.enabled, lambda: torch.backends.mkldnn.flags(enabled=False)),
        (lambda: torch.get_default_dtype() == torch.float32, other_default_dtype),
        (lambda: torch.ones(WIDTH).is_meta, lambda: torch.device("meta")),
    ],
    ids=["grad", "no grad", "backend", "default dtype", "default device"],
)
def test_a_function_that_asks_for_a_switch_finds_that_of_the_forward(switch, context):
    @one_group
    def forward(manager, x):
        with context():
            y = make(manager, lambda x: x.cos() if switch() else x.sin(), x)
        return save(save(x, x), y)

    assert check(make_manager(checking=True), forward).recomputed_bytes == TENSOR_BYTES


def test_a_small_parameter_that_is_written_to_unseen_counts_as_it_was():
    def forward(manager, x):
        scale = torch.nn.Parameter(torch.ones(WIDTH))

        y = in_group(manager, lambda x: save(save(x, x), make(manager, torch.mul, x, scale)), x)
        scale.data.fill_(2.0)
        return y

    assert check(make_manager(checking=True), forward).recomputed_bytes == TENSOR_BYTES


def backward_of_backward(loss):
    (leaf,) = set(leaves_of(loss.grad_fn))
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    grad.square().sum().backward()


def leaves_of(node):
    if hasattr(node, "variable"):
        yield node.variable
    for following, _ in node.next_functions:
        if following is not None:
            yield from leaves_of(following)


@pytest.mark.parametrize("backward", [twice, backward_of_backward])
@pytest.mark.parametrize("timing", TIMINGS)
def test_a_graph_that_is_gone_through_again_has_the_same_bits(timing, backward):
    @one_group
    def forward(manager, x):
        y = make(manager, lambda x: F.dropout(x.cos(), 0.3), x)
        return y * y.exp()

    check(make_manager(timing, checking=True), forward, backward=backward)


def test_an_error_of_the_function_is_the_program_s_and_harms_nothing():
    manager, fails = make_manager(), []

    def function(x):
        if fails and fails.pop():
            torch.rand(3)
            raise ValueError("not now")
        return x.cos()

    expected = run(None, of(function))
    for aborts in (True, False):
        fails += [True, False]  # taken from the end: not in forward, but in backward
        with pytest.raises(ValueError, match="not now"):
            run(manager, of(function))
        if aborts:
            manager.abort()
        assert_same(expected, run(manager, of(function)))
        assert_nothing_left(manager)


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: deque([x])])
def test_what_a_call_is_given_is_taken_apart_and_put_together(wrap, is_named):
    x, y = torch.ones(1), torch.ones(2)

    def call(*args, **kwargs):
        return args, kwargs

    args, kwargs = ((x,), {"inner": wrap(y)}) if is_named else ((x, wrap(y)), {})
    again, leaves = taken_apart(call, args, kwargs)
    assert [*leaves] == [x, y]
    assert again(*leaves) == (args, kwargs)

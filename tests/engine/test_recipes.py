"""What a cheap function made is dropped, and recomputed in backward: every bit as it was."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from programs import TIMINGS, Times, assert_nothing_left, assert_same, in_group, make_manager, twice
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_offload.engine.hooks import is_in_backward
from megatron_offload.errors import CorruptionError, InPlaceModificationError, StateError
from megatron_offload.recompute import proof
from megatron_offload.recompute.recipes import add_recipe, recomputable

ROWS, WIDTH = 16, 32
TENSOR_BYTES = ROWS * WIDTH * 4


save = Times.apply


def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()


def make(manager, function, *inputs):
    return recomputable(function, *inputs, manager=manager) if manager else function(*inputs)


def run(manager, forward, *, backward=torch.Tensor.backward):
    """Return the loss and the input's gradient of one step of ``forward(manager, x)``."""
    torch.manual_seed(1)
    leaf = rows()
    with manager.step() if manager else nullcontext():
        loss = forward(manager, leaf * 1.0).square().mean()
        torch.manual_seed(2)  # backward has other random numbers before it than forward had
        backward(loss)
        value = loss.detach().clone()
        del loss
    return [value, leaf.grad, torch.rand(1)]


def check(manager, forward, *, num_steps=3, **options):
    """Take steps with the bits of none; return the last one's counters."""
    expected = run(None, forward, **options)
    for _ in range(num_steps):
        assert_same(expected, run(manager, forward, **options))
        assert_nothing_left(manager)
    return manager.last_step


def dropout_of_norm(x):
    return F.dropout(F.layer_norm(x, (WIDTH,)), 0.3)


def norm_then_linear(manager, x):
    """A norm with dropout in one group, what uses it in the next, and an activation there."""
    weight = torch.full((WIDTH, WIDTH), 0.1).requires_grad_()
    y = in_group(manager, lambda x: make(manager, dropout_of_norm, x), x, "norm")

    def mlp(y):
        return make(manager, F.gelu, y @ weight) @ weight

    return x + in_group(manager, mlp, y, "mlp")


def one_group(inner):
    """Return a forward of one group, which runs ``inner(manager, x)``."""
    return lambda manager, x: in_group(manager, lambda x: inner(manager, x), x)


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


@pytest.mark.parametrize("layout", ["expanded", "sparse"])
def test_a_constant_keeps_its_layout(layout):
    column = torch.linspace(0, 1, WIDTH)[:, None]
    scale = column.expand(WIDTH, ROWS) if layout == "expanded" else column.to_sparse_csr()
    scale = torch.nn.Parameter(scale, requires_grad=False)

    def scaled(x, scale):
        return scale.t().sin() * x.cos() if layout == "expanded" else torch.mm(x, scale).cos()

    def inner(manager, x):
        y = make(manager, scaled, save(x, x), scale)
        return save(y, y)

    stats = check(make_manager(), one_group(inner))
    assert (stats.recomputed_bytes > 0) is (layout == "expanded")


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


def test_its_memory_is_free_from_the_commit_on():
    manager = make_manager(begins_chunk=True)
    x = rows() * 1.0
    y = in_group(manager, lambda x: make(manager, F.gelu, save(x, x)), x, "act")
    before = y.untyped_storage()._weak_ref()
    z = in_group(manager, lambda y: save(y, y), y, "user")
    del y
    assert torch.UntypedStorage._new_with_weak_ptr(before) is None
    z.sum().backward()


def with_other_eps(x):
    return F.layer_norm(x, (WIDTH,), eps=1e-6)


@pytest.mark.parametrize("wrong", [with_other_eps, dropout_of_norm])
@pytest.mark.parametrize("settings", [{}, {"checking": True}], ids=str)
def test_a_wrong_recipe_costs_no_bit_and_is_named(wrong, settings, caplog):
    @one_group
    def forward(manager, x):
        y = F.dropout(F.layer_norm(save(x, x), (WIDTH,), eps=1e-5), 0.3)
        if manager:
            add_recipe(manager.recorded_chunk(), y, wrong, [x], unit="norm")
        return save(y, y) + torch.rand(())  # which a proof draws nothing before

    manager = make_manager(**settings)
    assert check(manager, forward, num_steps=1).proven_bytes == TENSOR_BYTES
    stats = check(manager, forward, num_steps=2)
    assert (stats.recomputed_bytes, stats.proven_bytes) == (0, 0)
    assert stats.refused_recipe_bytes == {OTHER_BITS: TENSOR_BYTES}
    (text,) = (x for x in caplog.messages if x.startswith("recompute"))
    assert f"what {wrong.__name__} (call 0 of each forward) returns is kept" in text


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_the_proof_puts_other_libraries_random_numbers_back(draw):
    drawn = []
    for manager in (None, make_manager()):
        random.seed(0)
        np.random.seed(0)
        drawn.append([*run(manager, of(lambda x: x.cos() * (1 + draw())))])
        drawn[-1].append(torch.tensor(draw()))
    assert_same(*drawn)


OTHER_BITS = "it was compared when it was recomputed, and had other bits"


def test_what_was_proven_is_proven_again_now_and_then(monkeypatch):
    monkeypatch.setattr(proof, "PROVE_EVERY", 3)
    wrong = []

    def sometimes(x):
        return x.cos() + len(wrong) * is_in_backward()

    manager, seen = make_manager(), []
    for _ in range(8):
        seen.append(check(manager, of(sometimes), num_steps=1).proven_bytes)
    assert seen == [TENSOR_BYTES, 0, 0, TENSOR_BYTES, 0, 0, TENSOR_BYTES, 0]
    check(manager, of(sometimes), num_steps=1)
    wrong.append(1)
    with pytest.raises(
        CorruptionError, match=r"sometimes \(call 0.*was recomputed with other bits"
    ):
        check(manager, of(sometimes), num_steps=3)


def test_another_kind_of_tensor_is_kept_or_an_error():
    kinds = [torch.float64]

    @one_group
    def forward(manager, x):
        y = F.gelu(save(x, x))
        if manager:
            add_recipe(
                manager.recorded_chunk(), y, lambda x: F.gelu(x).to(kinds[-1]), [x], unit="act"
            )
        return save(y, y)

    assert refusals(make_manager(), forward) == {OTHER_BITS: TENSOR_BYTES}
    manager = make_manager()
    kinds.append(torch.float32)
    check(manager, forward)
    with pytest.raises(CorruptionError, match=r"float64.*float32"):
        run(manager, forward, backward=lambda loss: kinds.pop() and loss.backward())


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


def refusals(manager, forward):
    """Take two steps, whose bits are those of none; return why the second made nothing again."""
    stats = check(manager, forward, num_steps=2)
    assert stats.recomputed_bytes == 0
    return stats.refused_recipe_bytes


def of(function, *, saves=True):
    """Return a forward of one group that saves what ``function`` makes of what is saved."""
    return one_group(
        lambda manager, x: save(save(x, x), make(manager, function, x if saves else x * 1.0))
    )


class Half(torch.nn.Module):
    def forward(self, x):
        return x * 0.5


def cat_of_halves(x):
    return torch.cat([x, x])[ROWS:]


@one_group
def of_conjugate(manager, x):
    source = torch.complex(x, x)
    lazy = source.detach().conj()
    y = make(manager, lambda lazy: (lazy * 1j).real + 0.0, lazy)
    return save(save(x, source.detach().real), y)


@one_group
def of_inference(manager, x):
    with torch.inference_mode():
        frozen = torch.linspace(0, 1, x.numel()).view(x.shape)
        make(manager, torch.sin, frozen)  # an evaluation: nothing saves it
    return save(save(x, x), make(manager, torch.add, frozen, x))


@pytest.mark.parametrize(
    ("why", "forward"),
    [
        ("an input is of inference mode", of_inference),
        ("an input is conjugated or negated lazily", of_conjugate),
        ("an input is not saved", of(Half(), saves=False)),
        ("it is a view of an input", of(lambda x: x.t())),
        ("it is a view of an input", of(lambda x: x.detach()[2:])),
        ("its storage holds more", of(cat_of_halves)),
        ("its storage holds more", of(lambda x: torch.cat([x, x])[:ROWS])),
    ],
    ids=["inference", "lazy", "not saved", "view", "part", "end", "begin"],
)
def test_what_can_not_be_recomputed_is_moved_and_counted(why, forward):
    manager = make_manager(checking=True)
    assert refusals(manager, forward).keys() == {why}
    assert manager.last_step.offloaded_bytes > 0


def test_what_was_changed_before_the_commit_is_moved():
    def changed(what):
        @one_group
        def forward(manager, x):
            before = save(x, x)
            y = make(manager, torch.cos, before.detach())
            first = save(x, y) if what == "data" else 1
            data = y.data  # whose changes are counted apart
            {"output": y, "input": before.detach(), "data": data}[what].add_(1)
            return save(x, before) * first * save(x, data if what == "data" else y)

        return forward

    assert refusals(make_manager(), changed("output")).keys() == {"it was changed in place"}
    assert refusals(make_manager(), changed("data")).keys() == {"it was changed in place"}
    assert refusals(make_manager(), changed("input")).keys() == {"an input was changed in place"}


@pytest.mark.parametrize("what", ["output", "input"])
@pytest.mark.parametrize("max_inflight_bytes", [0, None])
def test_what_is_changed_after_the_commit_is_noticed(what, max_inflight_bytes):
    manager = make_manager(max_inflight_bytes=max_inflight_bytes, begins_chunk=True)
    tensors = {}

    def inner(x):
        tensors["input"] = torch.full((ROWS, WIDTH), 0.5)
        y = F.layer_norm(tensors["input"], (WIDTH,)).detach()
        add_recipe(
            manager.recorded_chunk(), y, F.layer_norm, [tensors["input"], (WIDTH,)], unit="norm"
        )
        tensors["output"] = y
        # Who saves the input is left out of the backward below: of itself it would notice.
        return save(x, y), save(x, tensors["input"])

    y, other = in_group(manager, inner, rows())
    assert manager.transfers.stats.recomputed_bytes == TENSOR_BYTES
    with torch.no_grad():
        tensors[what].add_(1)
    if what != "output":
        del tensors["output"]  # else it is there still, and not recomputed
    with pytest.raises(InPlaceModificationError, match=r"is at version \d; expected version \d"):
        y.sum().backward()
    del other
    manager.abort()


def test_what_needs_a_gradient_needs_it_when_it_is_recomputed():
    """A product of matrices has another kernel where the smaller of the two needs none."""

    @one_group
    def forward(manager, x):
        longer = x.repeat(9, 1).flatten()[: 5 * 7 * 129].view(5, 7, 129).transpose(0, 1)
        weight = (longer.sum(0).t() @ longer.sum(0)).cos().t()
        y = make(manager, torch.matmul, longer, weight)
        return y.sin().sum() * x + longer.sin().sum() + weight.sin().sum()

    assert check(make_manager(), forward).recomputed_bytes > 0


def test_what_lies_in_a_list_is_an_input_as_any_other():
    @one_group
    def forward(manager, x):
        parts = [x.cos(), x.sin()]
        saved = save(save(x, parts[0]), parts[1])
        y = make(manager, lambda parts: F.dropout(torch.cat(parts), 0.3), parts)
        parts.clear()
        return save(y, y).sum() + saved

    stats = check(make_manager(), forward)
    assert stats.recomputed_bytes == 2 * TENSOR_BYTES
    assert stats.offloaded_bytes > 2 * TENSOR_BYTES  # the list keeps none of them on the device


@pytest.mark.parametrize(
    ("kind", "what"), [(torch.Tensor, "an input"), (torch.nn.Parameter, "something that it reads")]
)
def test_what_is_read_and_changed_before_the_commit_recomputes_nothing(kind, what):
    @one_group
    def forward(manager, x):
        mean = kind(torch.zeros(1 << 19))  # larger than what is copied
        y = make(manager, lambda x, mean: x - mean.sum(), x, mean)
        mean.detach().add_(y.detach().mean())
        return save(save(x, x), y)

    manager = make_manager(min_tensor_bytes=64)
    assert refusals(manager, forward).keys() == {f"{what} was changed in place"}


def test_what_is_made_of_what_was_changed_is_not_made_of_what_was_made_first():
    @one_group
    def forward(manager, x):
        y = make(manager, torch.cos, save(x, x)).mul_(2)
        z = make(manager, lambda y: y * 3.0, y)  # of y as it is now, and nobody saves that
        return save(z, z)

    assert refusals(make_manager(), forward).keys() == {"an input is not saved"}


def test_what_is_made_on_the_way_may_be_changed_behind_the_commit():
    """Autograd has not saved it, so to change it is allowed."""

    def forward(manager, x):
        def inner(x):
            y = make(manager, torch.cos, save(x, x))
            z = make(manager, lambda y: y * 2.0, y)
            return y, save(z, z)

        y, z = in_group(manager, inner, x)
        return z + y.mul_(3.0)

    assert check(make_manager(), forward).recomputed_bytes == TENSOR_BYTES


class Rotate(torch.autograd.Function):
    """As Liger's: a kernel writes in place, which nobody is reported."""

    @staticmethod
    def forward(ctx, q, k):
        for x in (q, k):
            x.data.mul_(1.5)
        return q.transpose(0, 1).transpose(0, 1), k.transpose(0, 1).transpose(0, 1)

    @staticmethod
    def backward(ctx, *grads):
        return tuple(grad * 1.5 for grad in grads)


@pytest.mark.parametrize("then", ["saved", "made of", "viewed often"])
def test_what_a_kernel_has_written_to_unseen_is_not_recomputed(then):
    @one_group
    def forward(manager, x):
        norms = [make(manager, lambda x: F.layer_norm(x, (WIDTH,)), save(x, x)) for _ in "qk"]
        q, k = (x.t() for x in Rotate.apply(*norms))
        for _ in range(12 if then == "viewed often" else 0):
            q, k = q.t(), k.t()
        if then != "made of":
            return q * k
        return (make(manager, lambda q: q * 2.0, q).sin() + make(manager, torch.neg, k)).sin()

    assert check(make_manager(), forward).recomputed_bytes == 0


class Overwrite(torch.autograd.Function):
    """As Liger's losses: a kernel leaves the gradient where the logits were."""

    @staticmethod
    def forward(ctx, logits):
        loss = logits.exp().sum()
        logits.data.exp_()
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("is_saved_before", [False, True])
def test_what_is_saved_detached_is_not_recomputed(is_saved_before):
    @one_group
    def forward(manager, x):
        logits = make(manager, torch.tanh, x)
        x = save(x, x, logits) if is_saved_before else save(x, x)
        return x + Overwrite.apply(logits)

    assert refusals(make_manager(), forward) == {OTHER_BITS: TENSOR_BYTES}


class Norm(torch.autograd.Function):
    """Returns a view of what it has made, as Liger's does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.layer_norm(x.view(-1, WIDTH), (WIDTH,)).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def test_a_function_of_the_program_may_return_a_view_of_what_it_makes():
    @one_group
    def forward(manager, x):
        y = make(manager, Norm.apply, x)
        return save(y, y) + y.t().sin().t() * y

    assert check(make_manager(), forward).recomputed_bytes == TENSOR_BYTES


def test_what_vmap_has_wrapped_is_saved_as_ever():
    def forward(manager, x):
        def norm(row):
            return make(manager, lambda row: F.layer_norm(row, (WIDTH,)), row)

        return in_group(manager, lambda x: torch.vmap(norm)(save(x, x)).sin(), x)

    assert check(make_manager(), forward).recomputed_bytes == 0


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


def test_what_was_noted_and_not_saved_keeps_nothing_through_backward():
    manager = make_manager("eager")
    weight = torch.full((WIDTH, WIDTH), 0.1).requires_grad_()

    def norm_of(x):
        return make(manager, lambda x: F.layer_norm(x, (WIDTH,)), x)

    def mlp(y):
        return y @ weight + make(manager, lambda y: y * 2.0, y).sum()  # which nobody saves

    with manager.step():
        y = in_group(manager, norm_of, rows() * 1.0, "norm")
        in_group(manager, mlp, y, "mlp").sum().backward()
        del y
        assert manager.decisions.is_idle()
    assert manager.last_step.recomputed_bytes > 0


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


class HalvesCosines(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return made * 0.5 if function is torch.ops.aten.cos.default else made


class TakesSines(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (torch.sin if function is torch.cos else function)(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [HalvesCosines, TakesSines])
def test_what_a_mode_has_changed_is_not_recomputed_without_it(mode):
    def forward(manager, x):
        with mode():
            return of(torch.cos)(manager, x)

    because = "a mode of dispatch or of functions was entered, which may change what it computes"
    assert refusals(make_manager(), forward) == {because: TENSOR_BYTES}


def test_a_small_parameter_that_is_written_to_unseen_counts_as_it_was():
    def forward(manager, x):
        scale = torch.nn.Parameter(torch.ones(WIDTH))

        y = in_group(manager, lambda x: save(save(x, x), make(manager, torch.mul, x, scale)), x)
        scale.data.fill_(2.0)
        return y

    assert check(make_manager(checking=True), forward).recomputed_bytes == TENSOR_BYTES


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_is_noted_inside_a_checkpoint_or_its_recompute(reentrant):
    @one_group
    def forward(manager, x):
        x = save(x, x)
        return checkpoint(of(torch.cos), manager, x, use_reentrant=reentrant)

    stats = check(make_manager(checking=True), forward)
    assert (stats.recomputed_bytes, stats.refused_recipe_bytes) == (0, {})


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


def test_what_went_with_an_aborted_step_is_said():
    manager = make_manager(begins_chunk=True)
    y = of(torch.cos)(manager, rows() * 1.0)
    manager.abort()
    with pytest.raises(StateError, match="run the forward again"):
        y.sum().backward()
    check(manager, of(torch.cos))


def test_a_commit_that_is_put_off_drops_later():
    def forward(manager, x):
        y = in_group(
            manager, lambda x: save(save(x, x), make(manager, torch.cos, x)), x, delay=True
        )
        if manager:
            assert manager.transfers.stats.recomputed_bytes == 0
            manager.begin_chunk()  # the next forward has begun when the copies are issued
            manager.flush_delayed_groups()
        return y

    assert check(make_manager(checking=True), forward).recomputed_bytes == TENSOR_BYTES


def test_what_is_open_recomputes_nothing():
    manager = make_manager()
    manager.learner.open()
    assert check(manager, of(torch.cos)).recomputed_bytes == 0
    (group,) = manager.learner.profile.groups
    assert group.num_bytes == 2 * TENSOR_BYTES


def test_what_the_program_keeps_is_not_recomputed_and_next_time_not_dropped():
    kept = []

    def function(x):
        kept.append(x.detach().cos())
        return kept[-1]

    def forward(manager, x):
        kept.clear()
        return of(function)(manager, x)

    manager = make_manager()
    expected = run(None, forward)
    for num_steps in range(3):
        assert_same(expected, run(manager, forward))
        assert len(kept) == (1 if num_steps else 2)  # it runs once more to be compared
        assert manager.last_step.externally_referenced_bytes >= TENSOR_BYTES
        assert manager.last_step.recomputed_bytes == (0 if num_steps else TENSOR_BYTES)
    assert manager.last_step.refused_recipe_bytes == {"something else keeps it alive": TENSOR_BYTES}


def test_a_parameter_without_memory_is_named():
    weight = torch.nn.Parameter(torch.ones(1 << 19))  # more than is copied
    manager = make_manager(begins_chunk=True)

    def scale(x, weight):
        return x * weight[:WIDTH]

    def inner(x):
        y = scale(x.detach(), weight.detach())
        add_recipe(manager.recorded_chunk(), y, scale, [x.detach(), weight], unit="scale")
        return save(save(x, x), y)

    y = in_group(manager, inner, rows() * 1.0)
    version = weight._version
    weight.untyped_storage().resize_(0)
    assert weight._version == version
    with pytest.raises(StateError, match=r"no memory now.*'scale'"):
        y.sum().backward()
    manager.abort()


def test_an_input_that_another_thread_releases_as_it_is_to_be_kept_is_reloaded(monkeypatch):
    def forward(manager):
        leaf = rows()

        def inner(x):
            side, y, z = x * 2.0, make(manager, F.gelu, x), save(x, x)
            return side, save(y, y) + z  # backward doesn't enter by the first

        x = leaf * 1.0
        _, z = in_group(manager, inner, x, "a") if manager else inner(x)
        del x
        z.square().mean().backward()
        return leaf.grad

    manager = make_manager("late", max_inflight_bytes=1 << 20)
    keep, released = manager.transfers.keep_source, []

    def keep_too_late(block):
        manager.join_offloads()  # another thread
        released.append(block.released)
        keep(block)

    monkeypatch.setattr(manager.transfers, "keep_source", keep_too_late)
    for _ in range(4):
        manager.begin_chunk()
        assert torch.equal(forward(manager), forward(None))
        manager.reset()
    assert any(released)

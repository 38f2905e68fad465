"""What can't be recomputed to the bit is kept or offloaded, counted by why, and named."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from programs import assert_same, in_group, make_manager
from recipe_programs import (
    OTHER_BITS,
    ROWS,
    TENSOR_BYTES,
    WIDTH,
    check,
    make,
    of,
    one_group,
    refusals,
    rows,
    run,
    save,
)
from test_recipes import dropout_of_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_offload.engine.hooks import is_in_backward
from megatron_offload.errors import CorruptionError, InPlaceModificationError, StateError
from megatron_offload.recompute import proof
from megatron_offload.recompute.recipes import add_recipe


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
        ("an input is not saved", of(lambda x: x * 0.5, saves=False)),
        ("it is a view of an input", of(lambda x: x.t())),
        ("it is a view of an input", of(lambda x: x.detach()[2:])),
        ("its storage holds more", of(lambda x: torch.cat([x, x])[ROWS:])),
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


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_is_noted_inside_a_checkpoint_or_its_recompute(reentrant):
    @one_group
    def forward(manager, x):
        x = save(x, x)
        return checkpoint(of(torch.cos), manager, x, use_reentrant=reentrant)

    stats = check(make_manager(checking=True), forward)
    assert (stats.recomputed_bytes, stats.refused_recipe_bytes) == (0, {})


def test_what_is_open_recomputes_nothing():
    manager = make_manager()
    manager.learner.follow_rules(is_open=True)
    assert check(manager, of(torch.cos)).recomputed_bytes == 0
    (group,) = manager.learner.profile.groups
    assert group.num_bytes == 2 * TENSOR_BYTES


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


def test_what_vmap_has_wrapped_is_saved_as_ever():
    def forward(manager, x):
        def norm(row):
            return make(manager, lambda row: F.layer_norm(row, (WIDTH,)), row)

        return in_group(manager, lambda x: torch.vmap(norm)(save(x, x)).sin(), x)

    assert check(make_manager(), forward).recomputed_bytes == 0


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


def test_what_went_with_an_aborted_step_is_said():
    manager = make_manager(begins_chunk=True)
    y = of(torch.cos)(manager, rows() * 1.0)
    manager.abort()
    with pytest.raises(StateError, match="run the forward again"):
        y.sum().backward()
    check(manager, of(torch.cos))

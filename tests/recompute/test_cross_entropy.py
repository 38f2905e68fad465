"""Cross entropy by rows: torch's bits, in loss and gradient, and no copy of the logits."""

from __future__ import annotations

import copy
import time
from functools import partial

import pytest
import torch
from losses import (
    DTYPES,
    OPTIONS,
    assert_same_bits,
    make_logits,
    make_target,
    ours,
    results,
    theirs,
    with_weight,
)
from programs import make_config
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_offload import OffloadActivations, cross_entropy
from megatron_offload.errors import InPlaceModificationError
from megatron_offload.recompute import loss as module

CLASSES, ROWS = 331, 200


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let a block be 64 rows: 200 are three and a ragged one."""
    monkeypatch.setitem(module._BLOCK_BYTES, "cpu", 64 * CLASSES * 4 // torch.get_num_threads())


class Sizes(TorchDispatchMode):
    """Notes the largest number of elements of a float32 tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and one.dtype is torch.float32:
                self.largest = max(self.largest, one.numel())
        return out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("computed", [None, torch.float32], ids=["own", "float32"])
def test_a_loss_by_rows_has_the_bits_of_torch(options, dtype, computed):
    for rows in (1, 63, 64, 65, 192, ROWS):
        logits, ignored = make_logits(rows, CLASSES, dtype), options.get("ignore_index", -100)
        target = make_target(rows, CLASSES, ignored=ignored)
        given = with_weight(options, CLASSES, dtype=computed or dtype)
        both = [results(f, logits, target, dtype=computed, **given) for f in (theirs, ours)]
        assert_same_bits(*both)


@pytest.mark.parametrize("classes", [1, 2, 50257])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_any_number_of_classes_gives_the_bits_of_torch(classes, is_deterministic, request):
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(is_deterministic)
    logits, target = make_logits(130, classes), make_target(130, classes)
    assert_same_bits(*(results(f, logits, target, dtype=torch.float32) for f in (theirs, ours)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_that_are_all_ignored_give_what_torch_gives(reduction):
    logits, target = make_logits(ROWS, CLASSES), torch.full((ROWS,), -100)
    expected, found = (results(f, logits, target, reduction=reduction) for f in (theirs, ours))
    assert_same_bits(expected, found)
    assert found[0].isnan().all() == (reduction == "mean")


def test_infinite_logits_give_the_bits_of_torch():
    logits, target = make_logits(ROWS, CLASSES, torch.float32), make_target(ROWS, CLASSES)
    logits[5, :7], logits[70, 3], logits[199] = -torch.inf, torch.inf, torch.nan
    assert_same_bits(*(results(f, logits, target) for f in (theirs, ours)))


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x[:, ::2],
        lambda x: x[::3],
        lambda x: x[:1].expand(70, -1),
        lambda x: x.flatten()[1 : 1 + 150 * CLASSES].view(150, CLASSES),
    ],
    ids=["transposed", "columns", "rows", "expanded", "unaligned"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_views_give_the_bits_of_torch(of, dtype):
    whole = make_logits(ROWS, CLASSES, dtype)
    target = make_target(len(of(whole)), of(whole).shape[1])
    found = []
    for function in (theirs, ours):
        own = whole.clone().requires_grad_()
        loss = function(of(own), target, dtype=torch.float32)
        loss.backward()
        found.append((loss, own.grad))
    assert_same_bits(*found)


def test_no_float32_tensor_is_larger_than_a_block():
    target, sizes = make_target(ROWS, CLASSES), {}
    for function in (theirs, ours):
        logits = make_logits(ROWS, CLASSES).requires_grad_()
        with Sizes() as seen:
            function(logits, target, dtype=torch.float32).backward()
        sizes[function] = seen.largest
    assert sizes == {theirs: ROWS * CLASSES, ours: 64 * CLASSES}


def test_backward_keeps_the_logits_and_nothing_of_their_size_besides():
    logits, saved = make_logits(ROWS, CLASSES).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ours(logits, make_target(ROWS, CLASSES), dtype=torch.float32)
    assert [x.data_ptr() for x in saved if x.numel() > ROWS] == [logits.data_ptr()]


def test_a_second_backward_gives_the_same_bits():
    logits = make_logits(ROWS, CLASSES).requires_grad_()
    loss = ours(logits, make_target(ROWS, CLASSES), dtype=torch.float32)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True) for _ in range(2))
    assert_same_bits(first, second)
    assert first[0].data_ptr() != second[0].data_ptr()
    torch.autograd.grad(loss, logits)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_derivatives_are_those_of_torch(reduction):
    target, found = make_target(ROWS, CLASSES), []
    for function in (theirs, ours):
        logits = make_logits(ROWS, CLASSES, torch.float64).requires_grad_()
        loss = function(logits, target, reduction=reduction)
        (first,) = torch.autograd.grad(loss.sin().sum(), logits, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), logits)))
    assert_same_bits([found[0][0]], [found[1][0]])
    torch.testing.assert_close(*(second for _, second in found))
    assert found[1][1].abs().max() > 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("by_vmap", [False, True])
def test_gradients_in_batches_are_those_of_torch(reduction, by_vmap):
    logits, target = torch.randn(40, 9, requires_grad=True), torch.randint(9, (40,))

    def grads(loss_of):
        loss = loss_of(logits, target, reduction=reduction)
        batch = torch.randn(5, *loss.shape, generator=torch.Generator().manual_seed(0))
        take = partial(torch.autograd.grad, loss, logits)
        return torch.vmap(take)(batch) if by_vmap else take(batch, is_grads_batched=True)

    assert torch.equal(*grads(cross_entropy), *grads(torch.nn.functional.cross_entropy))


@pytest.mark.parametrize("in_context", [False, True])
def test_logits_changed_in_place_before_backward_raise(in_context):
    leaf = make_logits(ROWS, CLASSES).requires_grad_()
    logits, offload = leaf * 1, OffloadActivations(config=make_config())
    with offload if in_context else torch.enable_grad():
        loss = cross_entropy(logits, make_target(ROWS, CLASSES))
    logits.add_(1)
    error = InPlaceModificationError if in_context else RuntimeError
    with pytest.raises(error, match="modified by an inplace operation"):
        loss.backward()
    offload.manager.abort()
    offload.close()


def test_logits_stay_on_the_device_inside_a_context():
    logits, other = (make_logits(ROWS, CLASSES).requires_grad_() for _ in range(2))
    target, offload = make_target(ROWS, CLASSES), OffloadActivations(config=make_config())
    with offload:
        x = other.exp()
        loss = cross_entropy(logits, target)
    (x.sum() + loss).backward()
    assert offload.end_step()
    assert offload.last_step.offloaded_bytes == x.nbytes
    own = logits.detach().requires_grad_()
    theirs(own, target).backward()
    assert_same_bits([own.grad], [logits.grad])
    offload.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("computed", [None, torch.float32], ids=["own", "float32"])
def test_autocast_gives_the_bits_of_torch(dtype, computed):
    logits, target = make_logits(ROWS, CLASSES, dtype), make_target(ROWS, CLASSES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both = [results(f, logits, target, dtype=computed) for f in (theirs, ours)]
    assert_same_bits(*both)
    assert both[1][0].dtype is torch.float32


def test_without_a_gradient_no_copy_is_made_either():
    logits, target = make_logits(ROWS, CLASSES), make_target(ROWS, CLASSES)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, Sizes() as seen:
            found = ours(logits, target, dtype=torch.float32)
        assert seen.largest == 64 * CLASSES
        assert_same_bits([theirs(logits, target, dtype=torch.float32)], [found])


def test_a_class_that_is_none_is_the_error_of_torch():
    logits, target = make_logits(ROWS, CLASSES), torch.full((ROWS,), CLASSES)
    for function in (theirs, ours):
        with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
            function(logits, target)


def test_what_has_another_shape_is_torch_s_own():
    logits = make_logits(6, CLASSES, torch.float32)
    for x, target in (
        (logits[0], torch.tensor(3)),
        (logits.view(2, 3, CLASSES), torch.randint(3, (2, CLASSES))),
        (logits, logits.softmax(1)),
        (logits[:0], torch.zeros(0, dtype=torch.int64)),
    ):
        assert_same_bits(results(theirs, x, target), results(ours, x, target))
    for wrong in ({"reduction": "median"}, {"target": torch.zeros(5, dtype=torch.int64)}):
        given = {"target": make_target(6, CLASSES), **wrong}
        with pytest.raises(ValueError):
            cross_entropy(logits, **given)


def test_transforms_subclasses_and_the_meta_device_are_torch_s_own():
    logits, target = make_logits(ROWS, CLASSES, torch.float32), make_target(ROWS, CLASSES)
    expected = results(theirs, logits, target)[1:]

    def gradient(function):
        return torch.func.grad(function)(logits, target)

    assert_same_bits([gradient(theirs)], [gradient(ours)])
    batch = logits.view(4, 50, CLASSES), target.view(4, 50)
    assert_same_bits([torch.vmap(theirs)(*batch)], [torch.vmap(ours)(*batch)])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(logits, torch.ones_like(logits))
        assert torch.autograd.forward_ad.unpack_dual(ours(dual, target)).tangent is not None
    assert ours(logits.to("meta"), target.to("meta")).shape == ()

    class Named(torch.Tensor):
        pass

    assert type(ours(logits.as_subclass(Named), target)) is Named
    assert expected[0].isfinite().all()


def test_a_compiled_program_has_no_break_and_gives_the_bits_of_torch():
    logits, target = make_logits(ROWS, CLASSES), make_target(ROWS, CLASSES)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    both = [results(f, logits, target, dtype=torch.float32) for f in (theirs, compiled)]
    assert_same_bits(*both)


def test_a_copied_parameter_s_loss_is_by_rows():
    logits = torch.nn.Parameter(make_logits(ROWS, CLASSES))
    loss = ours(copy.deepcopy(logits), make_target(ROWS, CLASSES))
    assert "ByRows" in type(loss.grad_fn).__name__


@pytest.mark.slow
def test_a_loss_by_rows_takes_no_longer_than_torch_s(monkeypatch):
    monkeypatch.undo()
    logits, target = make_logits(1024, 32000), make_target(1024, 32000)
    times = {theirs: [], ours: []}
    for _ in range(5):
        for function, taken in times.items():
            begin = time.perf_counter()
            results(function, logits, target, dtype=torch.float32)
            taken.append(time.perf_counter() - begin)
    assert min(times[ours]) < 1.2 * min(times[theirs])

"""Tensors that share storage, of any layout, are reloaded exactly as autograd would have kept
them."""

from __future__ import annotations

import pytest
import torch
from programs import KIB, TIMINGS, assert_nothing_left, assert_same, make_manager
from programs import save_in_group as offload

from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.marks import _everywhere, mark_everywhere, unmark
from megatron_offload.errors import InPlaceModificationError
from megatron_offload.memory.layout import layout_of


def make_views():
    base = torch.arange(4096.0)
    square = base.view(64, 64)
    return {
        "whole": base,
        "transposed": square.t(),
        "strided": square[::2, 1::3],
        "overlapping": base.as_strided((60, 32), (8, 1), 3),
        "expanded": base[5:69].view(64, 1).expand(64, 9),
        "offset": base[777:],
        "middle": base[1000:2000],
        "scalar": base[17],
        "zero_size": base[:0],
        "bytes": base.view(torch.uint8)[3:1001],
        "non_contiguous": square[:, 10:20],
        "negative_dimension_order": square.view(4, 16, 64).permute(2, 0, 1),
        "channels_last": base.as_strided((64, 64, 1, 1), (64, 1, 64, 64)),
        "one_channel": base.view(4, 16, 64, 1).permute(0, 3, 1, 2),
    }


@pytest.mark.parametrize("timing", TIMINGS)
def test_views_of_one_storage_are_copied_once_and_alias_again(timing):
    manager, seen = make_manager(timing, begins_chunk=True), []
    expected = make_views()
    storage_bytes = 4096 * 4
    loss = offload(manager, list(make_views().values()), seen)
    assert manager.transfers.stats.offloaded_bytes == storage_bytes
    loss.backward()
    restored = dict(zip(expected, seen[0], strict=True))
    for name, tensor in expected.items():
        found = restored[name]
        assert torch.equal(found, tensor), name
        assert (found.stride(), found.dtype) == (tensor.stride(), tensor.dtype), name
    owners = {t.untyped_storage().data_ptr() for t in seen[0] if t.numel()}
    assert len(owners) == 1
    base = min(t.data_ptr() - t.storage_offset() * t.itemsize for t in seen[0] if t.numel())
    for name, tensor in restored.items():
        if tensor.numel():
            assert tensor.data_ptr() - base == expected[name].storage_offset() * tensor.itemsize


def test_only_the_bytes_between_the_first_and_the_last_view_move():
    manager, seen = make_manager(begins_chunk=True), []
    large = torch.randn(64 * KIB)
    loss = offload(manager, [large[1024:2048], large[3072:4096]], seen)
    assert manager.transfers.stats.offloaded_bytes == 3072 * 4
    expected = large.clone()
    del large
    loss.backward()
    assert_same([expected[1024:2048], expected[3072:4096]], seen[0])


@pytest.mark.parametrize("is_view", [True, False])
def test_what_is_copied_with_a_view_is_not_copied_again(is_view):
    manager, seen = make_manager(prefetch_bytes=0, begins_chunk=True), []
    whole = torch.randn(48, 48)
    parts = whole.chunk(3, dim=1) if is_view else [whole.view(24, 96), whole, whole.t()]
    expected = [spec.clone() for spec in parts]
    losses = [offload(manager, [spec], seen, f"part {at}") for at, spec in enumerate(parts)]
    assert manager.transfers.stats.offloaded_bytes == 48 * 48 * 4
    del whole, parts
    for loss in losses:
        loss.backward()
    assert_same(expected, [tensor for (tensor,) in seen])


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("inflight_bytes", [0, 64 * KIB])
@pytest.mark.parametrize("parts", [(1024, 1024, 4096), (1000, 500, 4096), (4000, 8, 100)])
@pytest.mark.parametrize("keep_alive", [False, True])
def test_two_groups_may_share_a_storage(timing, inflight_bytes, parts, keep_alive):
    manager, seen = make_manager(timing, max_inflight_bytes=inflight_bytes, begins_chunk=True), []
    x = torch.randn(4096)
    first, second = x[: parts[0]], x[parts[1] : parts[2]]
    expected = [first.clone(), second.clone()]
    a = offload(manager, [first], seen, "a")
    filler = offload(manager, [torch.randn(4096)], [], "filler")
    b = offload(manager, [second], seen, "b")
    if not keep_alive:
        del x, first, second
    (a + b + filler).backward()
    restored = [tensor for (tensor,) in seen]
    assert_same(*(sorted(found, key=torch.numel) for found in (expected, restored)))
    is_moved_by_both = parts[0] < parts[2]
    assert (manager.transfers.stats.by_name["b"].offloaded_bytes > 0) == is_moved_by_both


def test_parameters_and_their_views_never_move():
    manager, seen = make_manager(begins_chunk=True), []
    weight = torch.nn.Parameter(torch.randn(64, 64))
    flat = torch.randn(4096)
    in_flat_buffer = torch.nn.Parameter(flat[:2048].view(32, 64))
    manager.mark_not_offload(in_flat_buffer)
    loss = offload(manager, [weight, weight.t(), weight[3:], in_flat_buffer.detach(), flat], seen)
    assert manager.transfers.stats.offloaded_bytes == 0
    loss.backward()
    assert torch.equal(seen[0][1], weight.t())


@pytest.mark.parametrize(
    "mark",
    [
        lambda x: setattr(x, "_do_not_offload", True),
        lambda x: setattr(x, "_TE_do_not_offload", True),
        lambda x: setattr(x, "_is_buffer", True),
        lambda x: setattr(x, "offloading_activation", False),
        mark_everywhere,
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x, w: x.square(), id="itself"),
        pytest.param(lambda x, w: x @ w, id="3-D input of a matrix product"),
        pytest.param(lambda x, w: x[0].t() @ x[0], id="transposed"),
        pytest.param(lambda x, w: x.view(-1)[4:].square(), id="view of a view"),
    ],
)
def test_a_mark_holds_for_the_views_that_an_operation_saves(mark, use):
    bytes_by_mark = []
    for marks in (False, True):
        manager = make_manager()
        chunk = manager.begin_chunk()
        weight = torch.randn(64, 64, requires_grad=True)
        manager.mark_not_offload(weight)
        x = torch.randn(2, 8, 64, requires_grad=True) * 1.5
        if marks:
            mark(x)
        group = manager.start_group(chunk, "group")
        with manager:
            y = use(x, weight)
        manager.commit(group)
        bytes_by_mark.append(group.num_bytes)
        y.sum().backward()
    assert bytes_by_mark[0] > 0
    assert bytes_by_mark[1] == 0


def test_a_mark_for_every_manager_follows_the_storage_until_it_is_undone():
    x = torch.randn(2, 1024)
    mark_everywhere(x[0])
    aliases = [x, x.detach(), x.t(), torch.empty(0).set_(x.untyped_storage())]
    for manager in (make_manager(), make_manager()):
        chunk = manager.begin_chunk()
        assert not any(chunk.may_move(alias) for alias in aliases)
    unmark(x[1])
    assert all(chunk.may_move(alias) for alias in aliases)
    mark_everywhere(torch.randn(1024))
    assert _everywhere
    make_manager().begin_chunk().may_move(x)
    assert not _everywhere, "it goes with its storage"


def test_small_and_unusual_tensors_are_kept_each_with_its_reason(caplog):
    manager, seen = make_manager(min_tensor_bytes=4096, begins_chunk=True), []
    sparse = torch.eye(1024).to_sparse()
    tensors = [
        torch.randn(1023),
        sparse,
        torch.randn(2048, dtype=torch.complex64).conj(),
        torch.empty(4096, device="meta"),
        torch.randn(4096, dtype=torch.complex64).conj().imag,
        torch._efficientzerotensor(4096),
        torch.quantize_per_tensor(torch.randn(4096), 0.1, 0, torch.qint8),
        torch.empty(0, 4096),
        (sparse * 2).to_sparse_csr(),
        torch.randn(2048).to_mkldnn(),
        sparse.detach(),
    ]
    loss = offload(manager, tensors, seen)
    stats = manager.transfers.stats
    assert stats.offloaded_bytes == 0
    (group,) = stats.by_name.values()
    assert group.kept_bytes_by_reason == {
        "smaller than what is offloaded (min_tensor_bytes, min_tensor_elements)": 4092,
        "tensors of the layout torch.sparse_coo are kept": 4096,
        "tensors without bytes of their own are kept": 16384 + 32768 + 4096,
        "tensors on meta, where this context serves cpu, are kept": 16384,
        "tensors of the layout torch.sparse_csr are kept": 4096,
        "tensors of the layout torch._mkldnn are kept": 8192,
    }
    assert caplog.text.count("This is said once") == 5
    assert "saved tensors on meta, where this context serves cpu, are kept" in caplog.text
    loss.backward()
    found = seen[0]
    assert_same([tensors[i] for i in (0, 2, 4)], [found[i] for i in (0, 2, 4)])
    assert (found[2].is_conj(), found[4].is_neg(), found[5]._is_zerotensor()) == (True,) * 3
    assert torch.equal(found[6].int_repr(), tensors[6].int_repr())
    assert found[7].shape == (0, 4096)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
        *(torch.int64, torch.int8, torch.uint4, torch.bool),
    ],
)
def test_bits_survive_whatever_the_dtype(dtype):
    manager, seen = make_manager(begins_chunk=True), []
    bits = torch.randint(0, 256, (8192,), dtype=torch.uint8)
    if dtype is torch.bool:
        bits &= 1
    tensor = bits.clone().view(dtype)
    loss = offload(manager, [tensor], seen)
    del tensor
    assert manager.transfers.stats.offloaded_bytes == bits.nbytes
    loss.backward()
    assert seen[0][0].dtype is dtype
    assert torch.equal(seen[0][0].view(torch.uint8), bits)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("when", ["before commit", "while in flight", "after release"])
@pytest.mark.parametrize("what", ["input", "output"])
def test_a_change_in_place_after_saving_is_the_error_that_autograd_gives(what, when, timing):
    inflight_bytes = 64 * KIB if when == "while in flight" else 0

    def program(manager):
        x = torch.randn(1024)
        w = torch.ones(1024, requires_grad=True)
        y = start_group(manager, w, "g") if manager else w
        with manager or torch.enable_grad():
            y = y * x if what == "input" else y.exp()
        changed = {"input": x, "output": y.detach()}[what]
        if when == "before commit":
            changed.add_(1)
        y = commit_group(manager, y, "g") if manager else y
        if when != "before commit":
            changed.add_(1)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(None).backward()
    manager = make_manager(timing, max_inflight_bytes=inflight_bytes, begins_chunk=True)
    with pytest.raises(InPlaceModificationError, match="modified by an inplace operation"):
        program(manager).backward()
    manager.abort()
    assert_nothing_left(manager)


def test_a_storage_that_was_emptied_and_refilled_by_recompute_is_not_taken_from_the_host():
    # Megatron's recompute frees an output's storage and fills it again just before backward.
    manager, seen = make_manager(max_inflight_bytes=64 * KIB, begins_chunk=True), []
    x = torch.randn(1024)
    expected = x.clone()
    loss = offload(manager, [x], seen)
    x.untyped_storage().resize_(0)
    filler = offload(manager, [torch.randn(32 * KIB)], [], "filler")
    x.untyped_storage().resize_(expected.nbytes)
    with torch.no_grad():
        x.untyped_storage().copy_(expected.untyped_storage())
    (loss + filler).backward()
    assert torch.equal(seen[0][0], expected)


def test_boundaries_leave_the_graph_as_it_is():
    manager = make_manager(begins_chunk=True)
    x = torch.randn(8, requires_grad=True).clone()
    node = x.grad_fn
    assert start_group(manager, x, "g") is x
    assert commit_group(manager, [x, None], "g")[0] is x
    assert x.grad_fn is node
    assert x._base is None


@pytest.mark.parametrize(
    ("view", "is_shown"),
    [(torch.ones(600)[128:], True), (torch.ones(600)[3:], False), (torch.ones(3, 4).t(), False)],
)
def test_host_memory_shows_as_it_was_what_is_contiguous_and_aligned(view, is_shown):
    assert (layout_of(view).spec is not None) is is_shown

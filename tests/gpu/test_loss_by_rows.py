"""The loss by rows on a real device: torch's bits, in less memory, and a model's own loss."""

from __future__ import annotations

import contextlib
import warnings
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

with contextlib.suppress(ImportError):  # before torch has loaded a part of its own cuDNN
    import transformer_engine.pytorch  # noqa: F401

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.recompute import loss as module
from megatron_offload.recompute import model_loss

pytestmark = pytest.mark.gpu

GIB = 1024**3
WORDS = 128256


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", [1, 2047, 2048, 8191])
@pytest.mark.parametrize("classes", [50257, WORDS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_by_rows_has_the_bits_of_torch(dtype, classes, rows):
    logits, target = make_logits(rows, classes, dtype, "cuda"), make_target(rows, classes, "cuda")
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}):
        assert_same_bits(
            *(results(f, logits, target, dtype=torch.float32, **options) for f in (theirs, ours))
        )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("computed", [None, torch.float32], ids=["own", "float32"])
@pytest.mark.parametrize("classes", [17, 1000, 32000, 50257, WORDS])
def test_every_option_has_the_bits_of_torch(options, dtype, computed, classes, monkeypatch):
    monkeypatch.setitem(module._BLOCK_BYTES, "cuda", 256 * classes * 4)
    logits = make_logits(1500, classes, dtype, "cuda")
    target = make_target(1500, classes, "cuda", options.get("ignore_index", -100))
    given = with_weight(options, classes, "cuda", computed or dtype)
    assert_same_bits(*(results(f, logits, target, dtype=computed, **given) for f in (theirs, ours)))


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_logits_at_any_address_have_the_bits_of_torch(offset, monkeypatch):
    monkeypatch.setitem(module._BLOCK_BYTES, "cuda", 64 * 32000 * 4)
    whole = make_logits(301, 32000, torch.float32, "cuda").flatten()
    target, found = make_target(300, 32000, "cuda"), []
    for function in (theirs, ours):
        own = whole.clone().requires_grad_()
        loss = function(own[offset : offset + 300 * 32000].view(300, 32000), target)
        loss.backward()
        found.append((loss, own.grad))
    assert_same_bits(*found)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}], ids=["own", "float32"])
def test_autocast_has_the_bits_of_torch(options):
    logits, target = make_logits(3000, WORDS, device="cuda"), make_target(3000, WORDS, "cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        both = [results(f, logits, target, **options) for f in (theirs, ours)]
    assert_same_bits(*both)


def test_deterministic_algorithms_have_the_bits_of_torch():
    logits, target = make_logits(3000, WORDS, device="cuda"), make_target(3000, WORDS, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        both = [results(f, logits, target, dtype=torch.float32) for f in (theirs, ours)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(*both)


def test_a_captured_graph_replays_the_bits_of_torch():
    logits, target = make_logits(3000, WORDS, device="cuda"), make_target(3000, WORDS, "cuda")
    expected = results(theirs, logits, target, dtype=torch.float32)
    own, graph = logits.clone().requires_grad_(), torch.cuda.CUDAGraph()

    def step():
        loss = ours(own, target, dtype=torch.float32)
        return loss, *torch.autograd.grad(loss, own, torch.full_like(loss, scale))

    torch.manual_seed(5)
    scale = torch.rand(()).item()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert_same_bits(expected, [one.detach() for one in found])


def measure(losses, make_leaf):
    """Return the peak in bytes and the ms of each loss's forward and backward, and print them."""
    peaks, times = [], []
    for loss in losses:
        for _ in range(3):
            leaf = make_leaf().requires_grad_()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            loss(leaf).backward()
            end.record()
            torch.cuda.synchronize()
            peak, time_ms = torch.cuda.max_memory_allocated(), begin.elapsed_time(end)
            del leaf
        peaks.append(peak)
        times.append(time_ms)
    shown = [f"{peak / GIB:.2f} GiB {ms:.1f} ms" for peak, ms in zip(peaks, times, strict=True)]
    print(shown)  # noqa: T201 - pytest -s or -rA shows it
    return peaks, times


def test_a_forward_and_backward_need_four_gib_less_at_their_peak():
    logits, target = make_logits(8192, WORDS, device="cuda"), make_target(8192, WORDS, "cuda")
    losses = [partial(f, target=target, dtype=torch.float32) for f in (theirs, ours)]
    peaks, times = measure(losses, logits.clone)
    assert peaks[0] - peaks[1] >= 4 * GIB
    assert times[1] < 2 * times[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_keeps_its_bits_by_rows_at_one_sync(dtype, monkeypatch):
    programs = pytest.importorskip("llama_programs")
    monkeypatch.setattr(model_loss, "_proven", {})
    monkeypatch.setitem(module._BLOCK_BYTES, "cuda", 96 * programs.WORDS * 4)
    calls, by_rows = [], model_loss._by_rows
    monkeypatch.setattr(model_loss, "_by_rows", lambda *args: calls.append(args) or by_rows(*args))
    model = programs.make_model(None).to("cuda", dtype)
    expected = programs.train(model, contextlib.nullcontext())
    config = OffloadConfig(backend="cuda", policy={"kind": "modules"}, recompute="loss")
    offload = get_act_offloading_ctx_manager(model, config=config)
    for _ in range(2):
        assert_same_bits(expected, programs.train(model, offload))
        assert offload.end_step()
    assert len(calls) == 5
    assert [*model_loss._proven.values()] == [True]
    logits = torch.randn(64, programs.WORDS, device="cuda", dtype=dtype)
    labels = torch.zeros(64, device="cuda", dtype=torch.int64)
    with warnings_of_sync() as syncs:
        model_loss.causal_loss(logits, labels, programs.WORDS, 5)
    assert len(syncs) == 1, [str(one.message) for one in syncs]
    with warnings_of_sync() as syncs:
        model_loss.causal_loss(logits, labels, programs.WORDS, 5)
    assert not syncs
    offload.close()


@contextlib.contextmanager
def warnings_of_sync():
    """Collect the warnings of calls for which the host waits."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def megatron_s(one_rank):
    """Megatron's loss, and that by rows."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    from megatron_offload.integrations.megatron_loss import _ByRows

    group = parallel_state.get_tensor_model_parallel_group()
    return vocab_parallel_cross_entropy, lambda x, y: _ByRows.apply(x, y, group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "classes"), [(1, 4000), (700, 64128), (2048, 64128), (8190, 64128)]
)
def test_megatron_s_loss_by_rows_has_its_bits(dtype, rows, classes, megatron_s):
    logits = make_logits(rows, classes, dtype, "cuda").view(rows, 1, classes)
    target = torch.randint(classes, (rows, 1), device="cuda")
    assert_same_bits(*(results(f, logits, target) for f in megatron_s))


def test_megatron_s_loss_by_rows_needs_less_at_its_peak(megatron_s):
    target = torch.randint(WORDS, (8192, 1), device="cuda")
    # Megatron's own keeps no logits: the linear layer that made them doesn't either.
    peaks, _ = measure(
        [lambda leaf, loss=loss: loss(leaf, target).sum() for loss in megatron_s],
        lambda: make_logits(8192, WORDS, device="cuda").view(8192, 1, WORDS),
    )
    assert peaks[1] <= peaks[0] - GIB

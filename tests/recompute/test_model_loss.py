"""The loss of a transformers model is exchanged inside a context, proven, and put back."""

from __future__ import annotations

import contextlib
import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from llama_programs import BATCH, LENGTH, WORDS, make_model, train, transformers
from losses import DTYPES, assert_same_bits
from programs import MOVING
from torch import nn

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.recompute import loss as rows
from megatron_offload.recompute import model_loss

ROWS = BATCH * LENGTH
utils = importlib.import_module(f"{transformers.__name__}.loss.loss_utils")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setitem(rows._BLOCK_BYTES, "cpu", 96 * WORDS * 4 // torch.get_num_threads())
    monkeypatch.setattr(model_loss, "_proven", {})


@pytest.fixture
def calls(monkeypatch):
    """Collect the number of rows of each call of ours."""
    seen, by_rows = [], model_loss._by_rows

    def noting(logits, *args):
        seen.append(logits[..., 0].numel())
        return by_rows(logits, *args)

    monkeypatch.setattr(model_loss, "_by_rows", noting)
    return seen


def offload_of(model, recompute="loss", **settings):
    config = OffloadConfig(
        **MOVING.model_dump(exclude_unset=True) | {"recompute": recompute} | settings
    )
    return get_act_offloading_ctx_manager(model, config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_keeps_its_bits_by_rows(dtype, calls):
    model = make_model(None).to(dtype)
    expected = train(model, contextlib.nullcontext())
    assert not calls
    offload = offload_of(model)
    for _ in range(2):
        assert_same_bits(expected, train(model, offload))
        assert offload.end_step()
        assert "_loss_function" not in vars(model)
    proof_rows = 96 + 96 // 2 + 2
    assert calls == [proof_rows, *[ROWS] * 4]
    offload.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["labels", "items", "a tensor of items", "targets", "ignored"])
def test_every_form_of_the_call_has_the_bits_of_transformers(dtype, form, calls):
    torch.manual_seed(3)
    labels = torch.randint(WORDS, (BATCH, LENGTH))
    labels[:, :50] = -100
    options = {
        "labels": {},
        "items": {"num_items_in_batch": 77},
        "a tensor of items": {"num_items_in_batch": torch.tensor(77)},
        "targets": {"shift_labels": labels.roll(1, 1), "use_cache": True},
        "ignored": {"ignore_index": 5, "num_items_in_batch": 9.5},
    }[form]
    if form == "ignored":
        labels[labels == -100] = 5
    logits, found = (4 * torch.randn(BATCH, LENGTH, WORDS)).to(dtype), []
    for function in (utils.ForCausalLMLoss, model_loss.causal_loss):
        own = logits.clone().requires_grad_()
        loss = function(logits=own, labels=labels, vocab_size=WORDS, **options)
        loss.backward()
        found.append((loss, own.grad))
    assert_same_bits(*found)
    assert calls[-1] == ROWS


def test_a_loss_is_put_back_where_its_forward_raises():
    model = make_model(None)
    offload = offload_of(model)

    def fail():
        with offload:
            assert model.loss_function is model_loss.causal_loss
            with offload_of(model):
                assert model.loss_function is model_loss.causal_loss
            assert model.loss_function is model_loss.causal_loss
            raise RuntimeError("of the test")

    with pytest.raises(RuntimeError, match="of the test"):
        fail()
    assert model.loss_function is utils.ForCausalLMLoss
    assert "_loss_function" not in vars(model)


@pytest.mark.parametrize("settings", [{"recompute": ()}, {"recompute": "norm"}, {"enabled": False}])
def test_a_loss_is_left_alone_where_other_kinds_are_named(settings):
    model = make_model(None)
    with offload_of(model, **settings):
        assert model.loss_function is utils.ForCausalLMLoss
    with offload_of(model, recompute=["norm", "loss"]):
        assert model.loss_function is model_loss.causal_loss


@pytest.mark.parametrize("is_served", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_loss_that_is_not_named_is_by_rows_where_one_kernel_serves(
    is_served, is_large, monkeypatch, calls
):
    monkeypatch.setattr(model_loss, "has_kernel", lambda *_: is_served)
    monkeypatch.setattr(model_loss, "_LARGE_BYTES", 0 if is_large else 1 << 40)
    expected = train(make_model(None), contextlib.nullcontext())
    model = make_model(None)
    offload = get_act_offloading_ctx_manager(model, config=MOVING)
    assert_same_bits(expected, train(model, offload))
    assert bool(calls) is (is_served and is_large)
    assert model.loss_function is utils.ForCausalLMLoss


def test_a_search_for_rows_says_that_the_loss_is_by_rows():
    model = make_model(None)
    offload = offload_of(model, policy={"kind": "auto"})
    search = offload.manager.tuner
    assert not search.loss_is_by_rows(), "no step was taken"
    train(model, offload)
    assert search.loss_is_by_rows()


def test_a_loss_of_the_user_s_own_is_left_alone(monkeypatch, calls):
    def own(logits, labels, vocab_size, **kwargs):
        return logits.float().mean()

    model = make_model(None)
    model.loss_function = own
    with offload_of(model):
        assert model.loss_function is own
    for place, name in (
        (utils, "ForCausalLMLoss"),
        (utils, "fixed_cross_entropy"),
        (F, "cross_entropy"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, own)
            model = make_model(None)
            with offload_of(model):
                assert model.loss_function is not model_loss.causal_loss
    with monkeypatch.context() as patched:
        patched.setitem(utils.LOSS_MAPPING, "ForCausalLM", own)
        with offload_of(make_model(None)) as offload:
            assert offload._owners == []
    assert not calls


def test_torch_s_function_exchanged_inside_the_context_is_called(monkeypatch, calls):
    model, seen = make_model(None), []
    words = torch.randint(WORDS, (BATCH, LENGTH))

    def own(*args, **kwargs):
        seen.append(args)
        return args[0].mean()

    offload = offload_of(model)
    with offload:
        monkeypatch.setattr(F, "cross_entropy", own)
        model(input_ids=words, labels=words).loss.backward()
    assert seen
    assert not calls


def test_a_model_inside_another_is_found():
    model = make_model(None)
    wrapper = nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})
    with offload_of(wrapper):
        assert model.loss_function is model_loss.causal_loss
    assert model.loss_function is utils.ForCausalLMLoss


def test_a_compiled_model_is_left_alone():
    for compiled in (torch.compile(make_model(None), backend="eager"), make_model(None)):
        if not hasattr(compiled, "_orig_mod"):
            compiled.compile(backend="eager")
        with offload_of(compiled):
            assert compiled.loss_function is utils.ForCausalLMLoss
    model = make_model(None)
    model.model.layers[0].compile(backend="eager")
    with offload_of(model):
        assert model.loss_function is model_loss.causal_loss


@pytest.mark.parametrize("wrong", ["loss", "gradient", "raises"])
def test_a_loss_of_other_bits_is_warned_of_once_and_not_used(wrong, monkeypatch):
    by_rows = model_loss._by_rows

    def other(logits, *args):
        if wrong == "raises":
            raise RuntimeError("of the test")
        loss = by_rows(logits, *args)
        if wrong == "gradient":
            return loss + (loss - loss.detach()) * 1e-7
        return loss + (torch.nextafter(loss.detach(), loss.detach() + 1) - loss.detach())

    model = make_model(None)
    expected = train(model, contextlib.nullcontext())
    monkeypatch.setattr(model_loss, "_by_rows", other)
    offload = offload_of(model)
    with pytest.warns(UserWarning, match=r"isn't proven to be transformers\.loss.*256 classes"):
        found = train(model, offload)
    assert_same_bits(expected, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(expected, train(model, offload))
    offload.close()


def test_an_unproven_loss_is_not_tried_where_gradients_can_t_be_taken(calls):
    logits, labels = torch.randn(BATCH, LENGTH, WORDS), torch.randint(WORDS, (BATCH, LENGTH))
    with torch.inference_mode():
        loss = model_loss.causal_loss(logits, labels, WORDS)
    assert_same_bits([utils.ForCausalLMLoss(logits, labels, WORDS)], [loss])
    assert not calls
    assert not model_loss._proven
    with torch.no_grad():
        model_loss.causal_loss(logits, labels, WORDS)
    with torch.inference_mode():
        model_loss.causal_loss(logits, labels, WORDS)
    assert calls[1:] == [ROWS] * 2


def test_a_device_capturing_a_graph_is_not_asked_for_a_proof(monkeypatch, calls):
    monkeypatch.setattr(rows, "are_captured", lambda devices: True)
    model_loss.causal_loss(torch.randn(4, WORDS), torch.randint(WORDS, (4,)), WORDS)
    assert not calls


def test_a_program_without_transformers_has_no_loss_to_exchange(monkeypatch):
    monkeypatch.delitem(model_loss.sys.modules, "transformers.loss.loss_utils")
    assert model_loss.owners_of_loss(nn.Linear(3, 3)) == []

"""A module runs again as it was in its forward, whatever it has, reads and changes."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from programs import assert_same, make_config, make_manager
from test_recompute import (
    OWN,
    ROWS,
    WIDTH,
    OwnRMSNorm,
    around,
    around_part,
    group_step,
    make_inputs,
    make_model,
    recomputed_bytes,
    train,
)
from torch import nn

from megatron_offload import get_act_offloading_ctx_manager, offload_modules
from megatron_offload.errors import StateError


class Adding(nn.Module):
    def forward(self, x):
        return x.add_(1).cos()


class Sparse(nn.Module):
    """A graph's layer; its neighbours are a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("neighbours", torch.eye(ROWS).to_sparse_csr())
        self.register_buffer("others", torch.eye(ROWS).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.others, torch.sparse.mm(self.neighbours, x)).cos()


class Forces(nn.Module):
    """Takes a gradient in its forward."""

    def forward(self, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(place.cos().sum(), place)
        return x.sin() * force


class Counts(OwnRMSNorm):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def forward(self, x):
        self.calls["all"] += 1
        return super().forward(x) * self.calls["all"]


def scripted():
    return nn.Sequential(OwnRMSNorm(), torch.jit.script(nn.Sequential(nn.GELU())))


def norm_of_a_network():
    """Its weight comes anew with each call, as of a network for it, of pruning, or with dropout."""
    norm = nn.LayerNorm(WIDTH)
    norm.raw = nn.Parameter(norm.weight.detach())
    del norm._parameters["weight"]
    norm.register_forward_pre_hook(lambda n, _: setattr(n, "weight", F.dropout(n.raw, 0.5)))
    return norm


def norm():
    return nn.LayerNorm(WIDTH)


def patched_norm():
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    norm.forward = lambda x: F.dropout(F.layer_norm(x, (WIDTH,)), 0.3)
    return norm


REFUSED = {
    "holds a script": (OWN, scripted, "a part of it is in TorchScript"),
    "exchanged forward": ("norm", patched_norm, "its forward was replaced"),
    "another forward of its class": ("norm", norm, "norm returns is kept from here on"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_cannot_run_again_is_kept_and_named(kind, caplog, monkeypatch):
    unit, part, because = REFUSED[kind]
    if "class" in kind:
        noise = iter(range(99))

        def drawn(self, x):
            made = F.layer_norm(x, (WIDTH,), self.weight, self.bias)
            return made + F.dropout(x) + next(noise) % 2

        monkeypatch.setattr(nn.LayerNorm, "forward", drawn)
    plain, model = around_part(part), around_part(part)
    manager = make_manager(recompute=(unit, "nothing.*"))
    with caplog.at_level(logging.WARNING), offload_modules(model, ["*"], manager=manager):
        for _ in range(3):
            noise = iter(range(99))
            expected = train(plain)
            noise = iter(range(99))
            assert_same(expected, group_step(model, manager))
    assert manager.last_step.recomputed_bytes == 0
    assert because in caplog.text
    assert "no module here matches 'nothing.*'" in caplog.text


class GradModeRMSNorm(OwnRMSNorm):
    """Has another kernel where no gradient is needed."""

    def forward(self, x):
        if torch.is_grad_enabled():
            return F.layer_norm(x, (WIDTH,), self.weight)
        return super().forward(x)


class AsksWhatNeedsAGradient(OwnRMSNorm):
    """As a product of matrices does, which chooses its kernel by that."""

    def forward(self, x):
        needs = x.requires_grad, self.weight.requires_grad
        return super().forward(x) * (2 if all(needs) else 3)


class WarmingLayerNorm(nn.LayerNorm):
    """Warms up by its calls."""

    num_calls = 0

    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        self.num_calls += 1
        return super().forward(x) * min(1.0, self.num_calls / 10)


@pytest.mark.parametrize(
    "part",
    [
        *(Counts, Sparse, Forces, norm_of_a_network),
        *(GradModeRMSNorm, AsksWhatNeedsAGradient, WarmingLayerNorm),
    ],
)
def test_a_module_runs_again_as_in_its_forward_and_leaves_no_trace(part):
    plain, model = around_part(part), around_part(part)
    offload = around(model, (OWN, "norm"))
    for _ in range(3):
        assert_same(train(plain), train(model, offload))
        assert offload.end_step()
        assert recomputed_bytes(offload.manager) > 0
    assert getattr(model.own_norm, "num_calls", 3) == 3


def test_a_module_that_changes_what_it_is_given_is_named_in_its_first_forward():
    model = around_part(Adding)
    with pytest.raises(StateError, match=r"own_norm changes in place what it is given"):
        train(model, around(model, (OWN,)))


class TaskLayerNorm(nn.Module):
    """Of its own weights takes those of the task, which a number and a list tell."""

    task = 0

    def __init__(self):
        super().__init__()
        self.weight, self.tasks = nn.Parameter(torch.rand(2, WIDTH)), [0]

    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight[self.task + self.tasks[0]])


def with_dropout():
    return nn.Sequential(OwnRMSNorm(), nn.Dropout())


def another_weight(part, i):
    part.weight = nn.Parameter(torch.full((2, WIDTH), 1.0 + i))


STATES = {
    "a number": (TaskLayerNorm, lambda part, i: setattr(part, "task", i)),
    "a list": (TaskLayerNorm, lambda part, i: part.tasks.__setitem__(0, i)),
    "of a known class": (nn.LeakyReLU, lambda part, i: setattr(part, "negative_slope", 0.1 + i)),
    "a rate": (with_dropout, lambda part, i: setattr(part[1], "p", i / 3)),
    "its mode": (with_dropout, lambda part, i: part.train(bool(i))),
    "weights": (OwnRMSNorm, lambda part, i: part.weight.data.fill_(1.0 + i)),
    "weights of a known class": (norm, lambda part, i: part.weight.data.fill_(1.0 + i)),
    "other weights": (TaskLayerNorm, another_weight),
}


@pytest.mark.parametrize("kind", STATES)
def test_what_a_module_had_counts_where_it_changes_between_forwards(kind):
    part, change = STATES[kind]
    units = ("norm", "mlp_act") if "known class" in kind else (OWN,)

    def gradients(context):
        model = around_part(part)
        offload = context(model)
        losses = []
        for i in (0, 1):
            torch.manual_seed(i)
            change(model.own_norm, i)
            with offload:
                losses.append(model(make_inputs() + i).square().mean())
        sum(losses).backward()
        named = model.first.weight, model.last.weight
        return [p.grad for p in named], offload

    expected, _ = gradients(lambda _: contextlib.nullcontext())
    found, offload = gradients(lambda model: around(model, units))
    assert_same(expected, found)
    assert offload.end_step()
    assert offload.last_step.recomputed_bytes > 0


class Scaled(nn.Module):
    def forward(self, x, scales):
        return x.cos() * scales[0][0]


class Applied(nn.Module):
    def forward(self, x, other):
        return other(x.cos())


class Giving(nn.Module):
    """Gives its part a list inside a tuple, which it changes later, or another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if isinstance(self.inner, Applied):
            return self.inner(x, nn.Identity())
        scales = ([2.0],)
        y = self.inner(x, scales)
        scales[0][0] = 3.0
        return y


@pytest.mark.parametrize("inner", [Scaled, Applied])
def test_what_may_change_of_arguments_counts_as_it_was(inner):
    plain, model = (around_part(lambda: Giving(inner())) for _ in range(2))
    offload = around(model, ("**inner",))
    assert_same(train(plain), train(model, offload))
    assert offload.end_step()
    assert (recomputed_bytes(offload.manager) > 0) == (inner is Scaled)


def test_frozen_weights_that_are_there_for_the_forward_alone_count_as_they_were():
    def make():
        model = around_part(OwnRMSNorm)
        norm = model.own_norm.requires_grad_(False)
        weight, away = norm.weight, nn.Parameter(torch.empty(WIDTH, device="meta"), False)
        norm.register_forward_pre_hook(lambda n, _: n._parameters.update(weight=weight))
        norm.register_forward_hook(lambda n, *_: n._parameters.update(weight=away))
        return model

    model = make()
    assert_same(train(make()), train(model, around(model, (OWN,))))


class ConstantsRMSNorm(OwnRMSNorm):
    """Reads what it makes itself, views of its parameters, and what it has made of them."""

    def forward(self, hidden_states):
        scale = torch.tensor([1.0, 2.0]).repeat(WIDTH // 2)
        weight = (self.weight.data.view(-1) + self.weight.detach()) * torch.arange(WIDTH)
        made = super().forward(hidden_states) * (weight + scale).to(hidden_states.dtype)
        return F.dropout(made, 0.3)


@pytest.mark.parametrize("min_tensor_bytes", [0, 1024])
def test_what_a_norm_makes_and_draws_itself_is_recomputed(min_tensor_bytes):
    model = around_part(ConstantsRMSNorm)
    expected = train(model)
    config = make_config(min_tensor_bytes=min_tensor_bytes, recompute=OWN)
    stash = {"max_fwd_stash_size": 1, "warn_if_no_head": False}  # groups end inside the norm
    offload = get_act_offloading_ctx_manager(model, config=config, **stash)
    for _ in range(3):
        assert_same(expected, train(model, offload))
    offload.end_step()
    assert recomputed_bytes(offload.manager) >= ROWS * WIDTH * 4


def test_what_another_hook_makes_of_an_output_is_saved_as_ever(caplog):
    def make():
        model = make_model()
        model[0].norm.register_forward_hook(lambda *_: _[-1] * 2)
        model[1].norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        return model

    plain, model = make(), make()
    manager = make_manager(recompute=("norm",))
    with offload_modules(model, ["*"], manager=manager):
        for one in (plain, model):
            one[2].norm.register_forward_hook(lambda *_: _[-1] * 3, prepend=True)
        for _ in range(2):
            assert_same(train(plain), group_step(model, manager))
    assert recomputed_bytes(manager) == ROWS * WIDTH * 4
    assert "2.norm, and maybe others, is kept: another hook of it comes in between" in caplog.text

"""Which groups a forward without marks has, and which tensors they hold."""

from __future__ import annotations

import contextlib

import pytest
import torch
import zoo
from programs import make_config, make_manager
from test_whole_model import ROOMY, TIGHT, made, make_offload
from torch import nn

from megatron_offload.core.group import GroupState
from megatron_offload.frontends.whole_model import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
)


@pytest.mark.parametrize("stash", [1, 2, 50])
def test_the_stash_bounds_the_tensors_in_flight(stash, monkeypatch):
    offload = make_offload(max_fwd_stash_size=stash)
    most, commit = [], offload.manager.commit

    def watched(group):
        commit(group)
        most.append(sum(count for _, count, _ in offload.manager.window._entries))

    monkeypatch.setattr(offload.manager, "commit", watched)
    zoo.assert_exact("transformer", offload)
    assert 0 < max(most) <= stash


@pytest.mark.parametrize("most", [1000, 5])
def test_a_long_forward_has_few_groups_and_they_are_those_of_every_step(most):
    offload = make_offload(max_fwd_stash_size=most)
    offload.manager.tuner = None
    x = torch.ones(1 << 18, requires_grad=True)
    sizes = []
    for _ in range(3):
        with offload:
            y = x
            for _ in range(160):
                y = y.mul(0.1).exp()  # of 1 MiB each, one is saved
        y.sum().backward()
        del y
        groups = offload.manager.decisions.groups()
        sizes.append([len(group.references) for group in groups])
        assert offload.end_step()
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0] == sorted(sizes[0][:-1]) + sizes[0][-1:]
    assert sum(sizes[0]) == 160
    assert (sizes[0][0], max(sizes[0])) == (1, min(5, most // 2))
    offload.close()


class Branches(torch.nn.Module):
    """A norm whose output several others save."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(256, 64) for _ in range(5))

    def forward(self, x):
        y = self.norm(x)
        return x + torch.cat([branch(y).exp() for branch in self.branches[:4]], dim=1)


def test_the_groups_are_the_same_whatever_is_recomputed():
    model = torch.nn.Sequential(*(Branches() for _ in range(4)))
    found = []
    for units in ((), ("norm",)):
        config = make_config("eager", recompute=units, policy={"kind": "modules"}, **TIGHT)
        offload = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
        with offload:
            y = model(torch.ones(1024, 256))
        y.sum().backward()
        del y
        groups = offload.manager.decisions.groups()
        found.append([(group.key, len(group.references)) for group in groups])
        assert offload.end_step()
        assert (offload.last_step.by_name["activations"].recomputed_bytes > 0) is bool(units)
        offload.close()
    assert found[0] == found[1]
    assert len(found[0]) > 8


def test_what_is_recomputed_in_a_backward_inside_the_block_is_kept():
    model, x = made("reentrant")
    x.requires_grad_()
    offload = make_offload(**TIGHT)
    with offload:
        loss = zoo.loss_of(model, x)
        before = sum(len(group.blocks()) for group in offload.manager.decisions.groups())
        loss.backward()
        after = sum(len(group.references) for group in offload.manager.decisions.groups())
    assert before == after > 0


def test_a_forward_that_fails_copies_nothing_more():
    offload = make_offload(max_fwd_stash_size=50, **TIGHT)
    x = torch.ones(100, requires_grad=True)

    def forward():
        kept.append(x.exp().exp())
        raise ZeroDivisionError

    kept = []
    with pytest.raises(ZeroDivisionError), offload:
        forward()
    assert offload.manager.window.num_inflight == 0
    assert "activations" not in offload.manager.transfers.stats.by_name


def test_on_the_compute_stream_nothing_has_to_be_held_for_copies():
    offload = OffloadActivations(
        use_streams=False,
        min_offload_size=0,
        manager=make_manager("eager", copy_streams=False, **ROOMY),
    )
    x = torch.ones(100, requires_grad=True)
    with offload:
        y = x
        for index in range(4):
            y = y.exp()
            assert offload.manager.window.num_inflight == 0
            assert offload.manager.host_pool.alone.peak()[0] == 400 * index, "all but the last"
    y.sum().backward()


class Wrapped(nn.Module):
    def __init__(self, **inner):
        super().__init__()
        for name, module in inner.items():
            setattr(self, name, module)

    def forward(self, *args):
        return next(iter(self.children()))(*args)


HEADS = {
    "torchtune": lambda: zoo.make("transformer")[0],
    "wrapped": lambda: Wrapped(module=Wrapped(_orig_mod=zoo.make("transformer")[0])),
    "adapters": lambda: Wrapped(base_model=Wrapped(model=zoo.make("transformer")[0])),
    "classifier": lambda: zoo.make("residual")[0],
    "head": lambda: zoo.make("lstm")[0],
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_kept_on_the_device(name, recwarn):
    model = HEADS[name]()
    heads = ("output", "classifier", "head")
    head = next(m for n, m in model.named_modules() if n.split(".")[-1] in heads)
    is_image = name == "classifier"
    inputs = torch.randn(3, 3, 12, 12) if is_image else torch.randint(0, 40, (3, 12))
    context = get_act_offloading_ctx_manager(
        model, True, min_offload_size=0, manager=make_manager(**ROOMY)
    )
    get_act_offloading_ctx_manager(model)
    assert len(head._forward_pre_hooks) == len(head._forward_hooks) == 1, "it is hooked once"
    assert isinstance(context, OffloadActivations)
    assert not [w for w in recwarn if "output head" in str(w.message)]
    counts = []
    head.register_forward_pre_hook(lambda *_: counts.append(num_tensors(context)), prepend=True)
    head.register_forward_hook(lambda *_: counts.append(num_tensors(context)))
    with context:
        model(inputs).square().mean().backward()
    assert counts[0] == counts[1] > 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def num_tensors(context):
    return sum(len(group.references) for group in context.manager.decisions.groups())


def test_a_model_without_a_head_warns_unless_it_is_expected_or_off(recwarn):
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="no output head was found"):
        get_act_offloading_ctx_manager(model, True, manager=make_manager())
    context = get_act_offloading_ctx_manager(model, warn_if_no_head=False, manager=make_manager())
    assert isinstance(context, OffloadActivations)
    assert isinstance(get_act_offloading_ctx_manager(model, False), contextlib.nullcontext)
    assert not recwarn


def test_buffers_of_the_model_are_kept():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.register_buffer("table", torch.randn(32, 32))
    with pytest.warns(UserWarning, match="no output head"):
        context = get_act_offloading_ctx_manager(
            model, True, min_offload_size=0, manager=make_manager(**ROOMY)
        )
    x = torch.randn(32, 32, requires_grad=True)
    with context:
        (x * model.table).sum().backward()
    assert context.manager.transfers.stats.by_name["activations"].offloaded_bytes <= 0


def test_groups_are_left_when_their_tensors_are_gone():
    offload = make_offload()
    with offload:
        loss = zoo.loss_of(*made("transformer"))
    groups = list(offload.manager.decisions.groups())
    loss.backward()
    left = [group for group in groups if group.state is GroupState.DONE]
    assert len(left) >= len(groups) - 1, "all but the last are left while backward runs"

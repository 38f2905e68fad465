"""What rows offload beside the step's limits and clock, and for forwards of any length."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from programs import assert_nothing_left, assert_same, make_manager, take_steps
from small_net import AT_ONCE, WIDTH, Block, around, make_net
from torch import nn

from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.model_map import watch


@pytest.mark.parametrize("layers", ["0-7", "all"])
def test_losses_without_a_backward_take_no_more_of_the_limits_than_are_alive(layers):
    def offloaded_bytes(num_skipped):
        net = make_net(16)
        context = around(net, [{"site": "mlp", "layers": layers, "offload": "all"}])
        for number in range(8 + num_skipped):
            with context:
                loss = net(torch.arange(40)[None]).sum()
            if not 4 <= number < 4 + num_skipped:
                loss.backward()
        context.end_step()
        return context.last_step.offloaded_bytes

    of_two_alive = offloaded_bytes(1)
    assert offloaded_bytes(20) == of_two_alive > 0


def test_limits_follow_what_rows_would_offload_of_all_layers_and_memory_comes_back():
    net = make_net(16)
    context = around(net, [{"site": "mlp", "layers": "0-9", "offload": 2}])
    take_steps(net, context, (8, 8, 8))
    budget, layer_bytes = context.manager.budget, 2 * 2 * 8 * 4 * WIDTH * 4
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == (2 * layer_bytes, 2 * layer_bytes)
    assert context.end_step()
    does = context.last_step.by_name["mlp"]
    assert does.reloaded_bytes == does.offloaded_bytes == 10 * layer_bytes
    assert context.last_step.num_late_reloads == 0


def test_steps_too_short_for_rows_change_nothing_in_those_that_come():
    net = make_net(16)
    row = {"site": "mlp", "layers": "0-6", "offload": 2, "min_tokens": 10}
    context = around(net, [row])
    for length in (8, 2, 2, 8, 8):
        take_steps(net, context, (length,))
    assert context.end_step()
    assert context.last_step.reloaded_bytes == 7 * 2 * 2 * 8 * 4 * WIDTH * 4


def test_the_clock_goes_by_a_layer_once_and_by_none_that_raises():
    def saved_bytes(num_backwards=1, *, raises=False):
        net = make_net(8)
        context = around(net, [{"site": "mlp", "layers": 0, "offload": 2}])
        losses = []
        for _ in range(3):
            with context:
                losses.append(net(torch.arange(8)[None]).sum())
        for number in range(num_backwards):
            losses[0].backward(retain_graph=number + 1 < num_backwards)
        if raises:
            net.layers[4].mlp.forward = None
            net.layers[0].forward = lambda x: x  # it has no group then, as the next three
            with pytest.raises(TypeError), context:
                net(torch.arange(8)[None])
        return context.manager.budget._saved_bytes

    assert saved_bytes(2) == saved_bytes() > 0
    assert saved_bytes(raises=True) == saved_bytes() + 4 * saved_bytes() // 16


class NumberedBlock(Block):
    """Of a chunk of a pipeline stage, as Megatron counts its layers."""

    __module__ = "megatron.core"


def test_layers_of_another_chunk_that_has_no_rows_let_the_clock_go_too():
    manager = make_manager(
        rows=[{"site": "mlp", "layers": "0-7", "offload": 2}],
        max_inflight_bytes=None,
        prefetch_bytes=None,
    )
    chunks = [nn.Sequential(*(NumberedBlock() for _ in range(8))) for _ in range(2)]
    for number, layer in enumerate([*chunks[0], *chunks[1]], 1):
        layer.layer_number = number
    for chunk in chunks:
        adopt_model(nn.ModuleDict({"layers": chunk}), manager, is_part=True)
    for _ in range(4):
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        with manager.step():
            for stage, chunk in enumerate(chunks):
                manager.begin_chunk(vp_stage=stage)
                x = chunk(x)
            x.sum().backward()
    assert manager.last_step.reloaded_bytes == 8 * 2 * 2 * 8 * 4 * WIDTH * 4


LONG = {
    "offload": {"site": "mlp", "offload": "all", "min_tokens": 20},
    "the largest": {"site": "mlp", "offload": 2, "min_tokens": 20},
    "recompute": {"site": "layer", "recompute": True, "min_tokens": 20},
    "an output": {"site": "mlp.act", "recompute": True, "min_tokens": 20},
}


@pytest.mark.parametrize("row", LONG.values(), ids=LONG)
@pytest.mark.parametrize("lengths", [(8, 10, 9, 12, 8), (12, 12, 9, 10, 3)], ids=str)
def test_rows_of_long_forwards_leave_others_alone(row, lengths):
    bare, net = make_net(), make_net()
    for layer in (*bare.layers, *net.layers):
        layer.mlp.drop = nn.Identity()  # else nobody saves what the activation returns
    context = around(net, [row], **AT_ONCE)
    for number, length in enumerate(lengths):
        assert_same(take_steps(bare, None, (length,)), take_steps(net, context, (length,)))
        has_groups = context.end_step()
        assert has_groups == (2 * length >= 20) or not number, "nothing of ours was in others"
        assert_nothing_left(context.manager)
    does = context.last_step.by_name[row["site"]]
    assert does.offloaded_bytes + does.recomputed_bytes > 0


def test_a_short_forward_that_raises_ends_no_group_of_a_long_one():
    net = make_net()
    context = around(net, [LONG["offload"]], **AT_ONCE)
    with context:
        long = net(torch.randint(50, (2, 12))).square().mean()
        with pytest.raises(IndexError):
            net(torch.full((2, 3), 99))
        fail = net.layers[1].mlp.down.register_forward_pre_hook(lambda *_: 1 / 0)
        with fail, pytest.raises(ZeroDivisionError):
            net(torch.randint(50, (2, 3)))
        last = net(torch.randint(50, (2, 12))).square().mean()
    (long + last).backward()
    context.end_step()
    assert context.last_step.by_name["mlp"].num_groups == 2 * 4
    assert_nothing_left(context.manager)


def test_rows_for_calls_of_another_length_need_no_other_watch():
    net = make_net()
    for least, num_watched in ((0, 1), (2, 0), (10**6, 0)):
        context = around(net, [{"site": "mlp", "offload": 1, "min_tokens": least}])
        real = {"autospec": True, "side_effect": watch.SavedMemory.watch}
        with mock.patch.object(watch.SavedMemory, "watch", **real) as begun:
            take_steps(net, context)
        context.end_step()
        assert begun.call_count == num_watched
        assert (context.last_step.offloaded_bytes > 0) == (least < 10**6)


def test_reloads_are_in_time_whatever_the_length_of_the_step_before():
    net = make_net(12)
    offload = around(net, [{"site": "mlp", "offload": "all", "layers": "0-8"}])
    late = []
    for length in (64, 64, 16, 64, 16, 128, 8):
        with offload:
            loss = net(torch.randint(50, (length,))).sum()
        loss.backward()
        del loss
        offload.end_step()
        late.append(offload.last_step.num_late_reloads)
        assert offload.last_step.offloaded_bytes > 0
    assert late == [1, 0, 0, 0, 0, 0, 0], "the first step has none before it"

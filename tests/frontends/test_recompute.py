"""What is made again at the front doors: to the bit, and really not moved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from programs import TWO_TIMINGS, assert_nothing_left, assert_same, make_config, make_manager
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from megatron_offload import (
    CPUOffload,
    OffloadActivations,
    OffloadConfig,
    get_act_offloading_ctx_manager,
    offload_modules,
)
from megatron_offload.config import RECOMPUTE_UNITS
from megatron_offload.core.policy_config import ModulesConfig
from megatron_offload.errors import ConfigError
from megatron_offload.frontends.recompute import unit_of
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.plan import UnitChoice, plan_of
from megatron_offload.planning.policy import plan_by_rule

ROWS, WIDTH = 16, 32


class OwnRMSNorm(nn.Module):
    """As Hugging Face's models write it."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = eps

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)


class Gated(nn.Module):
    """A layer of both kinds of norm, a gated activation, and dropout where it is asked for."""

    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.own_norm = OwnRMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.act = nn.SiLU()
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        y = self.own_norm(hidden_states=x)
        return x + self.drop(self.down(self.act(self.gate(y)) * self.up(y)))


def make_model(**settings):
    torch.manual_seed(0)
    return nn.Sequential(*(Gated(**settings) for _ in range(3)), nn.Linear(WIDTH, 3))


def make_inputs():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model, context=None, inputs=None):
    """Return the loss and all gradients of one step."""
    torch.manual_seed(2)
    model.zero_grad()
    x = make_inputs() if inputs is None else inputs
    if context is None:
        loss = model(x).float().square().mean()
    else:
        with context:
            loss = model(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def around(model, recompute, *, knows_model, timing="late", **settings):
    config = make_config(timing, recompute=recompute, **settings)
    if knows_model:
        return get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
    return OffloadActivations(config=config)


def remade_bytes(manager):
    return sum(group.remade_bytes for group in manager.last_step.by_name.values())


@pytest.mark.parametrize("knows_model", [True, False])
@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_each_choice_of_units_gives_the_bits_and_more_of_them_move_less(timing, knows_model):
    model = make_model()
    expected = train(model)
    moved = []
    for units in ((), ("mlp_act",), ("norm", "mlp_act"), "auto"):
        offload = around(model, units, knows_model=knows_model, timing=timing, checking=True)
        for _ in range(3):
            assert_same(expected, train(model, offload))
            assert offload.end_step()
        assert (remade_bytes(offload.manager) > 0) is (units != ())
        moved.append(offload.last_step.offloaded_bytes)
        assert_nothing_left(offload.manager)
    assert moved == sorted(set(moved), reverse=True)


def test_all_that_norms_and_activations_make_of_what_is_saved_leaves():
    model = make_model()
    offload = around(model, ("norm", "mlp_act"), knows_model=True, min_tensor_bytes=ROWS * WIDTH)
    train(model, offload)
    assert offload.end_step()
    own = 3 * 4 * ROWS * WIDTH
    assert remade_bytes(offload.manager) == own + own + 2 * own


def test_the_default_makes_norms_and_activations_again():
    assert OffloadConfig().recompute == ("norm", "mlp_act", "mlp_fc1")
    model = make_model()
    offload = OffloadActivations(manager=make_manager())
    train(model, offload)
    assert offload.end_step()
    assert remade_bytes(offload.manager) > 0


def test_a_share_counts_what_is_left_to_move():
    model = make_model()
    expected = train(model)
    try:
        offload = CPUOffload(1.0, "remade", make_config())
        for _ in range(2):
            assert_same(expected, train(model, offload))
            assert offload.end_step()
        assert remade_bytes(offload._groups.manager) > 0
    finally:
        CPUOffload.forget("remade")


def group_step(model, manager):
    with manager.step():
        found = train(model)
    assert_nothing_left(manager)
    return found


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_modules_by_name_are_made_again_where_groups_are(timing):
    model = make_model()
    expected = train(model)
    manager = make_manager(timing, recompute=("norm", "*.act"))
    with offload_modules(model, ["*"], manager=manager):
        for _ in range(3):
            assert_same(expected, group_step(model, manager))
        units = {unit.unit for group in manager.last_profile.groups for unit in group.remade}
        assert units == {"norm", "*.act"}
        assert remade_bytes(manager) > 0
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pattern_takes_a_module_of_any_kind():
    model = make_model()
    expected = train(model)
    manager = make_manager(recompute=("?.mix", "*.down"))
    with offload_modules(model, ["*"], manager=manager):
        for _ in range(2):
            assert_same(expected, group_step(model, manager))
    units = {unit.unit for group in manager.last_profile.groups for unit in group.remade}
    assert units <= {"?.mix", "*.down"}


class Mlp(nn.Module):
    """Named as Megatron's."""

    def __init__(self):
        super().__init__()
        self.linear_fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.linear_fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear_fc2(self.act(self.linear_fc1(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x)


def units_of(profile):
    return {unit.unit for group in profile.groups for unit in group.remade}


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_a_matrix_product_is_made_again_in_the_layers_that_a_plan_says(timing):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    expected = train(model)
    manager = make_manager(timing)
    with offload_modules(model, ["*.mlp.*"], manager=manager):
        assert_same(expected, group_step(model, manager))
        assert units_of(manager.last_profile) == {"mlp_act"}  # to tell of others is work
        with profile_step(manager) as recorded:
            assert_same(expected, group_step(model, manager))
        profile, without_bytes = recorded.profile, remade_bytes(manager)
        layers = [f"mlp_fc1:{layer}.mlp.linear_fc1" for layer in range(3)]
        assert units_of(profile) == {"mlp_act", *layers}
        assert without_bytes == 3 * 4 * ROWS * 4 * WIDTH
        for chosen in (layers[:2], layers):
            (rank,) = plan_by_rule(ModulesConfig(), [profile]).ranks
            units = tuple(UnitChoice(0, unit, 0, 0.0, True) for unit in ["mlp_act", *chosen])
            plan = plan_of("any", [profile], [dataclasses.replace(rank, units=units)])
            manager.follow_plan(plan)
            for _ in range(2):
                assert_same(expected, group_step(model, manager))
            more_bytes = remade_bytes(manager) - without_bytes
            assert more_bytes == len(chosen) * 4 * ROWS * 4 * WIDTH


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


class Summing(nn.Module):
    def forward(self, x):
        y = x.clone()
        torch.distributed.all_reduce(y)
        return y * x


class Adding(nn.Module):
    def forward(self, x):
        return x.add_(1).cos()


class DroppingLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3)


class FusedRMSNorm(nn.RMSNorm):
    """Draws where torch doesn't see it, as a kernel of its own would."""

    def forward(self, x):
        with _disable_current_modes():
            return F.dropout(super().forward(x), 0.3)


class SummingRMSNorm(Summing):
    pass


def patched_norm():
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    norm.forward = lambda x: F.dropout(F.layer_norm(x, (WIDTH,)), 0.3)
    return norm


REFUSED = {
    "a pattern with dropout": ("1*", "draws random numbers", lambda: nn.Dropout(0.5)),
    "a pattern with buffers": ("1*", "changes its buffers", Counting),
    "a pattern with a sum": ("1*", "communicates", Summing),
    "a pattern with a change": ("1*", "changes in place what it is given", Adding),
    "a norm with dropout": ("norm", "draws random numbers", lambda: DroppingLayerNorm(WIDTH)),
    "a fused norm": ("norm", "draws random numbers", lambda: FusedRMSNorm(WIDTH)),
    "a patched norm": ("norm", "draws random numbers", patched_norm),
    "a norm with a sum": ("norm", "communicates", SummingRMSNorm),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_done_again_moves_and_says_why(kind, caplog, tmp_path):
    unit, because, part = REFUSED[kind]

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), part(), nn.Linear(WIDTH, 3))

    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        plain, model = make(), make()
        manager = make_manager(recompute=(unit, "nothing.*"))
        with offload_modules(model, ["*"], manager=manager), caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert_same(train(plain), group_step(model, manager))
        assert remade_bytes(manager) == 0
        told = f"'1' moves and isn't made again, since its forward {because}"
        assert caplog.text.count(told) == 1
        assert "no module here matches 'nothing.*'" in caplog.text
    finally:
        torch.distributed.destroy_process_group()


def test_small_weights_of_a_job_of_several_give_the_same_product(tmp_path):
    """They are copied; by what needs a gradient a product of matrices chooses its kernel."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(129), nn.Linear(129, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.down(self.up(self.norm(x).transpose(0, 1)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(129, 129), Transposed())
    x = torch.randn(5, 7, 129)
    expected = train(model, inputs=x)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        manager = make_manager(recompute=("norm", "*.up"))
        with offload_modules(model, ["*"], manager=manager), manager.step():
            assert_same(expected, train(model, inputs=x))
        assert units_of(manager.last_profile) == {"*.up"}
    finally:
        torch.distributed.destroy_process_group()


def test_a_list_that_is_changed_afterwards_counts_as_it_was():
    class Repeating(nn.Module):
        def forward(self, x):
            sizes = [2, 1]
            y = x.sin().repeat(sizes)
            sizes[0] = 3
            return y.square()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Repeating(), nn.Linear(WIDTH, 3))
    expected = train(model)
    offload = around(model, ("pointwise", "layout"), knows_model=False)
    assert_same(expected, train(model, offload))


class ConditionedLayerNorm(nn.Module):
    """Its model tells it by an attribute what to multiply by."""

    condition = torch.ones(WIDTH)

    def forward(self, x):
        return F.layer_norm(x, (WIDTH,)) * self.condition


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), ConditionedLayerNorm()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x, condition):
        self.norm.condition = condition
        return self.last(self.norm(self.first(x)))


def test_what_a_module_is_told_by_an_attribute_counts_as_it_was(caplog):
    torch.manual_seed(0)
    model = Conditioned()

    def step(context):
        model.zero_grad()
        losses = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x, condition = torch.randn(2, ROWS, WIDTH, generator=generator)
            with context:
                losses.append(model(x, condition[0]).square().mean())
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    offload = around(model, ("norm",), knows_model=True)
    assert_same(step(contextlib.nullcontext()), step(offload))
    assert "'norm' moves and isn't made again, since its forward reads a tensor" in caplog.text


class ConstantsRMSNorm(OwnRMSNorm):
    """Reads what it makes itself, views of its parameters, and what it has made of them."""

    def forward(self, hidden_states):
        scale = torch.tensor([1.0, 2.0]).repeat(WIDTH // 2)
        weight = (self.weight.data.view(-1) + self.weight.detach()) * torch.arange(WIDTH)
        return super().forward(hidden_states) * (weight + scale).to(hidden_states.dtype)


@pytest.mark.parametrize("min_offload_size", [0, 1024])
def test_what_a_norm_makes_itself_is_made_again(min_offload_size, caplog):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ConstantsRMSNorm(WIDTH), nn.Linear(WIDTH, 3))
    expected = train(model)
    config = make_config(min_tensor_bytes=min_offload_size)
    stash = {"max_fwd_stash_size": 1, "warn_if_no_head": False}  # groups end inside the norm
    offload = get_act_offloading_ctx_manager(model, config=config, **stash)
    for _ in range(3):
        assert_same(expected, train(model, offload))
    offload.end_step()
    assert "recompute:" not in caplog.text
    assert remade_bytes(offload.manager) >= ROWS * WIDTH * 4


def test_a_forward_that_raises_is_no_proof_of_the_next():
    class RaisingOnceLayerNorm(DroppingLayerNorm):
        has_raised = False

        def forward(self, x):
            if not self.has_raised:
                self.has_raised = True
                raise ZeroDivisionError
            return super().forward(x)

    model = nn.Sequential(RaisingOnceLayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    manager = make_manager()
    with offload_modules(model, ["*"], manager=manager):
        with pytest.raises(ZeroDivisionError):
            group_step(model, manager)
        found = group_step(model, manager)
    assert_same(train(model), found)


def test_what_another_hook_makes_of_an_output_is_saved_as_ever():
    def make():
        model = make_model()
        model[0].norm.register_forward_hook(lambda *_: _[-1] * 2)
        model[1].norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        return model

    plain, model = make(), make()
    manager = make_manager()
    with offload_modules(model, ["*"], manager=manager):
        model[2].norm.register_forward_hook(lambda *_: _[-1] * 3, prepend=True)
        plain[2].norm.register_forward_hook(lambda *_: _[-1] * 3, prepend=True)
        for _ in range(2):
            assert_same(train(plain), group_step(model, manager))
    assert remade_bytes(manager) > 0


def test_a_flag_or_weight_that_is_changed_in_between_counts_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(OwnRMSNorm(WIDTH), nn.Linear(WIDTH, 3))
    first = nn.Linear(WIDTH, WIDTH)
    manager = make_manager()
    full = nn.Sequential(first, *model)
    expected = train(full)
    with offload_modules(full, ["*"], manager=manager), manager.step():
        torch.manual_seed(2)
        full.zero_grad()
        loss = full(make_inputs()).float().square().mean()
        weight = full[1].weight
        full.eval()
        full[1].weight = nn.Parameter(torch.zeros(WIDTH))
        loss.backward()
        full[1].weight = weight
    assert_same(expected, [loss.detach(), *(p.grad for p in full.parameters())])


def test_copies_of_a_model_and_evaluation_in_between_change_nothing():
    model = make_model()
    expected = train(model)
    manager = make_manager(recompute=("norm", "mlp_act", "*.down"))
    with offload_modules(model, ["*"], manager=manager):
        other = copy.deepcopy(model)
        for _ in range(2):
            with torch.no_grad():
                model.eval()(make_inputs())
            model.train()
            assert_same(expected, group_step(model, manager))
            assert_same(expected, train(other))
        assert_same(expected, group_step(model, manager))


def test_mixed_precision_is_made_again_under_the_same_autocast():
    model = make_model()
    for units in (("norm", "mlp_act"), "auto"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = train(model)
            offload = around(model, units, knows_model=False)
            for _ in range(2):
                assert_same(expected, train(model, offload))
                assert offload.end_step()
        assert remade_bytes(offload.manager) > 0


@pytest.mark.parametrize("units", [(), ("norm", "mlp_act")], ids=["moved", "made again"])
def test_channels_that_come_last_do_so_where_an_image_is_one_pixel(units):
    """Strides of dimensions of size 1 tell kernels that, and their sums have another order."""
    torch.manual_seed(0)
    parts = [nn.Conv2d(4, 32, 3), nn.AdaptiveAvgPool2d(1), nn.GroupNorm(4, 32), nn.SiLU()]
    model = nn.Sequential(*parts, nn.Conv2d(32, 3, 1))
    images = torch.randn(8, 4, 6, 6).to(memory_format=torch.channels_last)
    expected = train(model, inputs=images)
    offload = around(model, units, knows_model=False)
    for _ in range(2):
        assert_same(expected, train(model, offload, images))
        assert offload.end_step()
    assert (remade_bytes(offload.manager) > 0) is bool(units)


def test_what_a_norm_cannot_be_made_again_of_its_last_function_can():
    """In bfloat16 such a norm saves a copy of its input, and not that."""
    model = make_model().bfloat16()
    expected = train(model, inputs=make_inputs().bfloat16())
    remade = []
    for knows_model in (False, True):
        offload = around(model, "auto", knows_model=knows_model)
        for _ in range(2):
            assert_same(expected, train(model, offload, make_inputs().bfloat16()))
            assert offload.end_step()
        remade.append(remade_bytes(offload.manager))
    assert remade[0] == remade[1] > 0


def test_functions_of_a_program_in_plain_pytorch():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x):
            y = F.layer_norm(x, (WIDTH,), self.scale)
            y = F.gelu(self.one(y), approximate="tanh")
            y = torch.cat([y * self.scale, F.silu(y).clone()], dim=-1).transpose(0, 1).contiguous()
            y = F.dropout(self.two(y.transpose(0, 1)), 0.2) ** 2
            y = F.silu(y.mul(2.0), inplace=True)
            return (1 - y) / (2 + y * y)

    torch.manual_seed(0)
    model = nn.Sequential(Functional(), Functional(), nn.Linear(WIDTH, 3))
    expected = train(model)
    offload = around(model, "auto", knows_model=False, checking=True)
    for _ in range(3):
        assert_same(expected, train(model, offload))
        assert offload.end_step()
    units = {u.unit for g in offload.manager.last_profile.groups for u in g.remade}
    assert units >= {"norm", "mlp_act", "pointwise"}


def test_another_library_s_function_of_a_known_name_is_not_made_again():
    def gelu(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(gelu, (x,), x)
        return F.dropout(x.sin(), 0.4)

    def gradient(context):
        torch.manual_seed(2)
        x = make_inputs().requires_grad_()
        with context:
            loss = (gelu(x * 2) ** 2).sum()
        loss.backward()
        return [x.grad]

    offload = OffloadActivations(config=make_config(recompute=("mlp_act",)))
    assert_same(gradient(contextlib.nullcontext()), gradient(offload))
    assert offload.end_step()
    assert remade_bytes(offload.manager) == 0


def test_units_of_modules():
    assert unit_of(nn.LayerNorm(4)) == unit_of(nn.RMSNorm(4)) == unit_of(OwnRMSNorm(4)) == "norm"
    assert unit_of(nn.GELU()) == unit_of(nn.SiLU()) == "mlp_act"
    for module in (nn.ReLU(), nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(4), make_model()):
        assert unit_of(module) is None


@pytest.mark.parametrize("name", ["nrom", "mlp-act", "LayerNorm"])
def test_an_unknown_unit_is_refused(name):
    with pytest.raises(ValueError, match=f"nothing that can be made again is called '{name}'"):
        OffloadConfig(recompute=[name])


DOORS = {
    "OffloadActivations": lambda config: OffloadActivations(config=config),
    "CPUOffload": lambda config: CPUOffload(0.5, "refused", config),
    "offload_modules": lambda config: offload_modules(
        make_model(), ["*"], manager=make_manager(recompute=config.recompute)
    ),
}
SERVED = {
    "OffloadActivations": {"norm", "mlp_act", "pointwise", "cast", "layout"},
    "CPUOffload": {"norm", "mlp_act", "pointwise", "cast", "layout"},
    "offload_modules": {"norm", "mlp_act", "mlp_fc1", "*.norm"},
}


@pytest.mark.parametrize("door", DOORS)
def test_what_a_door_cannot_make_again_it_refuses(door):
    for unit in (*RECOMPUTE_UNITS, "*.norm"):
        config = make_config(recompute=(unit,))
        if unit in SERVED[door]:
            DOORS[door](config)
            CPUOffload.forget("refused")
        else:
            with pytest.raises(ConfigError, match=rf"can't make '{re.escape(unit)}' again; \w+"):
                DOORS[door](config)

"""Copied and saved models: no crash, no manager in the file, nothing shared by accident."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from processes import run_python
from programs import assert_same, make_config, make_manager
from test_compile import Layer
from torch import nn

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.frontends.ratio import CPUOffload
from megatron_offload.frontends.whole_model import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def loaded(file):
    return torch.load(io.BytesIO(file), weights_only=False)


WAYS = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: loaded(saved(model))], ids=["deepcopy", "file"]
)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(Layer(32))


def gradients(model):
    model.zero_grad()
    model(torch.linspace(-1, 1, 128).view(4, 32)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@WAYS
def test_a_copy_of_a_marked_model_is_unmarked(duplicate):
    model, manager = make_model(), make_manager(recompute="**.linear_fc1")
    expected = gradients(model)
    offload_modules(model, ["mlp_fc1", "mlp_act", "mlp_fc2", "0"], manager=manager)
    assert b"megatron_offload" not in saved(model)
    twin = duplicate(model)

    def num_groups(*models):
        with manager.step():
            for each in models:
                assert_same(expected, gradients(each))
        return manager.last_step.num_groups

    assert (num_groups(twin), num_groups(model)) == (0, 4)
    with offload_modules(twin, ["mlp_fc1", "mlp_act", "mlp_fc2", "0"], manager=manager):
        assert num_groups(twin) == 4
    assert num_groups(twin, model) == 4


class Owner(Layer):
    """A module that holds what moves its tensors."""

    def __init__(self, context):
        super().__init__(32)
        self.context = context

    def forward(self, x):
        with self.context:
            return super().forward(x)


@WAYS
def test_a_copy_of_a_context_is_a_context_of_its_own(duplicate):
    config = make_config(host_slab_bytes=4096, min_tensor_bytes=16)
    context = OffloadActivations(True, False, 3, config=config)
    model = Owner(context)
    expected = gradients(model)
    context.end_step()
    twin = duplicate(model)
    other = twin.context
    assert other.manager is not context.manager
    assert other.manager.config == context.manager.config
    for name in ("use_pin_memory", "use_streams", "max_fwd_stash_size", "min_tensor_size_bytes"):
        assert getattr(other, name) == getattr(context, name)
    assert_same(expected, gradients(twin))
    other.end_step()
    assert other.last_step.offloaded_bytes == context.last_step.offloaded_bytes > 0


@WAYS
def test_a_copy_of_a_share_is_of_the_same_tag(duplicate):
    context = CPUOffload(0.5, "copied", make_config(host_slab_bytes=4096))
    twin = duplicate(context)
    assert (twin.offload_ratio, twin.tag) == (0.5, "copied")
    assert twin._groups is context._groups


def test_a_share_that_comes_out_of_a_file_has_its_settings():
    context = CPUOffload(0.5, "saved", make_config(host_slab_bytes=4096))
    file = saved(Owner(context))
    CPUOffload.forget("saved")
    model = loaded(file)
    assert model.context._groups.manager.config.host_slab_bytes == 4096
    gradients(model)
    assert model.context.end_step()


@WAYS
def test_a_module_may_own_the_process_s_manager_and_its_hooks(duplicate):
    manager = PipelineOffloadManager.get_instance()
    model = make_model()
    model.manager, model.hooks = manager, offload_modules(model, ["0.mlp"])
    twin = duplicate(model)
    assert twin.manager is manager
    assert twin.hooks.manager is manager
    twin.hooks.remove()
    with manager.step():
        gradients(model)
    assert manager.last_step.num_groups == 1, "the copy's handles are not the model's"
    model.hooks.remove()


def test_a_manager_of_one_s_own_comes_out_of_a_file_with_its_settings_alone():
    manager = make_manager(prefetch_bytes=12345)
    twin = loaded(saved(manager))
    assert twin is not manager
    assert twin.config == manager.config


@pytest.mark.slow
def test_a_saved_model_needs_nothing_of_this_package(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    offload_modules(model, ["0"], manager=make_manager())
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['megatron_offload'] = None; "
        f"m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); m(torch.ones(4))"
    )
    assert run_python("-c", code, cwd=tmp_path).returncode == 0


@WAYS
def test_a_context_that_follows_rows_of_a_model_can_be_copied(duplicate):
    layers = nn.ModuleList(Layer(32) for _ in range(2))
    rows = [{"site": "mlp", "offload": "all"}]
    context = get_act_offloading_ctx_manager(
        nn.ModuleDict({"layers": layers}), config=make_config(rows=rows), min_offload_size=0
    )
    twin = duplicate(context)
    assert twin.manager is not context.manager
    assert twin.manager.config == context.manager.config

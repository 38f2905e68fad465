"""Tensors that are made of others: their parts move, and they are reloaded as what they were."""

from __future__ import annotations

import contextlib

import pytest
import torch
import zoo
from programs import TWO_TIMINGS, Keep, assert_nothing_left, assert_same, make_manager
from test_whole_model import TIGHT, make_offload
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from megatron_offload import offload_modules
from megatron_offload.errors import InPlaceModificationError


def saved_and_back(offload, make):
    """Save what ``make`` makes, without keeping it, and return what backward is handed."""
    x, seen = torch.ones(3, requires_grad=True), []
    with offload:
        y = Keep.apply(x, seen, make())
    y.sum().backward()
    del y
    assert offload.end_step()
    return seen.pop()[0]


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_a_wrapper_moves_part_by_part(timing):
    offload = make_offload(timing, **TIGHT)
    first, second = torch.randn(33, 64).t(), torch.randn(33, 64).t()
    for _ in range(3):
        back = saved_and_back(offload, lambda: TwoTensor(first.clone(), second.clone()))
        assert_same([first, second], [back.a, back.b])
        assert (type(back), back.stride()) == (TwoTensor, second.stride())
        by_name = offload.last_step.by_name["activations"]
        assert by_name.offloaded_bytes == by_name.reloaded_bytes == 2 * first.nbytes
    del back
    assert_nothing_left(offload.manager)


def test_wrappers_in_wrappers_move_too():
    offload = make_offload(**TIGHT)
    a, b, c = (torch.randn(40, 40) for _ in range(3))
    back = saved_and_back(
        offload, lambda: TwoTensor(TwoTensor(a.clone(), b.clone()), TwoTensor(c.clone(), a.clone()))
    )
    assert_same([b, c], [back.a.b, back.b.a])
    assert offload.last_step.offloaded_bytes == 4 * a.nbytes


def test_what_backward_was_handed_outlives_the_release():
    offload = make_offload("late", max_inflight_bytes=1 << 20, prefetch_bytes=0)
    full = torch.randn(64, 64)
    for _ in range(2):
        back = saved_and_back(offload, lambda: TwoTensor(full.clone(), full.clone()))
        saved_and_back(offload, lambda: TwoTensor(full.clone(), full.clone()))
        offload.manager.window.drain()
        assert_same([full, full], [back.a, back.b])


def test_a_wrapper_that_cannot_be_emptied_is_kept_whole(monkeypatch):
    def refuse_none(wrapper, name, value):
        if value is None and name in ("a", "b"):
            raise AttributeError(name)
        object.__setattr__(wrapper, name, value)

    monkeypatch.setattr(TwoTensor, "__setattr__", refuse_none)
    offload, full = make_offload(**TIGHT), torch.randn(40, 40)
    back = saved_and_back(offload, lambda: TwoTensor(full.clone(), full.clone()))
    assert torch.equal(back.a, full)
    by_name = offload.last_step.by_name["activations"]
    assert (by_name.offloaded_bytes, by_name.kept_bytes) == (0, 2 * full.nbytes)
    with offload:
        x = torch.randn(40, 40, requires_grad=True)
        wrapper = TwoTensor(x, x.clone()).sin()
        y = Keep.apply(x, [], wrapper)
    wrapper.add_(1)
    with pytest.raises(InPlaceModificationError):
        y.sum().backward()


@pytest.mark.parametrize("is_view", [False, True])
def test_a_change_of_a_wrapper_or_a_part_is_an_error(mesh, is_view):
    offload = make_offload(**TIGHT)
    full = torch.randn(40, 40, requires_grad=True)
    for kind in ("distributed", "two", "part"):
        with offload:
            if kind == "distributed":
                y = distribute_tensor(full, mesh, [Shard(0)]) * 2
            else:
                y = TwoTensor(full, full) * 2
            z = (y.exp() * y).sum()
        changed = y.b if kind == "part" else y  # which the parts know nothing of
        with torch.no_grad():
            (changed[0] if is_view else changed).add_(1)
        who = r"a tensor .* \[40, 40\] .*," if kind == "part" else r"of shape \[40, 40\]"
        with pytest.raises(InPlaceModificationError, match=f"{who} is at version 1"):
            z.backward()
        del y, z, changed


class Pending(TwoTensor):
    """Some collective is still writing its parts."""

    def trigger_wait(self):
        raise AssertionError


def test_parameters_and_what_is_never_waited_for_are_kept():
    offload = make_offload(**TIGHT)
    x, seen = torch.ones(3, requires_grad=True), []
    weight = nn.Parameter(TwoTensor(torch.randn(40, 40), torch.randn(40, 40)))
    pending = Pending(torch.randn(40, 40), torch.randn(40, 40))
    with offload:
        y = Keep.apply(Keep.apply(x, seen, weight), seen, pending)
    assert offload.manager.transfers.stats.by_name["activations"].offloaded_bytes == 0
    y.sum().backward()
    assert [type(seen.pop()[0]) for _ in range(2)] == [TwoTensor, Pending]


@pytest.mark.parametrize("is_known", [False, True])
def test_of_tensor_parallelism_inputs_are_offloaded_and_weights_kept(mesh, is_known):
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
    offload, grads = make_offload(**TIGHT), []
    if is_known:
        offload.manager.mark_not_offload(weight)
    for around in (contextlib.nullcontext(), offload):
        x = torch.linspace(0, 1, 2048).view(32, 64).requires_grad_()
        with around:
            gathered = all_gather_tensor_autograd(x * 2, 0, mesh.get_group())
            assert hasattr(gathered, "trigger_wait")
            y = DTensor.from_local(gathered, mesh, [Replicate()], run_check=False) @ weight.t()
            y = y.to_local().exp() + (gathered * gathered.sin()).sum()  # which waits for it
            loss = (y @ weight.to_local() if is_known else y).sum()
        grads.append(torch.autograd.grad(loss, [x, weight]))
        del gathered, y, loss
    assert_same(*([a, b.to_local()] for a, b in grads))
    assert offload.end_step()
    assert offload.last_step.offloaded_bytes == (3 + is_known) * x.nbytes


class Odd(torch.Tensor):
    """A subclass that can't be taken apart."""


@pytest.fixture
def mesh(one_rank):
    """One process that is a mesh of its own."""
    return init_device_mesh("cpu", (1,))


def distributed_program(mesh, around):
    """Take two layers of distributed tensors forward and backward three times."""
    generator = torch.Generator().manual_seed(3)
    weights = [
        nn.Parameter(distribute_tensor(torch.randn(32, 32, generator=generator), mesh, [Shard(d)]))
        for d in (0, 1)
    ]
    results = []
    for _ in range(3):
        x = torch.randn(16, 32, generator=generator).requires_grad_()
        with around:
            y = DTensor.from_local(x, mesh, [Replicate()])
            for weight in weights:
                y = torch.nn.functional.gelu(y @ weight.t()).redistribute(mesh, [Replicate()])
            loss = y.to_local().square().mean()
        results += [loss.detach(), *torch.autograd.grad(loss, [x, *weights])]
        del y, loss
    return results


def sharded(model, layers, mesh):
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    return model


def fully_sharded_program(mesh, around):
    """Train a model of the zoo that is sharded."""

    def make(name, **options):
        model, inputs = zoo_make(name, **options)
        return sharded(model, model.layers, mesh), inputs

    zoo_make = zoo.make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "make", make)
        return zoo.train("transformer", around, order="FFBB")


@pytest.mark.parametrize("timing", TWO_TIMINGS)
@pytest.mark.parametrize("program", [distributed_program, fully_sharded_program])
def test_a_program_of_distributed_tensors_is_bitwise_the_same(mesh, program, timing):
    def numbers(around):
        results = program(mesh, around)
        return [r.to_local() if isinstance(r, DTensor) else r for r in results]

    expected = numbers(contextlib.nullcontext())
    offload = make_offload(timing, **TIGHT)
    assert_same(expected, numbers(offload))
    assert offload.end_step()
    assert offload.last_step.reloaded_bytes > 0
    assert_nothing_left(offload.manager)


@pytest.mark.parametrize("kind", ["distributed", "jagged", "odd", "parameter", "opted out"])
def test_what_marked_groups_leave_whole_is_counted(kind, mesh):
    full, weight = torch.randn(48, 48), nn.Parameter(torch.randn(48, 48))
    made = {
        "distributed": lambda: distribute_tensor(full, mesh, [Shard(0)]),
        "jagged": lambda: torch.nested.nested_tensor(list(full), layout=torch.jagged),
        "odd": lambda: full.clone().as_subclass(Odd),
        "parameter": lambda: distribute_tensor(weight, mesh, [Shard(0)]),
        "opted out": lambda: distribute_tensor(full, mesh, [Shard(0)]),
    }[kind]()
    if kind == "parameter":
        made = nn.Parameter(made).view(-1)
    elif kind == "opted out":
        made._do_not_offload = True

    class Saves(nn.Module):
        def forward(self, x):
            return Keep.apply(Keep.apply(x, [], made), [], made)

    manager, model = make_manager(), nn.Sequential(Saves())
    with offload_modules(model, ["0"], manager=manager), manager.step():
        model(torch.ones(3, requires_grad=True)).sum().backward()
    (reasons,) = [group.kept_bytes_by_reason for group in manager.last_step.by_name.values()]
    if kind in ("parameter", "opted out"):
        assert not reasons
        return
    (reason,) = reasons
    assert ("made of other tensors" in reason) == (kind != "odd")
    assert full.nbytes <= reasons[reason] < full.nbytes + 1024
    assert manager.last_step.offloaded_bytes == 0


def test_tensors_of_torchao_are_reloaded_as_they_were():
    pytest.importorskip("torchao")
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, LinearMMConfig
    from torchao.quantization import to_nf4

    full = torch.randn(64, 64)

    def float8():
        data = full.to(torch.float8_e4m3fn)
        return Float8TrainingTensor(data, torch.tensor(2.0), torch.float32, LinearMMConfig())

    for make, read in (
        (float8, lambda x: (x._data.view(torch.uint8), x._scale)),
        (lambda: to_nf4(full, 64, 1), lambda x: (x.quantized_data, x.get_original_weight())),
    ):
        offload, expected = make_offload(**TIGHT), make()
        back = saved_and_back(offload, make)
        assert type(back) is type(expected)
        assert_same(read(expected), read(back))
        assert offload.last_step.offloaded_bytes > 0


def nested(layout, read):
    def run(model):
        rows = [torch.randn(length, 16) for length in range(1, 20)]
        return read(model(torch.nested.nested_tensor(rows, layout=layout)))

    return run


LAYOUTS = {
    "jagged rows": nested(torch.jagged, lambda rows: rows.values()),
    "rows": nested(torch.strided, lambda rows: rows.to_padded_tensor(0.0)),
    "sparse": lambda model: torch.sparse.mm(
        torch.ones(64, 64).to_sparse(), model(torch.ones(64, 16))
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", [{}, {"min_offload_size": 512}, {"checking": True}], ids=str)
def test_other_layouts_are_reloaded_as_they_were(layout, settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))

    def step(context):
        torch.manual_seed(1)
        with context:
            loss = LAYOUTS[layout](model).square().sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step(contextlib.nullcontext())
    offload = make_offload(**TIGHT, **settings)
    for _ in range(3):
        assert_same(expected, step(offload))
        assert offload.end_step()
    reasons = str(offload.last_step.by_name["activations"].kept_bytes_by_reason)
    kind = {"rows": "nested without torch.jagged", "sparse": "of the layout torch.sparse_coo"}
    assert kind.get(layout, "") in reasons


def test_a_model_without_memory_runs_as_ever():
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU()).to("meta")
    with make_offload(**TIGHT):
        loss = model(torch.empty(64, 16, device="meta")).sum()
    loss.backward()

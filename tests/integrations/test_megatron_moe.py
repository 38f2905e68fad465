"""The MoE dispatch step: Megatron's bits, none of its host waits, and gone without a trace.

Run with another megatron-core first on PYTHONPATH, the same tests hold for that one.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from processes import LATER, ROOT, path_to, run_python
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import token_dispatcher
from moe_programs import (
    MEGATRONS,
    form_of,
    megatrons,
    outcome,
    random_case,
    random_indices,
)

from megatron_offload.errors import IntegrationError
from megatron_offload.integrations import megatron_moe

DeepepManager = token_dispatcher._DeepepManager


@pytest.fixture(autouse=True)
def _uninstalled():
    megatron_moe.uninstall()
    yield
    megatron_moe.uninstall()


@pytest.mark.parametrize("repeats", [False, True], ids=["distinct", "repeated"])
def test_bits_and_strides_are_megatrons(repeats):
    for seed in range(300):
        arguments = random_case(random.Random(seed), repeats=repeats)
        expected = outcome(megatrons, *arguments)
        assert outcome(megatron_moe.indices_to_multihot, *arguments) == expected, f"seed {seed}"


@pytest.mark.parametrize("step", [megatrons, megatron_moe.indices_to_multihot])
def test_only_float32_is_taken(step):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises((RuntimeError, TypeError), match=r"dtypes match|float32"):
            step(torch.tensor([[0]]), torch.ones(1, 1, dtype=dtype), 2)


@pytest.mark.parametrize("step", [megatrons, megatron_moe.indices_to_multihot])
@pytest.mark.parametrize("index", [2, 3, -9])
def test_an_index_out_of_range_is_an_error(step, index):
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        step(torch.tensor([[0, index], [1, -1]]), torch.ones(2, 2), 2)


def use_twice(step):
    """Use the result twice, go back twice through the same graph, and through the gradient."""
    rng = random.Random(0)
    indices = random_indices(rng, 20, 3, 6, repeats=False)
    leaf = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    probs = leaf.exp()
    _, first = step(indices, probs, 6)
    _, second = step(indices, probs, 6)
    loss = (first * second).sum() + probs.square().sum() + first.sin().sum()
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (of_gradient,) = torch.autograd.grad(gradient.square().sum(), leaf)
    return [form_of(tensor.detach()) for tensor in (once, leaf.grad, gradient, of_gradient)]


def test_two_uses_two_backwards_and_second_derivatives_are_megatrons():
    assert use_twice(megatron_moe.indices_to_multihot) == use_twice(megatrons)


def test_only_the_indices_are_saved_and_any_hook_may_move_them():
    arguments = random_case(random.Random(5), repeats=False)
    packed = []

    def pack(tensor):
        packed.append(tensor.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        found = outcome(megatron_moe.indices_to_multihot, *arguments)
    assert found == outcome(megatrons, *arguments)
    assert len(packed) == 1
    assert torch.equal(packed[0], arguments[0])


TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class HostSyncs(TorchDispatchMode):
    """Notes each operation whose result, or its shape, the host of a GPU would wait for.

    Copies to the host are not seen: on a CPU there are none.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name
        if name in INDEXING:  # only a mask's hits have to be counted, for all that the tags say
            waits = any(index is not None and index.dtype is torch.bool for index in args[1])
        else:
            waits = not TAGS.isdisjoint(operation.tags)
        if waits:
            self.names.append(name)
        return operation(*args, **(kwargs or {}))


def waits(step):
    """Return what makes the host wait, in forward and in backward."""
    probs = torch.rand(4, 2, requires_grad=True)
    with HostSyncs() as in_forward:
        _, found = step(torch.tensor([[0, -1], [1, 2], [-1, -1], [2, 0]]), probs, 3)
    with HostSyncs() as in_backward:
        found.backward(torch.ones_like(found))
    return in_forward.names, in_backward.names


def test_megatrons_own_step_makes_the_host_wait_four_times_and_this_one_never():
    in_forward, in_backward = waits(megatrons)
    assert in_forward == ["aten::index", "aten::repeat_interleave", "aten::index"]
    assert in_backward == ["aten::index_put"]
    assert waits(megatron_moe.indices_to_multihot) == ([], [])


# In the place of Megatron's.


def test_installed_megatron_s_manager_takes_this_step(monkeypatch):
    indices, probs, num_experts, weights = random_case(random.Random(0), repeats=False)
    expected = outcome(megatrons, indices, probs, num_experts, weights)
    step = mock.Mock(wraps=megatron_moe.indices_to_multihot)
    monkeypatch.setattr(megatron_moe, "indices_to_multihot", step)

    def by_the_manager(indices, probs, num_experts):
        manager = SimpleNamespace(num_local_experts=num_experts)
        return DeepepManager._indices_to_multihot(manager, indices, probs)

    megatron_moe.install()
    step.reset_mock()  # it is tried first
    assert outcome(by_the_manager, indices, probs, num_experts, weights) == expected
    step.assert_called_once()


def test_uninstall_puts_back_what_was_found():
    before = dict(vars(DeepepManager))
    for _ in range(2):
        megatron_moe.install()
        assert DeepepManager._indices_to_multihot is not MEGATRONS
    for _ in range(2):
        megatron_moe.uninstall()
        assert dict(vars(DeepepManager)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda routing_map, probs: routing_map.something_new,
        lambda routing_map, probs: (routing_map, probs.double()),
        lambda routing_map, probs: (routing_map, probs.detach() + 0.0 * probs),
        lambda routing_map, probs: (~routing_map, probs),
    ],
    ids=["raises", "other type", "other gradient", "other map"],
)
def test_a_step_that_is_not_megatrons_known_one_is_refused(change, monkeypatch):
    def changed(self, indices, probs):
        return change(*MEGATRONS(self, indices, probs))

    monkeypatch.setattr(DeepepManager, "_indices_to_multihot", changed)
    with pytest.raises(IntegrationError, match=r"not the one that this replaces.*0\.16 to 0"):
        megatron_moe.install()
    assert DeepepManager._indices_to_multihot is changed


def test_a_megatron_core_without_the_step_is_named(monkeypatch):
    monkeypatch.setattr(sys.modules["megatron.core"], "__version__", "0.11.0")
    monkeypatch.delattr(token_dispatcher, "_DeepepManager")
    with pytest.raises(IntegrationError, match=r"_DeepepManager.*0\.11\.0 is not.*0\.16 to 0\.19"):
        megatron_moe.install()


@pytest.mark.slow
def test_all_of_this_holds_for_the_later_megatron_core():
    if str(LATER) in token_dispatcher.__file__:
        pytest.skip("this is the later one")
    program = (
        "import sys, pytest, megatron.core\n"
        f"assert megatron.core.__file__.startswith({str(LATER)!r})\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {__file__!r}]))\n"
    )
    result = run_python("-W", "ignore", "-c", program, path=path_to("later"), cwd=ROOT)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "1 skipped" in result.stdout, "the later one left out more than this test"

"""Groups by module name, with no change to model code."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add, attrgetter, iadd

import pytest
import torch
import zoo
from programs import KIB, TWO_TIMINGS, assert_nothing_left, assert_same, make_manager
from test_compile import Model as WithNorms
from torch import nn

from megatron_offload.errors import ConfigError
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.memory.nested import tensors_in
from megatron_offload.model_map.module_hooks import expression_of


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, hidden, *, scale):
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        scores = torch.softmax(q @ k.transpose(-1, -2) * scale, dim=-1)
        return self.proj(scores @ v), None


class Mlp(zoo.Mlp):
    def forward(self, hidden):
        if hidden.isnan().any():
            self.linear_fc1(hidden)
            raise FloatingPointError
        return super().forward(hidden)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)
        self.mlp = Mlp(width)

    def forward(self, hidden):
        hidden = hidden + self.attention(hidden=hidden, scale=0.1)[0]
        return {"hidden": hidden + self.mlp(hidden), "extra": 3}


class Model(nn.Module):
    def __init__(self, width=16, layers=2):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)["hidden"]
        return x


def make_model():
    torch.manual_seed(0)
    return Model()


def gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad()
    for _ in range(2):
        model(torch.randn(2, 8, 16, generator=generator)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("timing", TWO_TIMINGS)
@pytest.mark.parametrize(
    "names",
    [
        ["mlp_fc1"],
        ["mlp_act"],
        ["mlp_fc2"],
        ["mlp_fc1", "mlp_act", "mlp_fc2"],
        ["mlp_act", "mlp_fc2", "mlp_fc1", "layers.*.attention"],
        ["layer"],
        ["layer", "mlp_act", "layers.*.attention.proj"],
        ["layers.0.mlp"],
        ["**.qkv", "embed*"],
        ["embed"],
    ],
    ids=",".join,
)
def test_gradients_are_those_of_the_untouched_model(names, timing):
    model = make_model()
    expected = gradients(model)
    manager = make_manager(timing)
    with offload_modules(model, names, manager=manager):
        for _ in range(3):
            assert_same(expected, gradients(model))
            manager.reset()
            assert manager.last_step.offloaded_bytes > 0
            assert_nothing_left(manager)
        assert set(manager.last_step.by_name) == set(names)
    assert_same(expected, gradients(model))
    assert not manager.transfers.stats.by_name, "removed hooks mark nothing"


def test_wrappers_are_looked_through_to_the_activation_of_a_dense_mlp():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.buffers = []  # as Megatron's data parallelism calls its gradient buffers

        def forward(self, x):
            return self.module(x)

    model, manager = make_model(), make_manager()
    expected = gradients(model)
    with offload_modules(Wrapper(Wrapper(model)), ["mlp_act"], manager=manager) as handle:
        assert handle.groups == {"mlp_act": ["layers.0.mlp", "layers.1.mlp"]}
        assert_same(expected, gradients(model))
        manager.reset()
    # What gelu saves: its input, one per layer and microbatch.
    assert manager.last_step.offloaded_bytes == 4 * (2 * 8 * 64 * 4)


@pytest.mark.parametrize("names", [["mlp_act"], ["layer", "mlp_fc1"]], ids=",".join)
def test_hooks_are_taken_off_the_stack_where_a_forward_raises(names):
    model, manager = make_model(), make_manager()
    expected = gradients(model)
    with offload_modules(model, names, manager=manager):
        with pytest.raises(FloatingPointError), manager.step():
            model(torch.full((2, 8, 16), torch.nan))
        assert not manager._packs
        assert_nothing_left(manager)
        assert_same(expected, gradients(model))
        manager.reset()


@dataclass
class State:
    hidden: torch.Tensor
    around: object = None

    def __post_init__(self):
        self.around = self


WRAPPED = {
    "a tensor": (lambda x: x, lambda x: x),
    "a dataclass": (State, attrgetter("hidden")),
    "nested tuples": (lambda x: (((None, x),),), lambda x: x[0][0][1]),
    "a mapping in a list": (lambda x: [type("Batch", (dict,), {})(x=x)], lambda x: x[0]["x"]),
}


@pytest.mark.parametrize(
    ("kind", "add_up"), [*((kind, add) for kind in WRAPPED), ("a tensor", iadd)]
)
def test_reloads_begin_ahead_whatever_a_module_returns(kind, add_up):
    wrap, unwrap = WRAPPED[kind]

    class Inner(Mlp):
        def forward(self, given):
            return wrap(super().forward(unwrap(given)))

    torch.manual_seed(0)
    model, data = nn.ModuleList(Inner(16) for _ in range(8)), torch.randn(2, 8, 16)

    def step():
        model.zero_grad()
        x = data
        for inner in model:  # what it returns is a view
            x = add_up(unwrap(inner(wrap(x))), x)
        x.square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step()
    for settings in ({}, {"fraction": 0.5, "prefetch_bytes": 32 * KIB}):  # first all is offloaded
        manager = make_manager(**settings)
        with offload_modules(model, "*", manager=manager):
            for _ in range(3):
                with manager.step():
                    assert_same(expected, step())
        stats = manager.last_step
        assert stats.offloaded_bytes > 0
        assert stats.num_groups == len(manager.learner.profile.backward_order) == 8
    assert stats.num_late_reloads == 0
    assert "the fraction that may be offloaded is 0.5" in stats.by_name["*"].kept_bytes_by_reason


@pytest.mark.parametrize(("pattern", "found", "others"), [
    ("layers.*.mlp", ["layers.0.mlp"], ["layers.0.x.mlp"]),
    ("layers.**.mlp", ["layers.0.x.mlp"], []),
    ("layers.**", ["layers.0.x.mlp"], []),
    ("**.mlp", ["mlp", "a.b.mlp"], ["a.b.mlps"]),
    ("a?c.*", ["abc.d"], []),
    ("a.c", [], ["abc"]),
    ("layers.0-11.mlp", ["layers.9.mlp"], ["layers.12.mlp"]),
    ("**.9-11", ["h.10"], []),
    ("a.b-c.1-2x", ["a.b-c.1-2x"], []),
])  # fmt: skip
def test_patterns_over_dotted_names(pattern, found, others):
    assert [x for x in (*found, *others) if expression_of(pattern).fullmatch(x)] == found


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("again.*", ["again.0", "again.1"]),
        ("thrice.*", ["thrice.0"]),
        ("again.1.**.linear_fc2", ["again.1.mlp.linear_fc2"]),
        ("**.mlp", ["layers.0.mlp", "layers.1.mlp"]),
    ],
)
def test_modules_are_found_by_each_of_their_names_and_marked_once(name, groups):
    model, manager = make_model(), make_manager()
    model.again, model.thrice = model.layers, nn.ModuleList([model.layers[0]] * 3)
    model.layers[0].around = nn.ModuleList([model.layers])
    expected = gradients(model)
    with offload_modules(model, name, manager=manager) as handle, manager.step():
        assert handle.groups == {name: groups}
        assert_same(expected, gradients(model))
    assert manager.last_step.num_groups == 2 * len(groups)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "was given no names"),
        (["layers.0.atention*x"], "did you mean 'layers.0.attention'"),
        (["mlp_actt"], "did you mean 'mlp_act'"),
        (["mlp_acts"], "did you mean 'mlp_act'"),
        (["embedd"], "did you mean 'embed'"),
        (["layr"], "did you mean 'layer'"),
        (["layers.*.mpl"], r"did you mean 'layers\.\*\.mlp'"),
        (["mlp_fc1", "nothing.*"], "no module matches 'nothing"),
        (["layers"], r"'layers' holds modules .*; 'layers\.\*' names each"),
        (["core_attn"], r"TransformerConfig\.offload_modules"),
    ],
)
def test_names_that_mark_nothing_are_refused_and_leave_no_hooks(names, said):
    model = make_model()
    with pytest.raises(ConfigError, match=said):
        offload_modules(model, names, manager=make_manager())
    with pytest.raises(ConfigError, match="given as a str"):
        offload_modules(names or "mlp", model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_name_of_a_group_that_the_model_lacks_may_be_a_child_s():
    model = nn.Sequential(nn.Linear(8, 8))
    model.again = nn.ModuleList(model)
    with pytest.raises(ConfigError, match=r"matches 'mlp_fc1'; valid names are 0, again\.0$"):
        offload_modules(model, ["mlp_fc1"], manager=make_manager())
    names = ["router", "core_attn"]
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.GELU()) for name in names})
    handle = offload_modules(model, names, manager=make_manager())
    assert handle.groups == {name: [name] for name in names}


@pytest.mark.parametrize("other_manager", [False, True])
def test_modules_that_are_marked_again_are_groups_of_the_last_call_alone(other_manager):
    names = ["mlp_act", "layers.*.attention"]
    model, manager = make_model(), make_manager()
    expected = gradients(model)
    first = offload_modules(model, names, manager=manager)
    assert_same(expected, gradients(model))
    manager.reset()
    once = manager.last_step
    last = make_manager() if other_manager else manager
    second = offload_modules(model, names, manager=last)
    for _ in range(2):
        assert_same(expected, gradients(model))
        last.reset()
        assert last.last_step.num_groups == once.num_groups
        assert last.last_step.offloaded_bytes == once.offloaded_bytes
        if other_manager:
            manager.reset()
            assert manager.last_step.num_groups == 0
        first.remove()  # takes nothing of the second's
    second.remove()
    gradients(model)
    last.reset()
    assert last.last_step.num_groups == 0


def test_hooks_that_a_watched_forward_has_set_go_with_the_others():
    model = WithNorms()
    manager = make_manager(rows=[{"site": "norm", "recompute": True}])
    with offload_modules(model, [], manager=manager), manager.step():
        model(torch.randn(8, 32)).sum().backward()
        assert model.layers[0].mlp.linear_fc1._forward_hooks, "where the norm's output is saved"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_call_that_fails_leaves_the_marks_of_an_earlier_one():
    model, manager = make_model(), make_manager()
    offload_modules(model, ["mlp_act"], manager=manager)
    with pytest.raises(ConfigError, match="no module matches"):
        offload_modules(model, ["mlp_act", "layers.*.nothing"], manager=manager)
    gradients(model)
    manager.reset()
    assert manager.last_step.by_name["mlp_act"].num_groups == 4


@dataclass
class Node:
    others: list = field(default_factory=list)

    @property
    def tensor(self):
        raise AssertionError("code of the program ran")


Node.__dataclass_fields__["tensor"] = Node.__dataclass_fields__["others"]


def test_what_holds_itself_is_looked_into_once_and_runs_no_code():
    nodes, x = [Node() for _ in range(30)], torch.ones(1)
    for node in nodes:
        node.others += [*nodes, {"x": x}]
    nodes.append(nodes)
    deep = [x + 1]
    for _ in range(5000):
        deep = [deep]
    assert [float(one) for one in tensors_in((nodes, deep, {"last": x + 2}))] == [1.0] * 30 + [2, 3]

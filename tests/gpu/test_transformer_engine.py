"""TransformerEngine's layers, in bf16 and FP8: exact, by parts, and never a weight.

Run it with ``NVTE_CPU_OFFLOAD_V1=1`` in the environment as well: nothing may change.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os

import pytest
import torch
from programs import assert_nothing_left
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.config import OffloadConfig
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.frontends.whole_model import OffloadActivations
from megatron_offload.integrations import transformer_engine as policy
from megatron_offload.memory.nested import inner_tensors
from megatron_offload.recompute import transformer_engine

# Read by TransformerEngine where it chooses attention's backward.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
te = pytest.importorskip("transformer_engine.pytorch", reason="no TransformerEngine")

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TOKENS, WIDTH, EXPERTS = 1024, 1024, 4
CONFIG = OffloadConfig(
    backend="cuda",
    host_slab_bytes=64 * MIB,
    host_memory_bytes=8 * 1024 * MIB,
    min_tensor_bytes=0,
    max_inflight_bytes=0,  # so that nothing is too near to be offloaded
    prefetch_bytes=0,
    policy={"kind": "modules"},  # and nothing is looked for
)


PRECISIONS = {
    "bf16": None,
    "fp8-delayed": ("DelayedScaling", "is_fp8_available"),
    "fp8-current": ("Float8CurrentScaling", "is_fp8_available"),
    "fp8-block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
}
"""By precision the recipe's name, and the function that says whether the device can."""


def recipe_of(precision):
    """Return the recipe of a precision; skips the test where the device can't."""
    from transformer_engine.common import recipe

    if precision == "bf16":
        return None
    kind, check = PRECISIONS[precision]
    if not hasattr(recipe, kind):
        pytest.skip(f"this TransformerEngine has no {precision}")
    result = getattr(te, check)()
    is_there, reason = result if isinstance(result, tuple) else (result, "")
    if not is_there:
        pytest.skip(f"{precision}: {reason}")
    return getattr(recipe, kind)()


def autocast(recipe):
    if recipe is None:
        return contextlib.nullcontext()
    enter = getattr(te, "autocast", None) or te.fp8_autocast
    key = "recipe" if enter is getattr(te, "autocast", None) else "fp8_recipe"
    return enter(enabled=True, **{key: recipe})


class Grouped(torch.nn.Module):
    """`te.GroupedLinear` with its split."""

    def __init__(self):
        super().__init__()
        self.linear = te.GroupedLinear(EXPERTS, WIDTH, WIDTH, params_dtype=torch.bfloat16)

    def forward(self, x, **options):
        split = [TOKENS // 4, TOKENS // 2, TOKENS // 8, TOKENS // 8]
        return self.linear(x, split, **options)


class FusedMlp(torch.nn.Module):
    """The operation fuser's MLP; caches nothing."""

    def __init__(self):
        super().__init__()
        self.operations = fused_mlp()

    def forward(self, x, is_first_microbatch=None):
        return self.operations(x)


def fused_mlp():
    options = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
    return te.ops.Sequential(
        te.ops.Linear(WIDTH, 8 * WIDTH, **options),
        te.ops.SwiGLU(),
        te.ops.Linear(4 * WIDTH, WIDTH, **options),
    )


class Attends(torch.nn.Module):
    """`te.TransformerLayer` on a sequence of 256, with dropout."""

    def __init__(self):
        super().__init__()
        self.layer = te.TransformerLayer(
            WIDTH,
            4 * WIDTH,
            8,
            hidden_dropout=0.1,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
            normalization="RMSNorm",
            activation="swiglu",
            self_attn_mask_type="causal",
            bias=False,
        )

    def forward(self, x, **options):
        return self.layer(x.view(256, -1, WIDTH), **options).view(TOKENS, WIDTH)


LAYERS = {
    "transformer": Attends,
    "linear": lambda: te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16),
    "layernorm-linear": lambda: te.LayerNormLinear(WIDTH, WIDTH, params_dtype=torch.bfloat16),
    "layernorm-mlp": lambda: te.LayerNormMLP(
        WIDTH, 4 * WIDTH, activation="swiglu", params_dtype=torch.bfloat16
    ),
    "grouped-linear": Grouped,
    "fused-mlp": FusedMlp,
}


def make_model(kind, num_layers=3):
    torch.manual_seed(1)
    return torch.nn.ModuleList(LAYERS[kind]() for _ in range(num_layers)).cuda()


def train(model, recipe, forward, *, num_steps=3, caches=True):
    """Take steps of two microbatches; return all outputs, and all gradients of every step."""
    seen = []
    for step in range(num_steps):
        torch.manual_seed(step)
        model.zero_grad()
        for microbatch in range(2):
            x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
            x.requires_grad_()
            options = {"is_first_microbatch": microbatch == 0} if caches else {}
            with autocast(recipe):
                y = forward(model, x * 1.0, options)  # else this function would keep x
            seen.append(y.detach().clone())
            (y.float().square().mean() * 1e3).backward()
            del y
            seen.append(x.grad)
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return seen


def plain(model, x, options):
    for layer in model:
        x = layer(x, **options)
    return x


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"{index} of {len(expected)}: {one.shape}"
        assert one.isfinite().all()


class Watch:
    """Which storages moved, and which hold weights or what was quantised of them."""

    def __init__(self, monkeypatch):
        self.moved, self.weights = [], []
        pack, mark = ChunkOffloadHandler.pack, transformer_engine.mark_not_offload

        def noted_pack(chunk, group, tensor):
            record = pack(chunk, group, tensor)
            if record.block is not None:
                self.moved.append(StorageWeakRef(tensor.untyped_storage()))
            return record

        def noted_mark(*tensors):
            mark(*tensors)
            self.add_weights(tensors)

        monkeypatch.setattr(ChunkOffloadHandler, "pack", noted_pack)
        monkeypatch.setattr(transformer_engine, "mark_not_offload", noted_mark)

    def add_weights(self, tensors):
        parts = inner_tensors(tensors)
        self.weights += [StorageWeakRef(part.untyped_storage()) for part in parts]

    def assert_no_weight_moved(self, model):
        # A reference keeps the identity of a storage from being used again, not its memory.
        self.add_weights(model.parameters())
        for module in model.modules():
            self.add_weights(getattr(module, "_fp8_workspaces", {}).values())
        assert self.moved
        assert not {ref.cdata for ref in self.moved} & {ref.cdata for ref in self.weights}


@functools.cache
def trained(kind, precision, caches=True):
    """Return what a model's steps give without offload."""
    model = make_model(kind)
    recipe = recipe_of(precision)
    expected = train(copy.deepcopy(model), recipe, plain, caches=caches)
    assert_same_bits(train(copy.deepcopy(model), recipe, plain, caches=caches), expected)
    return expected


CASES = [(kind, precision, True) for kind in LAYERS for precision in PRECISIONS]
# Between them these have every kind of weight.
CASES += itertools.product(("transformer", "grouped-linear"), [*PRECISIONS][1:], [False])


@pytest.mark.parametrize(("kind", "precision", "caches"), CASES)
def test_a_whole_model_keeps_its_bits_and_its_weights(kind, precision, caches, monkeypatch):
    recipe = recipe_of(precision)
    expected = trained(kind, precision, caches)
    watch = Watch(monkeypatch)
    model = make_model(kind)  # a copy's q, k and v weights don't lie together, and are joined anew
    # Tiny tensors that TransformerEngine keeps for all steps would move in the first alone.
    config = CONFIG.model_copy(update={"min_tensor_bytes": 1024})
    with contextlib.closing(OffloadActivations(config=config)) as offload:

        def offloaded(model, x, options):
            with offload:
                return plain(model, x, options)

        moved = []

        def counted(model, x, options):
            y = offloaded(model, x, options)
            moved.append(offload.last_step.offloaded_bytes)
            return y

        assert_same_bits(train(model, recipe, counted, caches=caches), expected)
        assert offload.end_step()
        assert_nothing_left(offload.manager)
        moved = [*moved[1:], offload.last_step.offloaded_bytes]
        assert len(set(moved)) == 1, "the first step moves what all others do"
        if kind == "linear" and recipe is None:
            assert moved[0] == 3 * TOKENS * WIDTH * 2
        if recipe is not None and kind != "fused-mlp":
            assert watch.weights
        assert offload.last_step.num_refused_blocks == 0
        watch.assert_no_weight_moved(model)


CHOICES = [(), ("fc1",), ("act",), ("fc2",), ("fc1", "act", "fc2")]


@pytest.mark.parametrize("precision", ["bf16", "fp8-delayed", "fp8-current"])
def test_each_operation_of_a_fused_mlp_moves_exactly_its_own(precision):
    recipe = recipe_of(precision)
    model = torch.nn.ModuleList([FusedMlp() for _ in range(2)])
    expected = train(copy.deepcopy(model), recipe, plain, caches=False)
    moved = {}
    try:
        for chosen in CHOICES:
            policy.reset_operation_groups()
            groups = policy.operation_groups(CONFIG)
            chooser = copy.deepcopy(model)
            for layer in chooser:
                names = dict(zip(("fc1", "act", "fc2"), layer.operations, strict=True))
                for name, operation in names.items():
                    policy.set_activation_offloading(operation, name in chosen)
            assert_same_bits(train(chooser, recipe, plain, caches=False), expected)
            groups.end_step_if_over()
            assert_nothing_left(groups.manager)
            moved[chosen] = groups.manager.last_step.offloaded_bytes
    finally:
        policy.reset_operation_groups()
        policy.uninstall()
    if recipe is None:
        unit = 2 * TOKENS * WIDTH * 2  # two layers, two bytes an element
        assert moved == dict(zip(CHOICES, (0, unit, 8 * unit, 4 * unit, 13 * unit), strict=True))
    else:
        assert moved[()] == 0
        assert all(moved[chosen] > 0 for chosen in CHOICES[1:])
        assert moved[CHOICES[-1]] == sum(moved[chosen] for chosen in CHOICES[1:4])

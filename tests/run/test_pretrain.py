"""`examples/megatron_pretrain.py` in Megatron-LM's own `pretrain`, on a CPU that stands for CUDA.

What it prints of every iteration and evaluation is the same without the launcher and through it.
`tests/no_cuda` says what is stood in for; the rest is Megatron-LM of the later megatron-core.
"""

from __future__ import annotations

import functools

import pytest
from pretrain_runs import MOVING, ON_CPU, SMALL, pretrain

from megatron_offload.cli import main as cli
from megatron_offload.cli.report import read_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = (*SMALL.split(), *ON_CPU.split())
MODULES = f"--offload-policy modules {MOVING}"

GATED = "--swiglu --disable-bias-linear"
MODELS = {
    "dense": "",
    "experts": f"{GATED} --num-experts 4 --moe-router-topk 2",
    "norms of queries and keys": "--qk-layernorm --offload-modules core_attn attn_proj",
    "more tokens": f"{GATED} --mtp-num-layers 1 --position-embedding-type rope",
    "layers recomputed": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}
FIVE = {"qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act"}
MOVED = {
    "dense": FIVE,
    "experts": {"qkv_linear", "core_attn", "attn_proj"},  # each expert is a dense MLP there
    "norms of queries and keys": {"core_attn", "attn_proj"},
    "more tokens": FIVE,
    "layers recomputed": {"layer_input"},
}


@functools.cache
def without(model):
    return pretrain(*FLAGS, *MODELS[model].split())


def check_same(printed, expected):
    assert printed.iterations == expected.iterations
    assert printed.evaluations == expected.evaluations
    assert "RerunMode.VALIDATE_RESULTS" in printed.text


def test_the_example_prints_what_is_compared():
    printed = without("dense")
    assert sorted(printed.iterations) == [1, 2, 3, 4]
    assert len({norm for _, norm in printed.iterations.values()}) == 4
    where = [place for place, _ in printed.evaluations]
    assert where == [
        *("iteration 2", "iteration 4"),
        *("iteration 4 on validation set", "iteration 4 on test set"),
    ]
    assert "megatron-offload" not in printed.text


@pytest.mark.parametrize("model", MODELS)
def test_the_launcher_changes_no_number_that_pretrain_prints(model):
    printed = pretrain(*FLAGS, *MODELS[model].split(), launched=MODULES)
    check_same(printed, without(model))
    assert printed.moved
    assert set(printed.moved) <= MOVED[model], "what backward needs at once stays"


def test_nothing_set_changes_no_number_either():
    longer = (*FLAGS, "--train-iters", "24", "--eval-interval", "12")
    printed = pretrain(*longer, launched="--offload-set min_tensor_bytes=0")
    check_same(printed, pretrain(*longer))
    assert "megatron-offload: a step of rank 0 offloads " in printed.text


def test_a_pipeline_is_resumed_with_the_launcher_where_it_was_saved(tmp_path):
    stages = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    flags = (*FLAGS, "--num-layers", "4", *stages.split())
    save = ("--save", tmp_path / "saved", "--save-interval", "2")
    report = f"{MODULES} --offload-report {tmp_path / 'report'}"
    expected = pretrain(*flags, ranks=2)
    printed = pretrain(*flags, *save, ranks=2, launched=report)
    check_same(printed, expected)
    assert set(printed.moved) == FIVE
    files = {"config.yaml", "run.json", "trace_0.json", "trace_1.json"}
    assert {path.name for path in (tmp_path / "report").iterdir()} == files
    assert cli.main(["trace", str(tmp_path / "report")]) == 0
    assert len(read_report(tmp_path / "report").traces) == 2

    load = ("--load", tmp_path / "saved", "--ckpt-step", "2")
    resumed = pretrain(*flags, *load, ranks=2, launched=MODULES)
    assert set(resumed.moved) == FIVE
    assert resumed.evaluations == [
        evaluation for evaluation in expected.evaluations if evaluation[0] != "iteration 2"
    ]
    assert sorted(resumed.iterations) == [3, 4]
    assert resumed.iterations[3] == expected.iterations[3]
    # For the second iteration after a start Megatron prints the mean loss of both.
    assert resumed.iterations[4][1] == expected.iterations[4][1]
    mean = sum(float(expected.iterations[number][0]) for number in (3, 4)) / 2
    assert abs(float(resumed.iterations[4][0]) - mean) < 2e-6


def test_megatron_s_own_fsdp_prints_the_same_with_the_launcher():
    pytest.importorskip("einops", reason="no einops, which Megatron's FSDP asks for")
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    more = "--use-distributed-optimizer --ckpt-format fsdp_dtensor --bf16"
    flags = (*FLAGS, *sharded.split(), *more.split())
    printed = pretrain(*flags, ranks=2, launched=MODULES)
    check_same(printed, pretrain(*flags, ranks=2))
    assert len(printed.iterations) == 4
    assert set(printed.moved) == FIVE

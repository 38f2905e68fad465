"""Megatron-LM's own `pretrain` on GPUs prints the same with the launcher, and reserves less."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

import pytest
from pretrain_runs import ROOT, free_port, pretrain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("megatron") is None or find_spec("megatron.training") is None,
        reason="no megatron.training, which later wheels of megatron-core bring",
    ),
]

FLAGS = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --train-iters 8 "
    "--lr 1e-4 --min-lr 1e-5 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --eval-interval 3 "
    "--eval-iters 1 --log-interval 1 --deterministic-mode --attention-backend fused"
)
GRAPH = "--cuda-graph-impl full_iteration --te-rng-tracker --no-check-for-nan-in-loss-and-grad"
SHARDED = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--use-distributed-optimizer --ckpt-format fsdp_dtensor"
)


def both(flags, ranks):
    """Return what is printed without the launcher, and through it."""
    env = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    words = (*FLAGS.split(), *flags.split())
    return [
        pretrain(*words, ranks=ranks, launched=launched, env=env)
        for launched in (None, "--offload-policy modules")
    ]


def reserved_gib(printed):
    """Return what each rank has reserved at most, in no order."""
    return sorted(map(float, re.findall(r"reserved at most: ([\d.]+) GiB", printed.text)))


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(GRAPH, 1, id="whole-step graph"),
        pytest.param(SHARDED, 2, id="Megatron's FSDP", marks=pytest.mark.two_gpus),
    ],
)
def test_what_is_printed_is_the_same_and_less_is_reserved(flags, ranks):
    expected, printed = both(flags, ranks)
    assert len(printed.iterations) == 8
    assert printed.iterations == expected.iterations
    assert len(printed.evaluations) == 4
    assert printed.evaluations == expected.evaluations
    assert max(reserved_gib(printed)) < max(reserved_gib(expected)) - 0.5
    for one in (printed, expected):
        assert ("Capture CUDA graph for training" in one.text) is (flags == GRAPH)

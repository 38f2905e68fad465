"""What GPUs of a described job send to each other, in the time of its step."""

from __future__ import annotations

import pytest

from megatron_offload.files.strict_model import validate
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.description import JobDescription
from megatron_offload.planning.model import ModelDescription
from megatron_offload.planning.parameters import weights_of
from megatron_offload.planning.simulate import simulate

MACHINE = Machine(gpus_per_node=8, nvlink_gbps=100, p2p_gbps=10, p2p_latency_us=5)
KB = 1000
SIZES = {"layers": 4, "hidden": 4096, "ffn": 8192, "heads": 32, "vocabulary": 1000}
SIZES |= {"sequence": 4096, "num_microbatches": 4, "peak_tflops": 989, "memory_gbps": 3350}
BLOCK_BYTES = 2 * 4096 * 4096


def job(nvlink_gbps=100, **changes):
    machine = MACHINE.model_dump(exclude_unset=True) | {"nvlink_gbps": nvlink_gbps}
    return validate(JobDescription, {"model": SIZES | changes, "machine": machine}, "job").job()


def more_us(name, **changes):
    """Return what messages add to a group's forward and backward."""
    slow, fast = (
        next(group for group in job(gbps, **changes).stages[0].groups if group.name == name)
        for gbps in (100, 1e12)
    )
    return slow.forward_us - fast.forward_us, slow.backward_us - fast.backward_us


def test_what_leaves_a_node_goes_over_the_network():
    assert MACHINE.ring_us(1, 1, KB) == MACHINE.all_to_all_us(1, KB) == 0
    assert MACHINE.ring_us(4, 1, 100 * KB) == pytest.approx(5 + 3 * 1)
    assert MACHINE.all_to_all_us(4, 100 * KB) == pytest.approx(5 + 3 / 4)
    # Of 16 GPUs eight a node share what leaves it; each copy of a token leaves by itself.
    assert MACHINE.ring_us(16, 1, 100 * KB) == pytest.approx(5 + 15 * 10 / 8)
    assert MACHINE.all_to_all_us(16, 160 * KB) == pytest.approx(5 + 8 * 1)
    assert MACHINE.ring_us(4, 8, 100 * KB) == pytest.approx(5 + 3 * 10)


def test_tensor_parallel_blocks_gather_before_and_scatter_behind():
    block_us = 3 * BLOCK_BYTES / 4 / 100e3
    for name in ("qkv_linear", "attn_proj", "mlp_fc1", "mlp_fc2", "head", "embedding"):
        assert more_us(name, tensor_parallel=4)[0] == pytest.approx(block_us), name
    assert more_us("attn_proj", tensor_parallel=4)[1] == pytest.approx(block_us)
    assert 0 <= more_us("mlp_fc1", tensor_parallel=4)[1] < 2 * block_us, "behind its products"


def test_keys_and_values_go_round_behind_attention():
    assert more_us("core_attn", context_parallel=2) == (0, 0)
    keys_us = 7 * 2 * BLOCK_BYTES / 8 / 100e3
    short = {"context_parallel": 8, "window_size": 1}
    more = more_us("core_attn", **short)
    fast = next(g for g in job(1e12, **short).stages[0].groups if g.name == "core_attn")
    assert more[0] == pytest.approx(5 + keys_us - fast.forward_us, abs=1e-3)
    assert more[1] == pytest.approx(2 * (5 + keys_us) - fast.backward_us, abs=1e-3)


def test_tokens_go_to_their_experts_and_back():
    keys = {"experts": 8, "experts_per_token": 2, "expert_ffn": 1024, "expert_parallel": 4}
    keys |= {"data_parallel": 4}
    us = 2 * 3 / 4 * 2 * BLOCK_BYTES / 100e3
    assert more_us("router", **keys) == pytest.approx((us, us))


def test_replicas_wait_for_what_no_pass_hides():
    def step_us(gbps=100, **changes):
        return simulate(job(gbps, data_parallel=8, **changes)).step_us

    bare_us = step_us(1e12)
    assert step_us() == pytest.approx(bare_us, abs=10), "behind a backward and a forward"
    weights = weights_of(validate(ModelDescription, SIZES, "model"), 0).number
    shown_us = step_us(overlap_grad_reduce=False) - bare_us
    assert shown_us == pytest.approx(7 / 8 * weights * (4 + 2) / 100e3, rel=0.01)
    shared = {"data_parallel_sharding_strategy": "optim_grads_params"}
    in_each_us = step_us(overlap_grad_reduce=False, **shared) - bare_us
    assert in_each_us == pytest.approx(4 * 7 / 8 * weights * (4 + 2 + 2) / 100e3, rel=0.01)
    whole = {"data_parallel_sharding_strategy": "no_shard"}
    summed_us = step_us(overlap_grad_reduce=False, **whole) - bare_us
    assert summed_us == pytest.approx(7 / 8 * weights * 2 * 4 / 100e3, rel=0.01)

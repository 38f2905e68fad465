"""torch.distributed.pipelining with offload: bitwise the same under every schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import found_by, torchrun
from programs import TWO_TIMINGS, assert_same, make_manager
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from megatron_offload.errors import IntegrationError
from megatron_offload.integrations.torch_pipelining import offload_pipeline

WORKER = Path(__file__).with_name("pipelining_worker.py")
SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
CASES = [f"{name}/{timing}" for name in SCHEDULES for timing in TWO_TIMINGS]


def run_worker(*words):
    return found_by(torchrun(2, WORKER, *words, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))


@pytest.fixture(scope="module")
def findings():
    return run_worker(*CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_the_same(findings, case):
    ranks = findings[case]
    assert len(ranks) == 2
    needed = ("same", "num_results", "gradients_are_real", "reloaded_bytes")
    assert all(rank[key] > 0 for rank in ranks for key in needed), ranks


@pytest.mark.slow
def test_a_learned_order_leaves_no_late_reload_where_backward_is_split():
    """Each layer's tensors are groups of their own here, and prefetched are two of the largest."""
    sizes = {"width": 256, "rows": 512, "layers": 1, "microbatches": 4, "prefetch": "8MiB"}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    found = run_worker("ScheduleZBVZeroBubble", *options)
    for rank in found["ScheduleZBVZeroBubble"]:
        assert rank["same"]
        assert rank["reloaded_bytes"] > 4 * 5 * 2**23
        assert rank["late_in_last_step"] == 0


@pytest.fixture
def schedule(one_rank):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    return ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, t: (y - t).square().mean())


def test_an_error_in_a_step_leaves_the_next_one_right(schedule):
    module = schedule._stage.submod
    x, target = torch.randn(4, 16), torch.randn(4, 16)
    schedule.step(x, target=target)
    expected = [p.grad.clone() for p in module.parameters()]
    manager = make_manager()
    with offload_pipeline(schedule, manager=manager) as offload:
        for broken in (module[2], module[0]):
            handle = broken.register_forward_pre_hook(lambda *_: 1 / 0)
            with handle, pytest.raises(RuntimeError, match="failed to run forward"):
                schedule.step(x, target=target)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert not any(manager.state_of().values())
            module.zero_grad()
            schedule.step(x, target=target)
            assert offload.last_step.offloaded_bytes > 0
            assert_same(expected, [parameter.grad for parameter in module.parameters()])


def test_groups_are_named_by_stage_and_evaluation_moves_nothing(schedule):
    x, target = torch.randn(4, 16), torch.randn(4, 16)
    with offload_pipeline(schedule, manager=make_manager()) as offload:
        assert offload.stages == [0]
        with torch.no_grad():
            schedule.eval(x, target=target)
        schedule.eval(x, target=target)  # with grad, and still no backward comes
        assert not offload.manager.decisions.groups()
        assert offload.last_step.num_groups == 0
        schedule.step(x, target=target)
        assert set(offload.last_step.by_name) == {"stage 0"}
        assert offload.last_step.by_name["stage 0"].num_groups >= 2
        keys = [group.key for group in offload.manager.learner.profile.groups]
        assert {key.chunk for key in keys} == {0, 1}, "one chunk for each microbatch"


def test_a_schedule_alone_is_wrapped_and_once(schedule):
    with pytest.raises(IntegrationError, match="got a Linear"):
        offload_pipeline(nn.Linear(2, 2))
    offload = offload_pipeline(schedule, manager=make_manager())
    with pytest.raises(IntegrationError, match="wrapped already"):
        offload_pipeline(schedule)
    offload.remove()
    offload.remove()
    with pytest.raises(ValueError, match="not both"):
        offload_pipeline(schedule, manager=make_manager(), config=make_manager().config)
    offload_pipeline(schedule, manager=make_manager()).remove()

"""A real machine: copies against plain ones, waits by line, and the command as a whole."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time

import pytest
import torch
from test_cuda import MIB, Layer, Remade, make_inputs, make_manager, make_model, run_step

from megatron_offload.backends.cuda import CudaBackend
from megatron_offload.machine.bandwidth import measure_copies
from megatron_offload.machine.examine import examine

pytestmark = pytest.mark.gpu


def plain_gbps(destination, source, num_copies=8):
    """Return what PyTorch alone reaches with copies one after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_copies + 1)]
    for event in events:
        event.record()
        destination.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    times_ms = [a.elapsed_time(b) for a, b in itertools.pairwise(events[1:])]  # one warms up
    return source.nbytes / statistics.median(times_ms) / 1e6


def test_measured_bandwidth_is_that_of_plain_copies():
    host = torch.empty(128 * MIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    measured, plain, seconds = [], [], []
    for _ in range(3):  # others on the machine may use its memory meanwhile: the best counts
        before = time.monotonic()
        measured += measure_copies([CudaBackend()])
        seconds.append(time.monotonic() - before)
        plain.append((plain_gbps(host, device), plain_gbps(device, host)))
    print(f"\n{measured}\nplain {plain}, {seconds} s")  # noqa: T201 - for whoever runs it with -s
    names = "d2h_gbps", "h2d_gbps", "both_d2h_gbps", "both_h2d_gbps"
    best = {name: max(getattr(one, name) for one in measured) for name in names}
    plain_d2h_gbps, plain_h2d_gbps = map(max, zip(*plain, strict=True))
    assert best["d2h_gbps"] == pytest.approx(plain_d2h_gbps, rel=0.2)
    assert best["h2d_gbps"] == pytest.approx(plain_h2d_gbps, rel=0.2)
    for both, alone in (("both_d2h_gbps", "d2h_gbps"), ("both_h2d_gbps", "h2d_gbps")):
        assert 0.2 < best[both] / best[alone] < 1.1
    assert min(seconds) < 10


def test_devices_are_named_without_a_context_on_any():
    program = (
        "import torch\n"
        "from megatron_offload.backends import visible_devices\n"
        "indexes = range(len(visible_devices()))\n"
        "assert not any(torch._C._cuda_hasPrimaryContext(index) for index in indexes)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_machine_is_examined_in_another_process():
    allocated_bytes = torch.cuda.memory_allocated()
    before = time.monotonic()
    examination = examine()
    print(f"\n{time.monotonic() - before:.1f} s")  # noqa: T201 - for whoever runs it with -s
    for finding in examination.findings:
        print(finding)  # noqa: T201 - for whoever runs it with -s
    assert len(examination.profile.gpus) == torch.cuda.device_count()
    assert "error" not in {finding.level for finding in examination.findings}
    assert torch.cuda.memory_allocated() == allocated_bytes


@pytest.mark.parametrize("kind", [Layer, Remade])
def test_an_offloaded_step_never_makes_the_host_wait(kind, monkeypatch):
    model = make_model(kind=kind)
    inputs = make_inputs(model)
    manager = make_manager(max_inflight_bytes=None, prefetch_bytes=None)
    for _ in range(3):
        run_step(model, manager, inputs)
    torch.cuda.synchronize()
    for owner in (torch.cuda, torch.cuda.Event):  # which PyTorch doesn't warn of
        monkeypatch.setattr(owner, "synchronize", lambda *_: pytest.fail("the host waits"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run_step(model, manager, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert manager.last_step.reloaded_bytes > 0
    assert (manager.last_step.recomputed_bytes > 0) == (kind is Remade)
    monkeypatch.undo()
    manager.close()

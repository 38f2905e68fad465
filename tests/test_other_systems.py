"""Without the calls that Linux and macOS have and Windows lacks, all but Megatron's doors work."""

from __future__ import annotations

from processes import run_python

PROGRAM = """
import mmap, os, pkgutil, signal, sys
from contextlib import nullcontext
from importlib import import_module
from unittest import mock

import pydantic_settings, rich.console, torch.distributed, torch.multiprocessing, transformers

for name in ("fcntl", "resource", "pwd", "grp", "termios", "posix"):
    sys.modules[name] = None
for module, names in {
    os: "sched_getaffinity sched_setaffinity sysconf fork killpg getuid setsid uname",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGALRM",
    mmap: "MADV_HUGEPAGE MAP_PRIVATE MAP_ANONYMOUS",
}.items():
    for name in names.split():
        delattr(module, name)
sys.platform = "win32"

import megatron_offload

for found in pkgutil.walk_packages(megatron_offload.__path__, "megatron_offload."):
    if not found.name.endswith(("__main__", ".auto", "train.loop", "train.model")):
        import_module(found.name)

from megatron_offload import OffloadActivations, OffloadConfig
from megatron_offload.cli.main import main
from megatron_offload.train import config, launch


def gradients(context):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with context:
        loss = model(torch.ones(512, 64)).sin().sum()
    loss.backward()
    return [x.grad for x in model.parameters()]


offload = OffloadActivations(
    config=OffloadConfig(policy="modules", max_inflight_bytes=0, prefetch_bytes=0)
)
assert all(map(torch.equal, gradients(nullcontext()), gradients(offload)))
offload.save_report(sys.argv[1])
assert offload.last_step.offloaded_bytes > 0
assert main(["plan", "llama3_8b"]) in (0, 1)
assert main(["report", sys.argv[1]]) == 0
with mock.patch("torch.multiprocessing.spawn") as spawn:
    spawn.return_value.processes = ()
    launch._start_ranks([("", config.TrainConfig())], "cpu", None)
launch._rank_main(0, True, None, {}, ())  # which has no parent, and ends
"""


def test_on_windows_a_model_keeps_its_bits_and_commands_answer(tmp_path):
    done = run_python("-W", "ignore", "-c", PROGRAM, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "report.html").exists()

"""Whatever ends a run of two processes, the next one goes on from its last whole checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_runs import environment, numbers, run, stored, whole, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="counts on two CPU processes"),
]

STEPS = 8
FAILING = str(Path(__file__).with_name("failing_rank.py"))
COMMAND = ("-m", "megatron_offload.cli.main")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed")
    status, err = run(words(output, f"run.steps={STEPS}", f"run.checkpoint_interval={STEPS}"))
    assert status == 0, err
    return output


def is_the_same(output, undisturbed):
    """Check losses, norms and gradients of all steps, and all that the last checkpoint holds."""
    assert numbers(output) == numbers(undisturbed)
    assert stored(output, STEPS) == stored(undisturbed, STEPS)


def failure(seed):
    """Choose who dies, and when."""
    chosen = random.Random(80 + seed)  # so the first three differ in rank and checkpoints too
    moment = ("step", "save", "call")[seed % 3]
    rank = chosen.randrange(2)
    most = {"step": 6, "save": 2, "call": 40 if rank == 0 else 3}[moment]
    found = {"rank": rank, "moment": moment, "count": chosen.randint(1, most)}
    found["delay"] = chosen.uniform(0, 0.06)
    return found, f"run.checkpoint_interval={chosen.randint(1, 3)}", chosen.random() < 0.5


def test_after_a_kill_the_run_goes_on_from_the_last_whole_checkpoint(
    fault_seed, undisturbed, tmp_path
):
    found, interval, by_torchrun = failure(fault_seed)
    print(f"seed {fault_seed}: {found} {interval}", end=" ")  # noqa: T201 - says what to run again
    settings, failing = (interval, f"run.steps={STEPS}"), {"FAILURE": json.dumps(found)}
    if by_torchrun:
        program = (*TORCHRUN, "--max-restarts", "1", FAILING)
        status, err = run(words(tmp_path, *settings, resume=True), program=program, **failing)
        _, before, again = re.split("train: (?=resumed|no checkpoint)", err)
        assert "exitcode: -9" in before
    else:
        status, before = run(words(tmp_path, *settings), program=(FAILING,), **failing)
        assert status == 1, before
        assert "SIGKILL" in before.partition("a rank failed")[2]
        left = whole(tmp_path)
        status, again = run(words(tmp_path, *settings, resume=True))
        assert not left or f"going on after step {left[-1]}" in again
    assert status == 0, before + again
    saved = [int(step) for step in re.findall(r"saved .*step_(\d+)", before)]
    first = re.search(r"going on after step (\d+)", again)
    first = int(first[1]) if first else 0
    assert first >= max(saved, default=0), "a checkpoint that was whole is lost"
    print(f"went on after step {first}")  # noqa: T201
    is_the_same(tmp_path, undisturbed)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step_{step:06d}" for step in whole(tmp_path)}, "nothing half is left"


def for_long(output):
    """Return the command line of a run that a test has to end."""
    return words(output, *(f"run.{key}=100000" for key in ("steps", "checkpoint_interval")))


@contextlib.contextmanager
def started(program, arguments, is_ready):
    """Start a command that trains for long; yields it once ``is_ready(process id)``."""
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not is_ready(process.pid):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def two_steps_done(output):
    log = output / "steps.jsonl"
    return lambda _: log.exists() and log.read_bytes().count(b"\n") >= 2


def ranks_of(launcher):
    """Return the process ids of a launcher's ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def terminate_one_rank(launcher):
    os.kill(ranks_of(launcher)[1], signal.SIGTERM)


def control_c(launcher):
    os.killpg(launcher, signal.SIGINT)  # a terminal tells all processes


@pytest.mark.parametrize(("send", "status"), [(terminate_one_rank, 143), (control_c, 130)])
def test_a_signal_lets_all_ranks_save_the_same_step(send, status, tmp_path):
    with started(COMMAND, for_long(tmp_path), two_steps_done(tmp_path)) as process:
        send(process.pid)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    (step,) = whole(tmp_path)
    assert f"stopping after step {step}" in err
    assert f"--resume goes on from {tmp_path}/checkpoints/step_{step:06d}" in err
    assert max(numbers(tmp_path)) == step


def test_control_c_while_ranks_start_ends_with_one_line(tmp_path):
    with started(COMMAND, for_long(tmp_path), ranks_of) as process:
        control_c(process.pid)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1].startswith("megatron-offload: stopped by SIGINT")


def test_ranks_end_after_their_step_when_the_launcher_is_killed(tmp_path):
    with started(COMMAND, for_long(tmp_path), two_steps_done(tmp_path)) as process:
        process.kill()
        _, err = process.communicate(timeout=30)  # a pipe ends with the last that may write to it
    (step,) = whole(tmp_path)
    assert f"stopping after step {step}" in err


@pytest.mark.parametrize("delay", [0, 1.5])
def test_ranks_end_when_the_launcher_is_killed_while_they_start(delay, tmp_path):
    with started(COMMAND, for_long(tmp_path), ranks_of) as process:
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)


def test_sigterm_to_torchrun_saves_a_checkpoint(tmp_path):
    with started((*TORCHRUN, *COMMAND), for_long(tmp_path), two_steps_done(tmp_path)) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    (step,) = whole(tmp_path)
    assert f"stopping after step {step}" in err


def test_a_rank_that_fails_ends_the_others_and_its_error_is_shown(tmp_path):
    found = {"rank": 1, "moment": "raise", "count": 2}
    status, err = run(words(tmp_path), program=(FAILING,), FAILURE=json.dumps(found))
    assert status == 1
    shown = err.partition("a rank failed")[2]
    assert "RuntimeError: broken on purpose" in shown
    assert "rank      : 1" in shown

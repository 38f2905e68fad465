"""Whatever ends a run of two processes, all of them end, and why is said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_runs import environment, numbers, run, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="counts on two CPU processes"),
]

FAILING = str(Path(__file__).with_name("failing_rank.py"))
COMMAND = ("-m", "megatron_offload")


def for_long(output):
    """Return the command line of a run that a test has to end."""
    return words(output, "run.steps=100000")


@contextlib.contextmanager
def started(program, arguments, is_ready, ignored=()):
    """Start a command that trains for long; yields it once ``is_ready(process id)``.

    It ignores signals as in the background of a script, or under nohup.
    """

    def ignore():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
        preexec_fn=ignore,
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


def steps_done(output):
    log = output / "steps.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def two_steps_done(output):
    return lambda _: steps_done(output) >= 2


def ranks_of(launcher):
    """Return the process ids of a launcher's ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def ranks_that_import_torch(launcher):
    """Return those of them that are that far."""
    found = []
    for rank in ranks_of(launcher):
        with contextlib.suppress(OSError):
            if "libtorch" in Path(f"/proc/{rank}/maps").read_text():
                found.append(rank)
    return found


def terminate_one_rank(launcher):
    os.kill(ranks_of(launcher)[1], signal.SIGTERM)


def terminate(launcher):
    os.kill(launcher, signal.SIGTERM)


def control_c(launcher):
    os.killpg(launcher, signal.SIGINT)  # a terminal tells all processes


@pytest.mark.parametrize(
    ("send", "status", "words"),
    [
        (
            terminate_one_rank,
            1,
            "megatron-offload: a rank failed: process 1 terminated with signal",
        ),
        (terminate, 143, "megatron-offload: stopped by SIGTERM"),
        (control_c, 130, "megatron-offload: interrupted"),
    ],
)
def test_a_signal_ends_all_ranks_with_at_most_one_line(send, status, words, tmp_path):
    with started(COMMAND, for_long(tmp_path), two_steps_done(tmp_path)) as process:
        send(process.pid)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert err.strip().splitlines()[-1].startswith(words)
    assert max(numbers(tmp_path)) >= 2


def test_signals_that_a_script_ignores_end_no_rank_and_its_end_does(tmp_path):
    ignored = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
    with started(COMMAND, for_long(tmp_path), two_steps_done(tmp_path), ignored) as process:
        for number in ignored:
            os.killpg(process.pid, number)
        before, deadline = steps_done(tmp_path), time.monotonic() + 60
        while steps_done(tmp_path) < before + 3:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.communicate(timeout=30)  # see below


def test_control_c_while_ranks_start_ends_with_one_line(tmp_path):
    with started(COMMAND, for_long(tmp_path), ranks_that_import_torch) as process:
        control_c(process.pid)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip() == "megatron-offload: interrupted"


@pytest.mark.parametrize(("delay", "starts"), [(0, False), (0, True), (1.5, True)])
def test_ranks_end_when_the_launcher_is_killed_while_they_start_too(delay, starts, tmp_path):
    is_ready = ranks_of if starts else two_steps_done(tmp_path)
    with started(COMMAND, for_long(tmp_path), is_ready) as process:
        time.sleep(delay)
        process.kill()
        # A pipe ends with the last that may write to it.
        process.communicate(timeout=60 if starts else 30)


def run_failing(output, *settings, **failure):
    """Run ranks one of which fails as asked; return the status and the standard error."""
    return run(words(output, *settings), program=(FAILING,), FAILURE=json.dumps(failure))


def test_a_rank_that_fails_ends_the_others_and_its_error_is_shown(tmp_path):
    status, err = run_failing(tmp_path, rank=1, step=2, raises="RuntimeError")
    assert status == 1
    shown = err.partition("a rank failed")[2]
    assert "RuntimeError: broken on purpose" in shown
    assert "Process 1 terminated" in shown


@pytest.mark.parametrize(
    ("rank", "raises", "expected"), [(0, "ConfigError", 2), (1, "TargetError", 1)]
)
def test_what_one_rank_finds_wrong_with_the_input_ends_all_with_one_line(
    rank, raises, expected, tmp_path
):
    status, err = run_failing(tmp_path, rank=rank, step=2, raises=raises)
    assert status == expected, err
    assert err.splitlines()[-1] == "megatron-offload: broken on purpose"
    assert "Traceback" not in err


def test_a_rank_that_is_killed_ends_the_others_and_its_steps_remain(tmp_path):
    status, err = run_failing(tmp_path, rank=0, step=3, raises=None)
    assert status == 1, err
    assert "SIGKILL" in err.partition("a rank failed")[2]
    before = (tmp_path / "steps.jsonl").read_bytes()
    assert numbers(tmp_path).keys() == {1, 2}
    status, err = run(words(tmp_path))
    assert status == 2
    assert "holds an earlier run" in err
    assert (tmp_path / "steps.jsonl").read_bytes() == before

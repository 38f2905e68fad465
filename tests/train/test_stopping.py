"""Signals are collected, not obeyed, and only the second one kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker

import pytest

from megatron_offload.train.launch import (
    collected_signals,
    second_signal_kills,
)

RANK = (
    "import time; time.sleep({delay}); "
    "from megatron_offload.train.launch import end_with_parent; end_with_parent(); "
    "print('started', flush=True); time.sleep(60)"
)


def test_signals_are_collected_and_the_first_one_counts():
    found = signal.getsignal(signal.SIGTERM)
    with collected_signals() as signals:
        assert signals == []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals[0] == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is found


def test_the_second_signal_kills_children_and_the_first_does_not():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    with collected_signals(), second_signal_kills():
        os.kill(os.getpid(), signal.SIGTERM)
        child.join(0.2)
        assert child.is_alive()
        os.kill(os.getpid(), signal.SIGTERM)
        child.join(30)
    assert child.exitcode == -signal.SIGKILL


def test_a_child_that_is_interrupted_while_it_starts_ends_without_a_word(capfd):
    resource_tracker._resource_tracker._stop()  # as in a new process
    child = multiprocessing.get_context("spawn").Process(
        target=exec, args=(RANK.format(delay=0.6),)
    )
    with collected_signals() as signals, second_signal_kills():
        child.start()
        time.sleep(0.3)  # Python itself has started by then
        os.kill(child.pid, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        child.join(30)
        assert signals == [signal.SIGINT], "the parent is not deaf"
    assert child.exitcode == -signal.SIGINT
    assert capfd.readouterr().err == ""


@pytest.mark.timeout(30)
def test_a_child_does_not_outlive_its_parent():
    rank = RANK.format(delay=0)
    program = (
        "import multiprocessing, time\n"
        f"child = multiprocessing.get_context('spawn').Process(target=exec, args=({rank!r},))\n"
        "child.start(); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "started\n"
        parent.kill()
        # A pipe ends with the last process that may write to it.
        assert parent.stdout.read() == ""

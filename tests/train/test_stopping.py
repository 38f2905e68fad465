"""Signals are collected, not obeyed, and only the second one kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from megatron_offload.train.stopping import open_stop_signals, second_signal_kills


def test_signals_are_collected_and_the_first_one_counts():
    found = signal.getsignal(signal.SIGTERM)
    with open_stop_signals() as signals:
        assert signals.received == 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is found


def test_the_second_signal_kills_children_and_the_first_does_not():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    with open_stop_signals(), second_signal_kills():
        os.kill(os.getpid(), signal.SIGTERM)
        child.join(0.2)
        assert child.is_alive()
        os.kill(os.getpid(), signal.SIGTERM)
        child.join(30)
    assert child.exitcode == -signal.SIGKILL

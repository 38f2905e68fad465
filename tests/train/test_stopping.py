"""Signals are collected, not obeyed."""

from __future__ import annotations

import os
import signal

from megatron_offload.train.launch import collected_signals


def test_signals_are_collected_and_the_first_one_counts():
    found = signal.getsignal(signal.SIGTERM)
    with collected_signals() as signals:
        assert signals == []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals[0] == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is found

"""Errors and interrupts at a chosen position of a program."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import megatron_offload
from megatron_offload.backends.simulated import SimulatedBackend

PACKAGE = str(Path(megatron_offload.__file__).parent)
BACKEND_CALLS = ("record", "wait", "copy", "empty_device_like", "empty_host")


class InjectedError(Exception):
    """Not one that anything in the package handles."""


class RaiseInBackward(torch.autograd.Function):
    """The identity, with a backward that fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise InjectedError


class Trap:
    """Counts calls, and raises at the one whose number it is reported."""

    def __init__(self):
        self.num_calls = 0
        self.at = None
        self.after = False
        self.error = InjectedError

    def passed(self):
        self.num_calls += 1
        if self.num_calls - 1 == self.at:
            raise self.error

    def around(self, call, *, after=None):
        """Return a call that counts before or after it is made; by default as `after` says."""

        def trapped(*args, **kwargs):
            is_after = self.after if after is None else after
            if not is_after:
                self.passed()
            result = call(*args, **kwargs)
            if is_after:
                self.passed()
            return result

        return trapped

    def arm(self, at):
        self.num_calls, self.at = 0, at

    def disarm(self):
        self.at = None


@contextmanager
def broken_backend(backend, at, *, after=False):
    """Let one call of the backend raise, before or after its work; none of a finalizer's."""
    trap = Trap()
    trap.at, trap.after = at, after

    def broken(call):
        def trapped(*args, **kwargs):
            is_final = is_in_finalizer(sys._getframe())  # from there no error comes out
            return (call if is_final else counted)(*args, **kwargs)

        counted = trap.around(call)
        return trapped

    for name in BACKEND_CALLS:
        setattr(backend, name, broken(getattr(backend, name)))
    try:
        yield
    finally:
        for name in BACKEND_CALLS:
            delattr(backend, name)


def lose_a_bit(monkeypatch, group=""):
    """Let a tensor of each reload lose a bit, of groups whose name begins so."""
    copy = SimulatedBackend.copy

    def copy_badly(self, pairs, stream, label):
        event = copy(self, pairs, stream, label)
        self.sync_copies()
        if stream is self.h2d_stream and label.startswith(group):
            pairs[-1][0].view(-1).view(torch.uint8)[3] ^= 1
        return event

    monkeypatch.setattr(SimulatedBackend, "copy", copy_badly)


class LineTrap(Trap):
    """Counts the lines that run in the engine and its pools, and interrupts at one of them."""

    def __init__(self):
        super().__init__()
        self.error = KeyboardInterrupt
        self.files = set()
        """Names of the files that it has seen lines of."""

    def arm(self, at):
        super().arm(at)
        sys.settrace(self)  # Python takes a trace function away that raises

    def disarm(self):
        sys.settrace(None)

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or not any(
            part in name for part in ("/core/", "/engine/", "/memory/", "/recompute/")
        ):
            return None
        if name.endswith("/guard.py"):
            # Tracing stops at a `with` a second time, between its body and the release of the
            # lock. Python itself takes no interrupt there.
            return None
        if frame.f_code.co_name in ("__del__", "bury", "abort", "abandon"):
            return (
                None  # Python swallows what a finalizer raises; a second interrupt is another day
            )
        self.files.add(Path(name).name)
        return self._in_line

    def _in_line(self, frame, event, argument):
        if event == "line" and not is_in_finalizer(frame):
            self.passed()
        return self._in_line


def is_in_finalizer(frame):
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "abort", "fail"):
            return True
        frame = frame.f_back
    return False


def check_every_position(trap, step, check, *, share, first=0, stride=1):
    """Let one step after the other fail, each at the next position, and check what follows it.

    Returns the number of positions.

    Args:
        trap: what counts them.
        step: says whether the step that it takes was interrupted.
        check: takes steps that are not, and looks at what they leave.
        share: of the positions that a step has at least, whatever was learned.
        first, stride: which of them are tried.
    """
    trap.disarm()
    check()
    trap.arm(None)
    assert not step()
    num_positions = trap.num_calls
    for position in range(first, num_positions, stride):
        trap.arm(position)
        if not step():
            # What is learned decides how many calls a step makes: this one had fewer.
            assert position >= trap.num_calls > share * num_positions
            break
        trap.disarm()
        check()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return num_positions

"""Runs the command line with one rank that fails at a moment that the environment names.

Started ranks import this file too, because it is their main module. ``FAILURE`` is JSON: the
``rank``, the ``moment`` and its ``count``:

- ``step``: ``delay`` seconds after the begin of that training step the rank is killed;
- ``save``: the same after the begin of that checkpoint;
- ``call``: just before that call within a checkpoint that makes, syncs, renames or removes a file;
- ``raise``: that step raises;
- ``term``: that step begins with a SIGTERM to the rank itself.

Only the first of several attempts fails.
"""

import json
import os
import signal
import sys
import threading

from megatron_offload.cli import main as cli
from megatron_offload.train.checkpoint import Checkpoints
from megatron_offload.train.loop import _Trainer

FAILURE = json.loads(os.environ["FAILURE"])
CALLS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")

_train_step, _save = _Trainer._train_step, Checkpoints.save
_left = dict.fromkeys(("step", "save", "call"), FAILURE["count"])
_saving = False


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def is_now(moment):
    """Count down one of the moments; return whether it is the one."""
    if int(os.environ["RANK"]) != FAILURE["rank"]:
        return False
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    _left[moment] -= 1
    return _left[moment] == 0


def train_step(self, *arguments):
    if is_now("step"):
        if FAILURE["moment"] == "raise":
            raise RuntimeError("broken on purpose")
        if FAILURE["moment"] == "step":
            threading.Timer(FAILURE["delay"], kill).start()
        if FAILURE["moment"] == "term":
            os.kill(os.getpid(), signal.SIGTERM)
    return _train_step(self, *arguments)


def save(self, *arguments):
    global _saving
    if is_now("save") and FAILURE["moment"] == "save":
        threading.Timer(FAILURE["delay"], kill).start()
    _saving = True
    try:
        return _save(self, *arguments)
    finally:
        _saving = False


def watched(function):
    def call(*arguments, **options):
        if _saving and FAILURE["moment"] == "call" and is_now("call"):
            kill()
        return function(*arguments, **options)

    return call


_Trainer._train_step, Checkpoints.save = train_step, save
for _name in CALLS:
    setattr(os, _name, watched(getattr(os, _name)))

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))

"""Runs the command line with one rank that fails at a step that the environment names.

Started ranks import this file too, because it is their main module. ``FAILURE`` is JSON: the
``rank``, the ``step``, and what it ``raises`` there; where that is nothing, it is killed.
"""

import json
import os
import signal
import sys

from megatron_offload import errors
from megatron_offload.cli import main as cli
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.train.loop import _Trainer

FAILURE = json.loads(os.environ["FAILURE"])

_train_step = _Trainer.train_step


def train_step(self, step, *arguments):
    if (rank_in(), step) == (FAILURE["rank"], FAILURE["step"]):
        if FAILURE["raises"] is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"RuntimeError": RuntimeError, **vars(errors)}[FAILURE["raises"]]("broken on purpose")
    return _train_step(self, step, *arguments)


_Trainer.train_step = train_step

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))

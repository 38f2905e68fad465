"""Runs that several files look at: a comparison of two processes, and one rank in this process."""

from __future__ import annotations

import pytest
from processes import ROOT, run_python
from training_runs import be_the_rank, words

from megatron_offload.cli import main as cli


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """A comparison in which all kinds of things happen, and what it printed; read-only."""
    folder = tmp_path_factory.mktemp("compared")
    output = folder / "run"
    for name in ("transformer_engine", "apex"):  # as where a GPU's libraries are installed
        (folder / f"{name}.py").write_text("raise RuntimeError('a GPU is needed')")
    settings = ("offload.fraction=0.5", "run.trace_step=3", "run.steps=4")
    command = ("-m", "megatron_offload", "compare", *words(output, *settings)[1:])
    done = run_python(*command, path=(ROOT, folder), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@pytest.fixture
def train(monkeypatch, request):
    """Train in this process, with the ``ONE_RANK`` settings of the test's file."""

    def train(output, *settings):
        with monkeypatch.context() as patch:
            be_the_rank(patch)
            assert cli.main(words(output, *request.module.ONE_RANK, *settings)) == 0

    return train

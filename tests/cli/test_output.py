"""Files go only where they can be, and work that takes long says so."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from megatron_offload.cli.options import progress, writing
from megatron_offload.errors import ConfigError


def test_folders_are_made_and_what_the_system_refuses_is_a_user_s_error(tmp_path):
    path = tmp_path / "a" / "b" / "c.json"
    with writing(path):
        path.write_text("x")
    assert path.read_text() == "x"
    with pytest.raises(ConfigError, match="can't write x: No space left"), writing(Path("x")):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_in_a_terminal_work_says_how_far_it_is(monkeypatch, is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress("planning") as say:
        say("target 1 of 3")
    assert ("planning: target 1 of 3" in stream.getvalue()) == is_terminal
    assert bool(stream.getvalue()) == is_terminal

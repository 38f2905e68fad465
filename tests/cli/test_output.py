"""Files go only where they can be, and work that takes long says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_offload.cli.options import writing
from megatron_offload.errors import ConfigError


def test_folders_are_made_and_what_the_system_refuses_is_a_user_s_error(tmp_path):
    path = tmp_path / "a" / "b" / "c.json"
    with writing(path):
        path.write_text("x")
    assert path.read_text() == "x"
    with pytest.raises(ConfigError, match="can't write x: No space left"), writing(Path("x")):
        raise OSError(28, "No space left on device")

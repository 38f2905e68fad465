"""Files go only where they can be."""

from __future__ import annotations

import pytest

from megatron_offload.commands.output import check_place, writing
from megatron_offload.errors import ConfigError


def test_a_file_needs_a_folder_that_exists(tmp_path):
    check_place("--x", None)
    check_place("--x", tmp_path / "new.json")
    for wrong in (tmp_path, tmp_path / "none" / "new.json"):
        with pytest.raises(ConfigError, match=r"--x .*: name a file in a folder that exists"):
            check_place("--x", wrong)


def test_what_the_system_refuses_is_a_user_s_error(tmp_path):
    with pytest.raises(ConfigError, match="can't write x: No space left"), writing("x"):
        raise OSError(28, "No space left on device")

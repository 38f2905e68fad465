"""A folder is one run's."""

from __future__ import annotations

import os

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.train.run_folder import check_output, locked


def leave_run(folder, steps):
    (folder / "steps.jsonl").write_text("{}\n" * steps)


def test_a_folder_is_locked_while_a_run_writes_into_it(tmp_path):
    folder = tmp_path / "a" / "b"
    with locked(folder):
        with pytest.raises(ConfigError, match="b: another run writes into it; wait"):
            with locked(folder):
                pass
        with locked(tmp_path / "a"):
            pass
    with locked(folder):
        pass


def test_a_folder_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written: Not a directory"):
        with locked(tmp_path / "file" / "run"):
            pass


REFUSED = "holds an earlier run .{}.; choose another"


def test_an_earlier_run_is_not_replaced_without_a_word(tmp_path):
    check_output(tmp_path)
    leave_run(tmp_path, 0)  # it failed before its first step
    check_output(tmp_path)
    leave_run(tmp_path, 4)
    for is_for_comparison in (False, True):
        with pytest.raises(ConfigError, match=REFUSED.format("steps.jsonl")):
            check_output(tmp_path, is_for_comparison=is_for_comparison)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_log_that_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "steps.jsonl")
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check_output(tmp_path)


@pytest.mark.parametrize(
    "name", ["compare.json", "with_offload/steps.jsonl", "without_offload/steps.jsonl"]
)
def test_a_comparison_replaces_another_and_a_run_does_not(tmp_path, name):
    check_output(tmp_path, is_for_comparison=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x\n")
    with pytest.raises(ConfigError, match=REFUSED.format(name)):
        check_output(tmp_path)
    check_output(tmp_path, is_for_comparison=True)

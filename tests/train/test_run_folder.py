"""A folder is one run's."""

from __future__ import annotations

import os

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.train.run_folder import check_output, locked


def leave_run(folder, steps):
    folder.mkdir(exist_ok=True)
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


def test_an_earlier_run_is_not_replaced_without_a_word(tmp_path):
    check_output(tmp_path)
    leave_run(tmp_path, 4)
    with pytest.raises(
        ConfigError, match=r"holds an earlier run \(steps\.jsonl\); choose another run"
    ):
        check_output(tmp_path)


def test_a_run_that_failed_before_its_first_step_is_no_run(tmp_path):
    leave_run(tmp_path, 0)
    assert (tmp_path / "steps.jsonl").exists()
    check_output(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_log_that_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "steps.jsonl")
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check_output(tmp_path)


@pytest.mark.parametrize("name", ["compare.json", "with_offload/steps.jsonl"])
def test_a_run_does_not_write_into_a_comparison(tmp_path, name):
    (tmp_path / "with_offload").mkdir()
    (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError, match=f"holds an earlier run .{name}.; choose another"):
        check_output(tmp_path)
    check_output(tmp_path, is_for_comparison=True)


def test_a_comparison_replaces_no_run(tmp_path):
    check_output(tmp_path, is_for_comparison=True)
    leave_run(tmp_path / "without_offload", 2)
    check_output(tmp_path, is_for_comparison=True)
    leave_run(tmp_path, 1)
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check_output(tmp_path, is_for_comparison=True)

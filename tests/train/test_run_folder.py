"""A folder is one run's; a checkpoint has its name only while it is whole."""

from __future__ import annotations

import os

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.train import run_folder
from megatron_offload.train.config import RunConfig, TrainConfig
from megatron_offload.train.records import RankStep, StepRecord, open_log, read_steps
from megatron_offload.train.run_folder import (
    CheckpointFolder,
    Manifest,
    check_comparison,
    check_output,
    deciding,
    locked,
    read_checkpoint,
)

STEP = RankStep(0, 0, 0, 1.0, 1.0, 0.5)


def leave_run(folder, steps):
    folder.mkdir(exist_ok=True)
    with open_log(folder) as log:
        for step in range(1, steps + 1):
            log.write(StepRecord.merge(step, 1e-3, 64, [STEP]).to_json() + "\n")


def check(folder, steps=4, *, is_resumed=False):
    run = {"output": folder, "steps": steps, "resume": is_resumed}
    check_output(validate(TrainConfig, {"run": run}, "test"), 1)


def test_a_folder_is_locked_while_a_run_writes_into_it(tmp_path):
    with locked([tmp_path / "a" / "b", tmp_path / "c"]):
        with pytest.raises(ConfigError, match="c: another run writes into it; wait"):
            with locked([tmp_path / "c"]):
                pass
        with locked([tmp_path / "a"]):
            pass
    with locked([tmp_path / "c"]):
        pass


def test_a_folder_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="can't be written: Not a directory"),
        locked([tmp_path / "file" / "run"]),
    ):
        pass


def test_an_earlier_run_is_not_replaced_without_a_word(tmp_path):
    check(tmp_path)
    leave_run(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"holds an earlier run; choose another run\.output"):
        check(tmp_path)
    with pytest.raises(ConfigError, match="4 steps are done, and no checkpoint to go on from"):
        check(tmp_path, is_resumed=True)
    check(tmp_path, steps=5, is_resumed=True)


def test_a_run_that_failed_before_its_first_step_is_no_run(tmp_path):
    leave_run(tmp_path, 0)
    assert (tmp_path / "steps.jsonl").exists()
    check(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_log_that_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "steps.jsonl")
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check(tmp_path)
    with pytest.raises(ConfigError, match="can't read"):
        check(tmp_path, is_resumed=True)


def test_a_new_log_takes_the_place_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "steps.jsonl")
    leave_run(tmp_path, 1)
    assert (tmp_path / "steps.jsonl").read_text().count("\n") == 1


def test_a_log_goes_on_behind_what_is_kept(tmp_path):
    leave_run(tmp_path, 2)
    line = (tmp_path / "steps.jsonl").read_text().splitlines(keepends=True)
    with open_log(tmp_path, read_steps(tmp_path, 1)) as log:
        log.write(StepRecord.merge(2, 1e-3, 64, [STEP]).to_json() + "\n")
    assert (tmp_path / "steps.jsonl").read_text() == "".join(line)


@pytest.mark.parametrize("name", ["compare.json", "with_offload/steps.jsonl"])
def test_a_run_does_not_write_into_a_comparison(tmp_path, name):
    (tmp_path / "with_offload").mkdir()
    (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError, match=r"holds a comparison; choose another run\.output"):
        check(tmp_path)
    check_comparison(tmp_path)


def test_a_comparison_replaces_no_run_and_no_checkpoint(tmp_path):
    check_comparison(tmp_path)
    leave_run(tmp_path / "without_offload", 2)
    check_comparison(tmp_path)
    (tmp_path / "with_offload/checkpoints/step_000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run \(.*step_000001\) and not a comparison"):
        check_comparison(tmp_path)
    leave_run(tmp_path, 1)
    (tmp_path / "with_offload/checkpoints/step_000001").rmdir()
    with pytest.raises(ConfigError, match=r"holds a run \(steps\.jsonl\) and not a comparison"):
        check_comparison(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path)


def write(folder, *steps, decides=None):
    for step in steps:
        (folder.begin(step) / "data").write_text(str(step))
        publish(folder, step, decides)


def publish(folder, step, decides=None):
    decides = decides or deciding(config(), 1)
    folder.publish(Manifest(format=7, step=step, decides=decides))


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def test_the_newest_of_those_that_are_published_counts(folder):
    assert folder.latest() is None
    (folder.begin(3) / "half").write_text("")
    assert list(folder.begin(3).iterdir()) == []
    (folder.part_of(3) / "data").write_text("3")
    assert folder.latest() is None
    publish(folder, 3)
    assert (folder.latest() / "data").read_text() == "3"
    write(folder, 9, 10, 1_000_000, 2)
    assert folder.latest() == folder.path_of(1_000_000)


def test_a_kill_while_pruning_leaves_no_half_checkpoint(folder, monkeypatch):
    write(folder, 1, 2)
    folder.begin(3)

    def killed(path, **_):
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(folder, 3)
    assert folder.latest() == folder.path_of(3)
    folder.clean()
    assert names(folder) == ["step_000002", "step_000003"]


def test_cleaning_removes_only_our_half_written_folders(folder):
    write(folder, 1)
    folder.begin(2)
    for name in ("notes", ".step_x.part", ".nfs01"):
        (folder.path / name).mkdir()
    folder.clean()
    assert names(folder) == [".nfs01", ".step_x.part", "notes", "step_000001"]


@pytest.mark.parametrize("name", ["step_10", "step_000010.bak", "step_0000010", "step_latest"])
def test_what_has_another_name_is_left_alone(folder, name):
    write(folder, 1, 2)
    (folder.path / name).mkdir()
    assert folder.latest() == folder.path_of(2)
    write(folder, 3)
    assert names(folder) == sorted(["step_000002", "step_000003", name])


def test_a_folder_without_permission_is_refused(folder, monkeypatch):
    write(folder, 1)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_folder.Path, "iterdir", denied)
    with pytest.raises(ConfigError, match="checkpoints: Permission denied"):
        folder.latest()


def config(**sections):
    return validate(TrainConfig, sections, "test")


@pytest.mark.parametrize(
    "now",
    [
        {"offload": {"enabled": True, "fraction": 0.5}},
        {"run": {"output": "elsewhere", "checkpoint_interval": 3, "resume": True}},
        {"run": {"trace_step": 4, "profile_step": 3}},
    ],
)
def test_what_does_not_change_a_bit_may_differ(folder, now):
    write(folder, 5)
    assert read_checkpoint(folder.path_of(5), deciding(config(**now), 1)).step == 5


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"model": {"layers": 8}}, {}, "model.layers was 8, this run has 4"),
        ({}, {"parallel": {"virtual": 2}}, "parallel.virtual was 1, this run has 2"),
        ({}, {"run": {"steps": 20}}, "run.steps was 10, this run has 20"),
        ({}, {"run": {"seed": 1}}, "run.seed was 1234"),
        ({}, {"data": {"microbatches": 2}}, "data.microbatches was 1"),
        ({}, {"schedule": {"lr": 2}}, "schedule.lr was 0.001"),
    ],
)
def test_what_changes_the_numbers_may_not_differ(folder, before, now, expected):
    write(folder, 5, decides=deciding(config(**before), 1))
    with pytest.raises(ConfigError, match=expected):
        read_checkpoint(folder.path_of(5), deciding(config(**now), 1))


def test_more_steps_extend_a_whole_run(folder):
    plain, longer = (deciding(config(run={"steps": steps}), 1) for steps in (10, 20))
    write(folder, 10, decides=plain)
    read_checkpoint(folder.path_of(10), plain)
    read_checkpoint(folder.path_of(10), longer)
    write(folder, 11, decides=longer)
    with pytest.raises(ConfigError, match=r"run\.steps was 20, this run has 10"):
        read_checkpoint(folder.path_of(11), plain)


def test_every_key_of_the_configuration_is_known_to_decide_or_not():
    decides, whole = deciding(config(), 1), config().model_dump(exclude={"offload"})
    keys = {f"{section}.{key}" for section, values in whole.items() for key in values}
    runs = set(RunConfig.model_fields) - {"seed", "steps"}
    assert decides.keys() - {"the number of ranks"} == keys - {
        *("parallel.ranks", "data.text"),
        *(f"run.{key}" for key in runs),
    }

"""Flags keep Megatron's names and win over the file; bad input is exit status 2."""

from types import SimpleNamespace

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.train import cli, train_command
from megatron_offload.train.compare import _variant


def config_of(*words):
    return train_command.read_config(cli._parser().parse_args(words))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {layers: 2, hidden: 32, heads: 2, sequence_length: 16}\n"
        f"run: {{steps: 2, output: {tmp_path / 'out'}}}\n"
        "offload: {modules: [mlp_act], fraction: 0.25}\n"
    )
    return path


def test_flags_win_over_the_file(file):
    config = config_of(
        "train",
        "--config",
        str(file),
        "--fine-grained-activation-offloading",
        "--offload-modules",
        "core_attn",
        "mlp_fc2",
        "--activation-offload-fraction",
        "0.5",
        "--min-offloaded-tensor-size",
        "7",
        "--set",
        "run.steps=5",
        "run.seed=9",
        "--set",
        "model.layers=4",
    )
    assert config.offload.enabled
    assert config.offload.modules == ("core_attn", "mlp_fc2")
    assert config.offload.fraction == 0.5
    assert config.offload.min_tensor_elements == 7
    assert (config.run.steps, config.run.seed, config.model.layers) == (5, 9, 4)


def test_without_flags_the_file_counts(file):
    config = config_of("train", "--config", str(file))
    assert config.offload.enabled
    assert config.offload.modules == ("mlp_act",)
    assert config.offload.fraction == 0.25


def test_settings_that_were_not_given_stay_unset(file):
    config = config_of("train", "--config", str(file))
    assert config.offload.model_fields_set == {"modules", "fraction"}


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "model.layrs=4"], "did you mean 'layers'"),
        (["--set", "nonsense"], "wants section.key=value"),
        (["--offload-modules", "core_atn"], "did you mean 'core_attn'"),
        (["--activation-offload-fraction", "2"], "offload.fraction"),
        (["--min-offloaded-tensor-size", "-1"], "offload.min_tensor_elements"),
        (["--set", "parallel.pipeline=3"], "at most 2 pipeline ranks"),
        (["--set", "run.output=/dev/null/run"], "run.output"),
        (["--set", "run.output=/proc/run"], "run.output"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_bad_input_is_status_2_and_starts_nothing(file, command, words, expected, capsys):
    assert cli.main([command, "--config", str(file), *words]) == 2
    assert expected in capsys.readouterr().err
    assert not (file.parent / "out").exists()


def test_a_config_error_is_a_config_error_for_python_too(file):
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        config_of("train", "--config", str(file), "--set", "run.stepps=1")


def test_resume_is_a_flag_of_train_alone(file, capsys):
    assert config_of("train", "--config", str(file), "--resume").run.resume
    assert not config_of("train", "--config", str(file)).run.resume
    with pytest.raises(SystemExit):
        config_of("compare", "--config", str(file), "--resume")
    assert "--resume" in capsys.readouterr().err


def test_compare_takes_whole_runs_whatever_the_file_says(file):
    words = ["--set", "run.resume=true", "run.checkpoint_interval=1", "run.max_restarts=2"]
    config = config_of("compare", "--config", str(file), *words)
    for folder in ("without_offload", "with_offload"):
        run = _variant(config, folder).run
        assert (run.resume, run.checkpoint_interval, run.max_restarts) == (False, 0, 0)


def test_a_folder_of_any_name_is_printed_as_it_is(file, tmp_path, monkeypatch, capsys):
    report = SimpleNamespace(peaks=list)
    monkeypatch.setattr("megatron_offload.train.launch.launch", lambda runs: [report])
    output = f'run.output="{tmp_path}/out/[/x]\\x1b[31m"'  # an escape, in YAML
    assert cli.main(["train", "--config", str(file), "--set", output]) == 0
    printed = capsys.readouterr().out
    assert r"/out/[/x]\x1b[31m/steps.jsonl" in printed
    assert "\x1b" not in printed
    with pytest.raises(SystemExit):
        cli.main(["train", "--\x1b[31m"])
    assert r"--\x1b[31m" in capsys.readouterr().err

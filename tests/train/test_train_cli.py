"""Flags keep Megatron's names and win over the file; bad input is exit status 2."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_offload.cli import main as cli
from megatron_offload.cli import train as train_command
from megatron_offload.cli.compare import _variant
from megatron_offload.train import launch
from megatron_offload.train.run_folder import main_folder


def config_of(*words):
    return train_command.read_config(cli.read_command(words)[1])


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
    words = "--fine-grained-activation-offloading --offload-modules core_attn mlp_fc2"
    words += " --activation-offload-fraction 0.5 --min-offloaded-tensor-size 7"
    words += " --set run.steps=5 run.seed=9 --set model.layers=4"
    config = config_of("train", "--config", str(file), *words.split())
    assert config.offload.enabled
    assert config.offload.modules == ("core_attn", "mlp_fc2")
    assert config.offload.fraction == 0.5
    assert config.offload.min_tensor_elements == 7
    assert (config.run.steps, config.run.seed, config.model.layers) == (5, 9, 4)


def test_a_row_for_more_tokens_than_a_microbatch_has_is_named(file, caplog):
    file.write_text(file.read_text().replace("modules: [mlp_act], fraction: 0.25", ""))
    for least, num_warnings in ((16, 0), (17, 1)):
        row = f"{{layers: 0, site: mlp, recompute: true, min_tokens: {least}}}"
        config_of("train", "--config", str(file), "--set", f"offload.rows=[{row}]")
        assert caplog.text.count("does nothing: a microbatch has 16 tokens") == num_warnings


def test_a_key_is_a_flag_too(file):
    # A policy may not be given beside it.
    file.write_text(file.read_text().replace(", fraction: 0.25", ""))
    words = ("--offload.min_tensor_bytes", "5", "--offload.modules", "mlp_act", "core_attn")
    more = ("--offload.policy.kind", "memory_target", "--offload.policy.memory_target", "3GiB")
    config = config_of("train", "--config", str(file), *words, *more, "--set", "run.steps=5")
    assert (config.offload.min_tensor_bytes, config.run.steps) == (5, 5)
    assert config.offload.modules == ("mlp_act", "core_attn")
    assert config.offload.policy.targets(2) == (3 * 2**30,) * 2
    assert config.offload.model_fields_set == {"modules", "min_tensor_bytes", "policy"}


@pytest.mark.parametrize(
    "words",
    [
        ("[{site: mlp, offload: 1}, {site: loss, by_rows: true}]",),
        ("{site: mlp, offload: 1}", "{site: loss, by_rows: true}"),
    ],
)
def test_rows_are_a_flag_as_a_run_says_them(words):
    config = config_of("train", "--offload.rows", *words)
    assert [row.site for row in config.offload.rows] == ["mlp", "loss"]
    assert config_of("train", "--offload.rows", "[]").offload.rows == ()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--min-offloaded-tensor-size", "-1"], ": --min-offloaded-tensor-size: input"),
        (["--set", "parallel.pipeline=3"], "set model.layers to a multiple of 3"),
        (["--set", "run.output=/dev/null/run"], "run.output"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--set", "data.indexed=tokens"], "unknown key --set data.indexed"),
        (["--set", "offload.modules=5"], ": --set offload.modules: a list is wanted, as in [a, b]"),
        (["--set", "offload.modules=[]"], "no name, so nothing would be offloaded"),
        (["--offload-modules", "layer_input"], "layer_input is for full recompute"),
        (["--set", "offload={rows: {site: layer_input, offload: all}}"], "layer_input is for"),
        (["--set", "run.output="], ": --set run.output has no value; give one, or leave the key"),
    ],
)
def test_bad_input_is_status_2_and_starts_nothing(file, words, expected, refused):
    error = refused("train", "--config", file, *words)
    assert expected in error
    assert "''" not in error.replace("(got '')", "")
    assert not (file.parent / "out").exists()


def test_a_folder_of_any_name_is_printed_as_it_is(file, tmp_path, monkeypatch, prints, refused):
    report = SimpleNamespace(by_rank=())
    monkeypatch.setattr("megatron_offload.train.launch.launch", lambda runs: nullcontext([report]))
    output = f'run.output="{tmp_path}/out/[/x]\\x1b[31m"'  # an escape, in YAML
    printed = prints("train", "--config", file, "--set", output)
    assert r"/out/[/x]\x1b[31m/steps.jsonl" in printed
    assert "\x1b" not in printed
    assert r"--\x1b[31m" in refused("train", "--\x1b[31m")


@pytest.mark.parametrize(
    "words",
    [
        ["--offload-modules", "mlp_act"],
        ["--activation-offload-fraction", "0.5"],
        ["--min-offloaded-tensor-size", "7"],
        ["--set", "offload.fraction=0.5"],
    ],
)
def test_a_word_about_offload_means_on_and_is_never_unheard(file, words, refused):
    assert config_of("train", "--config", str(file)).offload.enabled, "a section means on"
    plain = file.read_text().partition("offload:")[0]
    file.write_text(plain)
    assert not config_of("train", "--config", str(file)).offload.enabled
    assert config_of("train", "--config", str(file), *words).offload.enabled
    file.write_text(plain + "offload: {enabled: false}\n")
    assert "says offload.enabled: false" in refused("train", "--config", file, *words)
    words = [*words, "--fine-grained-activation-offloading"]
    assert config_of("train", "--config", str(file), *words).offload.enabled


def test_a_comparison_that_is_refused_leaves_the_run_as_it_was(file, refused):
    out = file.parent / "out"
    out.mkdir()
    (out / "steps.jsonl").write_text("{}\n")
    error = refused("compare", "--config", file, "--set", "run.device=cpu")
    assert "holds an earlier run" in error
    assert {path.name for path in out.iterdir()} <= {"steps.jsonl", ".lock"}
    assert main_folder(out) == out


def test_what_needs_offload_is_refused_without_and_compare_does_without(file, refused):
    words = ["--set", "offload.enabled=false", "run.trace_step=1"]
    error = refused("train", "--config", file, *words)
    assert "run.trace_step 1: without offload there are no groups" in error
    config = config_of("compare", "--config", str(file), *words)
    for folder, step in (("without_offload", 0), ("with_offload", 1)):
        assert _variant(config, folder).run.trace_step == step


def test_ranks_of_torchrun_are_refused(file, refused, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    error = refused("train", "--config", file, "--set", "run.device=cpu")
    assert "call it without torchrun" in error


@pytest.mark.parametrize(("device", "is_said"), [("auto", True), ("cpu", False)])
def test_a_machine_without_a_device_is_said_once(file, device, is_said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launch, "_start_ranks", lambda *_: None)
    monkeypatch.setattr(launch, "read_model", lambda *_: None)
    config = config_of("train", "--config", str(file), "--set", f"run.device={device}")
    with launch.launch([("train", config)]):
        pass
    assert capsys.readouterr().err.count("there is no CUDA device") == is_said

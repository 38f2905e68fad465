"""A resumed run is the undisturbed one, bit for bit; whatever else lies there is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import environment_of_one_rank, numbers, stored, whole, words

from megatron_offload.cli import main as cli
from megatron_offload.train import checkpoint, loop

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the bridges to a CPU are for machines without a CUDA device"
)

ONE_RANK = ("parallel.pipeline=1", "parallel.virtual=1", "run.steps=4")


@pytest.fixture
def train(monkeypatch, capfd):
    """Train as the only rank of torchrun, in this process; returns status and standard error."""

    def train(output, *settings, resume=False, **variables):
        with monkeypatch.context() as patch:
            for key, value in {**environment_of_one_rank(), **variables}.items():
                patch.setenv(key, value)
            capfd.readouterr()
            status = cli.main(words(output, *ONE_RANK, *settings, resume=resume))
        return status, capfd.readouterr().err

    return train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A whole run of four steps with a checkpoint after every second."""
    output = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment_of_one_rank().items():
            patch.setenv(key, value)
        assert cli.main(words(output, *ONE_RANK, "run.checkpoint_interval=2")) == 0
    return output


@pytest.fixture
def stopped(undisturbed, tmp_path):
    """The same run as if it had been killed in step 4, writing line 4."""
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output, symlinks=True)
    shutil.rmtree(output / "checkpoints" / "step_000004")
    lines = (output / "steps.jsonl").read_text().splitlines(keepends=True)
    (output / "steps.jsonl").write_text("".join(lines[:3]) + lines[3][:50])
    return output


@pytest.fixture
def folder(stopped):
    return stopped / "checkpoints" / "step_000002"


def test_going_on_gives_the_bits_of_the_undisturbed_run(train, undisturbed, stopped):
    status, err = train(stopped, "run.checkpoint_interval=2", resume=True)
    assert status == 0, err
    assert "going on after step 2" in err
    assert numbers(stopped) == numbers(undisturbed)
    found = stored(stopped, 4)
    assert found.keys() == {"rank_0.safetensors", "stage_0.safetensors"}
    assert found == stored(undisturbed, 4), "parameters, moments and random states"


def test_going_on_with_offload_gives_the_same_bits(train, undisturbed, stopped):
    settings = ("run.checkpoint_interval=2", "offload.enabled=true")
    status, err = train(stopped, *settings, resume=True)
    assert status == 0, err
    assert numbers(stopped) == numbers(undisturbed)
    assert stored(stopped, 4) == stored(undisturbed, 4)
    assert '"offloaded_bytes": 0' not in (stopped / "steps.jsonl").read_text().splitlines()[-1]


def test_a_lost_random_state_would_be_seen(train, undisturbed, stopped, monkeypatch):
    monkeypatch.setattr(checkpoint.RandomStates, "set", lambda *_: None)
    assert train(stopped, resume=True)[0] == 0
    assert numbers(stopped)[3] != numbers(undisturbed)[3]


def test_a_run_that_is_done_is_done_when_resumed(train, undisturbed, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    before = (output / "steps.jsonl").read_bytes()
    assert train(output, "run.checkpoint_interval=2", resume=True)[0] == 0
    assert (output / "steps.jsonl").read_bytes() == before
    os.unlink(output / "steps.jsonl")
    assert train(output, "run.checkpoint_interval=2", resume=True)[0] == 0


def test_without_a_checkpoint_the_first_step_comes_first(train, tmp_path):
    status, err = train(tmp_path, "run.steps=1", resume=True)
    assert status == 0
    assert "no checkpoint to resume from; starting with the first step" in err
    assert numbers(tmp_path).keys() == {1}
    assert not (tmp_path / "checkpoints").exists(), "none was asked for"


def test_a_fresh_run_does_not_replace_checkpoints(train, stopped):
    before = (stopped / "steps.jsonl").read_bytes()
    status, err = train(stopped)
    assert status == 2
    assert "holds checkpoints up to step_000002" in err
    assert "--resume" in err
    assert (stopped / "steps.jsonl").read_bytes() == before


def test_old_checkpoints_and_what_a_kill_left_are_removed(train, stopped):
    part = stopped / "checkpoints" / ".step_000003.part"
    part.mkdir()
    (part / "stage_0.safetensors").write_bytes(b"half")
    (stopped / "checkpoints" / "notes.txt").write_text("kept")
    assert train(stopped, "run.checkpoint_interval=1", resume=True)[0] == 0
    assert whole(stopped) == [3, 4]
    assert sorted(x.name for x in (stopped / "checkpoints").iterdir()) == [
        "notes.txt",
        "step_000003",
        "step_000004",
    ]


def test_sigterm_ends_the_run_after_the_step_with_a_checkpoint(
    train, undisturbed, tmp_path, monkeypatch
):
    original = loop._Trainer._pass_over_microbatches

    def interrupted(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Trainer, "_pass_over_microbatches", interrupted)
        with pytest.raises(SystemExit) as stop:
            train(tmp_path, "run.checkpoint_interval=100")
    assert stop.value.code == 143
    assert whole(tmp_path) == [2]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train(tmp_path, "run.checkpoint_interval=100", resume=True)[0] == 0
    assert numbers(tmp_path) == numbers(undisturbed)
    assert stored(tmp_path, 4) == stored(undisturbed, 4)


def test_sigint_without_checkpoints_ends_the_run_after_the_step(train, tmp_path, monkeypatch):
    original = loop._Trainer._train_step

    def interrupted(self, step, *others):
        os.kill(os.getpid(), signal.SIGINT)
        return original(self, step, *others)

    monkeypatch.setattr(loop._Trainer, "_train_step", interrupted)
    with pytest.raises(SystemExit) as stop:
        train(tmp_path)
    assert stop.value.code == 130
    assert numbers(tmp_path).keys() == {1}
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["model.bias=false", "schedule.lr=0.1"],
            "bias was True, this run has False; sch",
        ),
        ([f'data.text=["{__file__}"]'], "the digest of data.text"),
    ],
)
def test_other_numbers_are_refused_with_the_key_and_both_values(train, stopped, settings, expected):
    status, err = train(stopped, *settings, resume=True)
    assert status == 2
    assert expected in err


def test_more_steps_extend_a_whole_run(train, undisturbed, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    status, err = train(output, "run.checkpoint_interval=2", "run.steps=5", resume=True)
    assert status == 0, err
    assert whole(output) == [4, 5]
    found = numbers(output)
    assert list(found) == [1, 2, 3, 4, 5]
    assert {step: found[step] for step in range(1, 5)} == numbers(undisturbed)
    assert found[5][2] > 0, "the learning rate is that of a run of five steps"


def test_a_checkpoint_that_can_not_be_written_is_an_error_and_the_one_before_stays(
    train, stopped, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    status, err = train(stopped, "run.checkpoint_interval=1", resume=True)
    assert status == 1
    assert "can't write the checkpoint" in err
    assert "No space left on device" in err
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step_000002"]


# What a stranger hands over


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


STAGE = "stage_0.safetensors"


def rewrite(folder, change):
    data = json.loads((folder / "checkpoint.json").read_text())
    change(data)
    (folder / "checkpoint.json").write_text(json.dumps(data))


def replace_file(folder, content, name=STAGE):
    (folder / name).write_bytes(content)


def refused(train, stopped, expected):
    status, err = train(stopped, resume=True)
    assert status == 2, err
    assert expected in err, err


@pytest.mark.parametrize("name", ["checkpoint.json", STAGE])
def test_a_hostile_pickle_is_never_opened(train, stopped, folder, tmp_path, name):
    attack = pickle.dumps(Attack(tmp_path / "harm"))
    if name == STAGE:
        replace_file(folder, attack)
    else:
        (folder / name).write_bytes(attack)
    refused(train, stopped, name)
    assert not (tmp_path / "harm").exists()
    pickle.loads(attack).close()  # noqa: S301 - shows that it would have done harm
    assert (tmp_path / "harm").exists()


RANKS = "the number of ranks"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.update(format=2, tensors={}), "'format': input should be 7 (got 2)"),
        (lambda data: data.pop("format"), "'format' is required"),
        (lambda data: data.update(more=1), "unknown key 'more'"),
        (lambda data: data.update(step=10**30), "step"),
        (lambda data: data["decides"].update({RANKS: 2}), f"{RANKS} was 2, this run has 1"),
        (lambda data: data["decides"].update({"run.device": [0]}), "run.device was [0], this run"),
        (lambda data: data["decides"].pop("run.steps"), "run.steps was None, this run has 4"),
        (lambda data: data.pop("decides"), "'decides' is required"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(train, stopped, folder, change, expected):
    rewrite(folder, change)
    refused(train, stopped, expected)


NORM = "chunk0.module.decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: state.update({NORM: torch.zeros(3, 16)}), "of shape [3, 16], in this model"),
        (lambda state: state.update({NORM: state[NORM].double()}), "is torch.float64 of shape"),
        (lambda state: state.update(more=torch.zeros(1)), "of shape [1], in this model absent"),
        (lambda state: state.pop(NORM), f"holds no '{NORM}'"),
    ],
)
def test_tensors_of_another_model_are_refused(train, stopped, folder, change, expected):
    state = load_file(folder / STAGE)
    change(state)
    save_file(state, folder / STAGE)
    replace_file(folder, (folder / STAGE).read_bytes())
    refused(train, stopped, expected)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, (64).to_bytes(8, "little") + b'{"a": 1}'.ljust(64)]
)
def test_a_file_of_something_else_is_refused(train, stopped, folder, content):
    replace_file(folder, content)
    refused(train, stopped, f"{STAGE} is damaged: ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"format": 7', "not plain JSON"),
        (b"[" * 100_000, "not plain JSON"),
        (b'{"step": {"__class__": "os.system"}}', "'step'"),
    ],
)
def test_broken_json_is_refused(train, stopped, folder, content, expected):
    (folder / "checkpoint.json").write_bytes(content)
    refused(train, stopped, expected)


def test_missing_files_are_named(train, stopped, folder):
    for name in (STAGE, "checkpoint.json"):
        os.unlink(folder / name)
        refused(train, stopped, name)


def test_a_file_that_is_a_pipe_is_refused(train, stopped, folder):
    (folder / STAGE).unlink()
    os.mkfifo(folder / STAGE)
    refused(train, stopped, "not a regular file")


# steps.jsonl


def test_without_a_log_the_run_goes_on_with_a_new_one(train, undisturbed, stopped):
    os.unlink(stopped / "steps.jsonl")
    assert train(stopped, resume=True)[0] == 0
    assert numbers(stopped) == {step: numbers(undisturbed)[step] for step in (3, 4)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines[:1], "ends at step 1"),
        (lambda lines: [lines[0], lines[1][:60]], "ends at step 1"),
        (lambda lines: [lines[0], *lines], "line 2 is of step 1"),
        (lambda lines: [lines[0], lines[3]], "line 2 is of step 4"),
        (lambda lines: [b"{}\n", *lines], "line 1: 'step' is required"),
        (lambda lines: [b"[1, 2]\n", *lines], "line 1 must hold a mapping"),
        (lambda lines: [b"\xff\n", *lines], "line 1 is not plain JSON"),
        (lambda lines: [lines[0].replace(b'"step": 1', b'"step": "x"')], "line 1: 'step'"),
        (lambda lines: [lines[0].replace(b'"loss": ', b'"loss": "z", "x": ')], "'loss'"),
        (lambda lines: [lines[0].replace(b'"ranks": [', b'"ranks": [7, ')], "'ranks.0'"),
        (lambda lines: [b"[" * 1000 + b"]" * 1000 + b"\n"], "recursion limit"),
    ],
)
def test_a_broken_log_is_refused(train, stopped, undisturbed, change, expected):
    lines = (undisturbed / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "steps.jsonl").write_bytes(b"".join(change(lines)))
    refused(train, stopped, expected)


# What there is no CPU run of


class GroupedAdam(torch.optim.SGD):
    """Counts steps in its groups and makes its state in the first step, as some on GPUs do."""

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("exp_avg", torch.zeros_like(parameter)).add_(parameter.grad)


def half_precision():
    """Return a bfloat16 model and an optimizer of its float32 main parameters."""
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    mains = []
    for parameter in model.parameters():
        parameter.main_param = parameter.detach().clone().float()
        mains.append(parameter.main_param)
    optimizer = GroupedAdam(mains, lr=0.5)
    return model, types.SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)


def test_main_parameters_and_step_counts_of_groups_are_kept():
    model, optimizer = half_precision()
    checkpoint._make_optimizer_states(optimizer)
    assert all(main.grad is None for main in optimizer.optimizer.param_groups[0]["params"])
    tensors = checkpoint._stage_tensors(optimizer, [model])
    assert tensors.keys() == {
        "chunk0.weight",
        "chunk0.bias",
        "optimizer.chunk0.weight.main",
        "optimizer.chunk0.weight.exp_avg",
        "optimizer.chunk0.bias.main",
        "optimizer.chunk0.bias.exp_avg",
        "optimizer.0.group0.step",
    }
    assert tensors["optimizer.chunk0.weight.main"].data_ptr() == model.weight.main_param.data_ptr()
    assert tensors["optimizer.0.group0.step"] == 1


def test_tensors_of_every_kind_come_back(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(7),
        "half": torch.randn(3, 50).to(torch.bfloat16),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "view": torch.arange(12.0)[3:9],
        "empty": torch.empty(0),
    }
    path = tmp_path / STAGE
    checkpoint._write_tensors(path, tensors)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint._read_tensors(path, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())

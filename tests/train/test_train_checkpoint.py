"""A resumed run is the undisturbed one, bit for bit; whatever else lies there is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import types
import zipfile

import numpy as np
import pytest
import torch
from training_runs import environment_of_one_rank, numbers, stored, whole, words

from megatron_offload.cli import main as cli
from megatron_offload.train import checkpoint, loop
from megatron_offload.train.checkpoint_folder import digest_of_file

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
        settings = ("run.checkpoint_interval=2", "run.eval_interval=2")
        assert cli.main(words(output, *ONE_RANK, *settings)) == 0
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
    status, err = train(stopped, "run.checkpoint_interval=2", "run.eval_interval=2", resume=True)
    assert status == 0, err
    assert "going on after step 2" in err
    assert numbers(stopped) == numbers(undisturbed)
    assert stored(stopped, 4) == stored(undisturbed, 4), "parameters, moments and random states"
    manifests = [
        json.loads((x / "checkpoints/step_000004/checkpoint.json").read_text())
        for x in (undisturbed, stopped)
    ]
    assert manifests[0]["evaluations"] == manifests[1]["evaluations"]
    assert manifests[0]["evaluations"].keys() == {"2", "4"}


def test_going_on_with_offload_gives_the_same_bits(train, undisturbed, stopped):
    settings = ("run.checkpoint_interval=2", "offload.enabled=true", "run.log_interval=3")
    status, err = train(stopped, *settings, resume=True)
    assert status == 0, err
    assert numbers(stopped) == numbers(undisturbed)
    assert stored(stopped, 4) == stored(undisturbed, 4)
    assert '"offloaded_bytes": 0' not in (stopped / "steps.jsonl").read_text().splitlines()[-1]


def test_a_lost_random_state_would_be_seen(train, undisturbed, stopped, monkeypatch):
    monkeypatch.setattr(checkpoint, "restore_random_states", lambda *_: None)
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


def test_a_worker_group_that_was_started_again_resumes_by_itself(train, stopped):
    status, err = train(stopped, TORCHELASTIC_RESTART_COUNT="1")
    assert status == 0
    assert "going on after step 2" in err


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
    (part / "__0_0.distcp").write_bytes(b"half")
    (stopped / "checkpoints" / "notes.txt").write_text("kept")
    settings = ("run.checkpoint_interval=1", "run.keep_checkpoints=1")
    assert train(stopped, *settings, resume=True)[0] == 0
    assert whole(stopped) == [4]
    assert sorted(x.name for x in (stopped / "checkpoints").iterdir()) == [
        "notes.txt",
        "step_000004",
    ]


def test_sigterm_ends_the_run_after_the_step_with_a_checkpoint(
    train, undisturbed, tmp_path, monkeypatch
):
    original = loop._Trainer._pass_over_microbatches

    def interrupted(self, kind, step, **options):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, kind, step, **options)

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
        (["model.hidden=32"], "model.hidden was 16, this run has 32"),
        (["model.dropout=0.2"], "model.dropout was 0.1, this run has 0.2"),
        (["run.seed=1"], "run.seed was 1234, this run has 1"),
        (["data.microbatches=4"], "data.microbatches was 2, this run has 4"),
        (
            ["optimizer.beta1=0.8", "schedule.lr=0.1"],
            "optimizer.beta1 was 0.9, this run has 0.8; s",
        ),
        (["run.steps=8"], "run.steps was 4, this run has 8"),
        (["run.steps=1", "schedule.decay=constant"], "schedule.decay was 'cosine'"),
    ],
)
def test_other_numbers_are_refused_with_the_key_and_both_values(train, stopped, settings, expected):
    status, err = train(stopped, *settings, resume=True)
    assert status == 2
    assert expected in err


def test_other_data_are_refused(train, stopped, tmp_path):
    (tmp_path / "text").write_bytes(b"other text " * 100)
    status, err = train(stopped, f'data.text=["{tmp_path / "text"}"]', resume=True)
    assert status == 2
    assert "give the same data" in err


def test_more_steps_are_fine_where_the_schedule_does_not_hang_on_them(train, tmp_path):
    settings = ["schedule.decay=constant", "run.checkpoint_interval=1"]
    assert train(tmp_path / "a", *settings, "run.steps=1")[0] == 0
    assert train(tmp_path / "a", *settings, "run.steps=2", resume=True)[0] == 0
    assert train(tmp_path / "b", *settings, "run.steps=2")[0] == 0
    a, b = numbers(tmp_path / "a"), numbers(tmp_path / "b")
    assert a == b
    status, err = train(tmp_path / "a", *settings, "run.steps=1", resume=True)
    assert status == 2
    assert "set it to 2 or more" in err


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


def test_a_whole_run_is_not_replaced(train, undisturbed, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    shutil.rmtree(output / "checkpoints")
    before = (output / "steps.jsonl").read_bytes()
    for resume, expected in ((False, "holds an earlier run"), (True, "no checkpoint to go on")):
        status, err = train(output, resume=resume)
        assert status == 2
        assert expected in err
    assert (output / "steps.jsonl").read_bytes() == before


def test_a_checkpoint_that_can_not_be_written_is_an_error_and_the_one_before_stays(
    train, stopped, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_config", full)
    status, err = train(stopped, "run.checkpoint_interval=1", resume=True)
    assert status == 1
    assert "can't write the checkpoint" in err
    assert "No space left on device" in err
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step_000002"]


def test_dcps_own_tools_read_the_checkpoint(undisturbed, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(undisturbed / "checkpoints" / "step_000004", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    names = json.loads((undisturbed / "checkpoints/step_000004/checkpoint.json").read_text())
    assert state.keys() == names["tensors"].keys()


# What a stranger hands over


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def rewrite(folder, change, name="checkpoint.json"):
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


def refused(train, stopped, expected):
    status, err = train(stopped, resume=True)
    assert status == 2, err
    assert expected in err, err


def test_a_hostile_pickle_is_never_opened(train, undisturbed, stopped, folder, tmp_path):
    attack = pickle.dumps(Attack(tmp_path / "harm"))
    (folder / ".metadata").write_bytes(attack)
    status, err = train(stopped, resume=True)
    assert status == 0, err
    assert numbers(stopped) == numbers(undisturbed)
    assert not (tmp_path / "harm").exists()
    pickle.loads(attack).close()  # noqa: S301 - shows that it would have done harm
    assert (tmp_path / "harm").exists()


def test_a_hostile_pickle_in_the_place_of_a_description_is_refused(
    train, stopped, folder, tmp_path
):
    (folder / "checkpoint.json").write_bytes(pickle.dumps(Attack(tmp_path / "harm")))
    refused(train, stopped, "checkpoint.json")
    assert not (tmp_path / "harm").exists()


def test_a_hostile_pickle_in_a_tensors_archive_is_never_opened(
    train, undisturbed, stopped, folder, tmp_path
):
    places = json.loads((folder / "checkpoint.json").read_text())["tensors"]
    shard = (folder / "__0_0.distcp").read_bytes()
    content = bytearray()
    for place in sorted(places.values(), key=lambda x: x["offset"]):
        archive = zipfile.ZipFile(
            io.BytesIO(shard[place["offset"] : place["offset"] + place["length"]])
        )
        place["offset"] = len(content)
        changed = io.BytesIO()
        with zipfile.ZipFile(changed, "w") as out:
            out.writestr("archive/data.pkl", pickle.dumps(Attack(tmp_path / "harm")))
            out.writestr("archive/data/0", archive.read("archive/data/0"))
        content += changed.getvalue()
        place["length"] = len(changed.getvalue())
    (folder / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": digest_of_file(folder / "__0_0.distcp")}
    rewrite(folder, lambda data: data.update(tensors=places, files=files))
    assert train(stopped, resume=True)[0] == 0
    assert numbers(stopped) == numbers(undisturbed)
    assert not (tmp_path / "harm").exists()


def tensor_changed(**values):
    def change(data):
        next(iter(data["tensors"].values())).update(values)

    return change


def first_removed(data):
    del data["tensors"][next(iter(data["tensors"]))]


def one_added(data):
    data["tensors"]["stage0.more"] = next(iter(data["tensors"].values()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.update(format=1), "format"),
        (lambda data: data.update(more=1), "unknown key 'more'"),
        (lambda data: data.update(step=3), "is of step 3"),
        (lambda data: data.update(step=10**30), "step"),
        (lambda data: data.update(ranks=2), "written by 2 ranks"),
        (lambda data: data.update(device="cuda"), "run.device was cuda"),
        (lambda data: data.update(evaluations={"2": "0x1p99999"}), "no number"),
        (lambda data: data.update(tensors=[]), "tensors"),
        (first_removed, "holds no 'stage0."),
        (one_added, "'stage0.more', which this model has not"),
        (tensor_changed(file="../../../../etc/passwd"), "file"),
        (tensor_changed(file="/etc/passwd"), "file"),
        (tensor_changed(file="__0_0.distcp\n"), "file"),
        (tensor_changed(file="__1_0.distcp"), "lies in __1_0.distcp, which has no digest"),
        (lambda data: data["files"].update({"__1_0.distcp": "0"}), "No such file or directory: '"),
        (lambda data: data["files"].update({"../x": "0"}), "files"),
        (lambda data: data.pop("files"), "'files' is required"),
        (tensor_changed(dtype="object"), "dtype"),
        (tensor_changed(dtype="float64"), "is float64 of shape"),
        (tensor_changed(shape=[3, 16]), "of shape [3, 16]"),
        (tensor_changed(shape=[-1]), "shape"),
        (tensor_changed(shape=[10**18] * 9), "of shape [1000000"),
        (tensor_changed(offset=-1), "offset"),
        (tensor_changed(offset=5000), "is damaged"),
        (tensor_changed(offset=2**40), "cut off"),
        (tensor_changed(length=10**9), "takes 1000000000 bytes"),
        (tensor_changed(length=1), "takes 1 bytes"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(train, stopped, folder, change, expected):
    rewrite(folder, change)
    refused(train, stopped, expected)


@pytest.mark.parametrize("name", ["checkpoint.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not plain JSON"),
        (b"[]", "must hold an object"),
        (b'{"format": 1', "not plain JSON"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b"\xff\xfe", "utf-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"run": {"outptu": 1}, "format": 1}', "outp"),
        (b'{"run": {"seed": {"__class__": "os.system"}}}', "seed"),
    ],
)
def test_broken_json_is_refused(train, stopped, folder, name, content, expected):
    if name == "checkpoint.json" and expected in ("outp", "seed"):
        expected = "run"
    (folder / name).write_bytes(content)
    refused(train, stopped, expected)


def test_a_huge_description_is_refused(train, stopped, folder, monkeypatch):
    monkeypatch.setattr("megatron_offload.train.checkpoint_folder._MAX_MANIFEST_BYTES", 100)
    refused(train, stopped, "more than 100 bytes")


def test_missing_files_are_named(train, stopped, folder):
    for name in ("__0_0.distcp", "config.json", "checkpoint.json"):
        os.unlink(folder / name)
        refused(train, stopped, name)


def test_a_shard_that_was_cut_off_is_refused(train, stopped, folder):
    os.truncate(folder / "__0_0.distcp", 1000)
    refused(train, stopped, "__0_0.distcp is damaged")


def test_a_shard_of_another_steps_checkpoint_is_refused(train, undisturbed, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    places = [output / f"checkpoints/step_00000{step}/__0_0.distcp" for step in (2, 4)]
    shutil.copy(*places)
    refused(train, output, "step_000004/__0_0.distcp is damaged, or the file of another checkpoint")


def test_a_shard_with_one_flipped_bit_is_refused(train, stopped, folder):
    place = next(iter(json.loads((folder / "checkpoint.json").read_text())["tensors"].values()))
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[place["offset"] + place["length"] // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)
    refused(train, stopped, "is damaged")


def test_a_shard_that_is_a_link_or_a_pipe_is_refused(train, stopped, folder, tmp_path):
    shard = folder / "__0_0.distcp"
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    refused(train, stopped, "can't read")
    shard.unlink()
    os.mkfifo(shard)
    refused(train, stopped, "not a regular file")


def test_a_shard_without_permission_is_refused(train, stopped, folder, monkeypatch):
    original = os.open

    def denied(path, *others, **more):
        if str(path).endswith(".distcp"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *others, **more)

    monkeypatch.setattr(checkpoint.os, "open", denied)
    refused(train, stopped, "Permission denied")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"a/data/0": b"x" * 40, "b/data/0": b"x" * 40}, "other than one plain tensor"),
        ({"a/data.pkl": b""}, "other than one plain tensor"),
        ({"a/data/0": b"x" * 41}, "41 bytes in place of 40"),
    ],
)
def test_an_archive_of_anything_else_is_damage(members, expected):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(checkpoint._DAMAGES, match=expected):
        checkpoint._read_tensor(content, torch.zeros(10))


def test_a_compressed_archive_is_damage():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data/0", bytes(4 * 10**6))
    assert len(content.getvalue()) < 10_000
    with pytest.raises(zipfile.BadZipFile):
        checkpoint._read_tensor(content, torch.zeros(10**6))


def test_tensors_of_every_kind_come_back(monkeypatch):
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 7)
    for tensor in (
        torch.tensor(3.5),
        torch.arange(7, dtype=torch.int64),
        torch.randn(3, 5).to(torch.bfloat16),
        torch.from_numpy(np.arange(256, dtype=np.uint8)),
        torch.empty(0),
    ):
        content = io.BytesIO()
        torch.save(tensor, content)
        found = torch.zeros_like(tensor)
        checkpoint._read_tensor(content, found)
        assert torch.equal(found, tensor)


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
        (lambda lines: [b"{}\n", *lines], "line 1 is not a step"),
        (lambda lines: [b"[1, 2]\n", *lines], "line 1 is not a step"),
        (lambda lines: [b"\xff\n", *lines], "line 1 is not UTF-8"),
        (lambda lines: [lines[0].replace(b'"step": 1', b'"step": "x"')], "line 1: 'step'"),
        (lambda lines: [lines[0].replace(b'"loss_hex": "', b'"loss_hex": "z')], "not a step"),
        (lambda lines: [lines[0].replace(b'"ranks": [', b'"ranks": [7, ')], "not a step"),
        (lambda lines: [b"[" * 4000 + b"\n"], "nested too deep"),
        (lambda lines: [b"x" * 5000], "longer than 4096 bytes"),
    ],
)
def test_a_broken_log_is_refused(train, stopped, undisturbed, monkeypatch, change, expected):
    monkeypatch.setattr("megatron_offload.train.records._MAX_LINE_BYTES", 4096)
    lines = (undisturbed / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "steps.jsonl").write_bytes(b"".join(change(lines)))
    refused(train, stopped, expected)


def test_a_log_that_is_a_folder_or_a_pipe_is_refused(train, stopped):
    os.unlink(stopped / "steps.jsonl")
    os.mkfifo(stopped / "steps.jsonl")
    refused(train, stopped, "not a regular file")
    os.unlink(stopped / "steps.jsonl")
    (stopped / "steps.jsonl").mkdir()
    refused(train, stopped, "can't read")


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
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert all(main.grad is None for main in optimizer.optimizer.param_groups[0]["params"])
    tensors = checkpoint._optimizer_tensors(optimizer, [model])
    assert tensors.keys() == {
        "chunk0.weight.main",
        "chunk0.weight.exp_avg",
        "chunk0.bias.main",
        "chunk0.bias.exp_avg",
        "0.group0.step",
    }
    assert tensors["chunk0.weight.main"].data_ptr() == model.weight.main_param.data_ptr()
    assert tensors["0.group0.step"] == 1

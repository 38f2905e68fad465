"""Profiles that are kept: read back as they were, or not at all."""

from __future__ import annotations

import json
import multiprocessing
import re
import stat
from datetime import UTC, datetime

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.machine import examine as module
from megatron_offload.machine.examine import identify_machine
from megatron_offload.machine.profile import (
    CopyRates,
    GpuIdentity,
    GpuProfile,
    MachineProfile,
    PciLink,
    PciPath,
    load_profile,
    profile_path,
    save_profile,
)

GPU = GpuIdentity(name="NVIDIA H200", pci_address="0000:3b:00.0")


def make_identity(root, *, gpus=(GPU,), torch_version="2.13.0", cuda_version="13.0"):
    versions = {"torch_version": torch_version, "cuda_version": cuda_version}
    return identify_machine(gpus, root=root).model_copy(update=versions)


def make_profile(identity, d2h_gbps=55.0):
    link = PciLink(generation=5, width=16)
    rates = dict.fromkeys(CopyRates.model_fields, 50.0) | {"d2h_gbps": d2h_gbps}
    gpu = GpuProfile(rates=CopyRates(**rates), pci=PciPath(now=link, most=link))
    now = datetime(2026, 11, 21, tzinfo=UTC)
    return MachineProfile(identity=identity, measured_at=now, gpus=(gpu,) * len(identity.gpus))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_profile_comes_back_as_it_was_kept(tmp_path, caplog):
    identity = make_identity(tmp_path)
    profile = make_profile(identity)
    assert load_profile(identity, tmp_path / "a/b") is None
    assert not caplog.records, "what was never measured is no news"
    path = save_profile(profile, tmp_path / "a/b")
    assert load_profile(identity, tmp_path / "a/b") == profile
    save_profile(make_profile(identity, d2h_gbps=1.0), tmp_path / "a/b")
    assert load_profile(identity, tmp_path / "a/b").gpus[0].rates.d2h_gbps == 1.0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_user_s_cache_folder_is_xdg_s(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    identity = make_identity(tmp_path)
    path = save_profile(make_profile(identity))
    assert path.parent == tmp_path / "megatron-offload"
    assert load_profile(identity) == make_profile(identity)


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": (GPU, GPU)},
        {"gpus": (GPU.model_copy(update={"pci_address": "0000:5e:00.0"}),)},
        {"gpus": (GPU.model_copy(update={"name": "NVIDIA H100"}),)},
        {"torch_version": "2.14.0"},
        {"cuda_version": None},
    ],
)
def test_another_machine_has_another_profile(tmp_path, change):
    identity, other = make_identity(tmp_path), make_identity(tmp_path, **change)
    save_profile(make_profile(identity), tmp_path)
    assert other.fingerprint != identity.fingerprint
    assert load_profile(other, tmp_path) is None


def test_another_driver_kernel_host_or_machine_number_is_another_machine(tmp_path, monkeypatch):
    seen = {make_identity(tmp_path).fingerprint}
    monkeypatch.setattr(module, "driver_version", lambda: "535.54")
    seen.add(make_identity(tmp_path).fingerprint)
    write(tmp_path / "etc/machine-id", "0123\n")
    seen.add(make_identity(tmp_path).fingerprint)
    monkeypatch.setattr(module.platform, "node", lambda: "elsewhere")
    seen.add(make_identity(tmp_path).fingerprint)
    monkeypatch.setattr(module.platform, "release", lambda: "0.1")
    seen.add(make_identity(tmp_path).fingerprint)
    assert len(seen) == 5


def test_a_profile_that_lies_under_another_s_name_is_warned_of_and_not_taken(tmp_path, caplog):
    identity = make_identity(tmp_path)
    other = make_identity(tmp_path, torch_version="2.14.0")
    path = save_profile(make_profile(identity), tmp_path)
    path.rename(profile_path(other, tmp_path))
    assert load_profile(other, tmp_path) is None
    assert f"{profile_path(other, tmp_path)} is of another machine" in caplog.text


def test_the_host_s_name_is_not_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module.platform, "node", lambda: "secret-name")
    path = save_profile(make_profile(make_identity(tmp_path)), tmp_path)
    assert "secret-name" not in path.read_text()


# Files that are broken.


def changed(**changes):
    return lambda data: json.dumps(data | changes)


def with_rate(value):
    def change(data):
        data["gpus"][0]["rates"]["d2h_gbps"] = value
        return json.dumps(data)

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: "", "not plain JSON"),
        (lambda data: json.dumps(data)[:-9], "not plain JSON"),
        (lambda data: "[]", "must hold a mapping of keys to values, got a list"),
        (lambda data: "[" * 10_000, "JSON|nested"),
        (lambda data: " " * (1 << 20), "more than 262144 bytes"),
        (changed(version=1), "'version'"),
        (changed(gpus=[]), "0 GPUs were measured and the machine has 1"),
        (changed(measured_at="2026-11-21T00:00:00"), "timezone"),
        (changed(mesured=1), "unknown key 'mesured'; did you mean 'measured_at'"),
        (with_rate(0), "greater than 0"),
        (with_rate(1e30), "less than or equal"),
        (with_rate("fast"), "number"),
        (with_rate(float("nan")), "not plain JSON"),
    ],
)
def test_a_broken_file_is_named_and_counts_as_absent(tmp_path, caplog, spoil, message):
    identity = make_identity(tmp_path)
    path = save_profile(make_profile(identity), tmp_path)
    path.write_text(spoil(json.loads(path.read_text())))
    assert load_profile(identity, tmp_path) is None
    assert re.search(message, caplog.text)
    assert f"can't be read: {path}" in caplog.text or f"can't read {path}" in caplog.text
    save_profile(make_profile(identity), tmp_path)
    assert load_profile(identity, tmp_path) is not None


def test_a_folder_in_the_place_of_the_file_is_told(tmp_path):
    identity = make_identity(tmp_path)
    path = save_profile(make_profile(identity), tmp_path)
    path.unlink()
    path.mkdir()
    assert load_profile(identity, tmp_path) is None
    with pytest.raises(ConfigError, match="can't write"):
        save_profile(make_profile(identity), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def keep_saving(folder, identity, d2h_gbps, times):
    for _ in range(times):
        save_profile(make_profile(identity, d2h_gbps), folder)


def test_writers_at_the_same_time_leave_one_whole_profile(tmp_path):
    identity = make_identity(tmp_path / "machine")
    rates = (10.0, 20.0, 30.0)
    save_profile(make_profile(identity, rates[0]), tmp_path)
    fork = multiprocessing.get_context("fork")
    writers = [
        fork.Process(target=keep_saving, args=(tmp_path, identity, rate, 40)) for rate in rates
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert load_profile(identity, tmp_path).gpus[0].rates.d2h_gbps in rates
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    (file,) = tmp_path.iterdir()
    assert stat.S_ISREG(file.stat().st_mode)

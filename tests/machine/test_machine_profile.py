"""Profiles that are kept are read back as they were, or not at all; what a driver says of links."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pynvml
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
    driver_version,
    load_profile,
    num_nvidia_gpus,
    profile_path,
    read_pci_path,
    save_profile,
)

ADDRESS = "0000:3b:00.0"
GPU = GpuIdentity(name="NVIDIA H200", pci_address=ADDRESS)


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


def test_another_machine_has_another_profile(tmp_path, monkeypatch):
    seen = {profile_path(make_identity(tmp_path))}
    for change in (
        {"gpus": (GPU, GPU)},
        {"gpus": (GPU.model_copy(update={"pci_address": "0000:5e:00.0"}),)},
        {"gpus": (GPU.model_copy(update={"name": "NVIDIA H100"}),)},
        {"torch_version": "2.14.0"},
        {"cuda_version": None},
    ):
        seen.add(profile_path(make_identity(tmp_path, **change)))
    monkeypatch.setattr(module, "driver_version", lambda: "535.54")
    seen.add(profile_path(make_identity(tmp_path)))
    write(tmp_path / "etc/machine-id", "0123\n")
    seen.add(profile_path(make_identity(tmp_path)))
    monkeypatch.setattr(module.platform, "node", lambda: "elsewhere")
    seen.add(profile_path(make_identity(tmp_path)))
    monkeypatch.setattr(module.platform, "release", lambda: "0.1")
    seen.add(profile_path(make_identity(tmp_path)))
    assert len(seen) == 10


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


# The driver


class Driver:
    """Answers as NVML does; what it raises instead, it raises."""

    def __init__(self, monkeypatch):
        self.answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 8,
            "nvmlSystemGetDriverVersion": "580.159.04",
            "nvmlDeviceGetCurrPcieLinkGeneration": 3,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }
        self.calls = []
        for name in self.answers:
            monkeypatch.setattr(pynvml, name, lambda *_, name=name: self.answer(name))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", self.find)

    def answer(self, name):
        self.calls.append(name)
        if isinstance(self.answers[name], Exception):
            raise self.answers[name]
        return self.answers[name]

    def find(self, address):
        if address != ADDRESS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return address


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(monkeypatch)
    yield driver
    assert driver.calls.count("nvmlShutdown") == driver.calls.count("nvmlInit") or isinstance(
        driver.answers["nvmlInit"], Exception
    )


@pytest.mark.parametrize(
    ("generation", "width", "gbps", "text"),
    [
        (1, 16, 4.0, "PCIe 1.0 x16 (4.0 GB/s)"),
        (2, 8, 4.0, "PCIe 2.0 x8 (4.0 GB/s)"),
        (3, 16, 15.75, "PCIe 3.0 x16 (15.8 GB/s)"),
        (4, 16, 31.51, "PCIe 4.0 x16 (31.5 GB/s)"),
        (5, 16, 63.02, "PCIe 5.0 x16 (63.0 GB/s)"),
        (6, 16, 121.0, "PCIe 6.0 x16 (121.0 GB/s)"),
    ],
)
def test_a_link_carries_what_its_generation_says(generation, width, gbps, text):
    link = PciLink(generation=generation, width=width)
    assert link.gbps == pytest.approx(gbps, abs=0.02)
    assert str(link) == text


def test_the_gpu_s_link_is_read_as_it_is_and_could_be(driver):
    path = read_pci_path(ADDRESS)
    assert (path.now.generation, path.now.width) == (3, 8)
    assert (path.most.generation, path.most.width) == (5, 16)
    assert (driver_version(), num_nvidia_gpus()) == ("580.159.04", 8)


@pytest.mark.parametrize("answer", [0, 255, -1, "x16", pynvml.NVMLError(3)])
@pytest.mark.parametrize("name", ["CurrPcieLinkWidth", "GpuMaxPcieLinkGeneration"])
def test_a_link_that_makes_no_sense_is_unknown(driver, name, answer):
    driver.answers[f"nvmlDeviceGet{name}"] = answer
    assert read_pci_path(ADDRESS) is None


def test_an_address_that_is_none_or_absent_is_unknown_and_without_a_driver_all_is(driver):
    for address in (None, "", "0000:ff:00.0"):
        assert read_pci_path(address) is None
    driver.answers["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert (read_pci_path(ADDRESS), driver_version(), num_nvidia_gpus()) == (None, None, 0)

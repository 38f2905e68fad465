"""Versions and environments, made up: what is said of them."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

from megatron_offload.machine.checks_software import (
    NEWEST_PYTHON_SEEN,
    NEWEST_SEEN,
    check_environment,
    check_megatron_settings,
    check_python,
    check_versions,
    found_version,
    own_requirements,
)

REQUIREMENTS = [
    "numpy>=1.26",
    "torch>=2.6",
    "megatron-core>=0.16.1; extra == 'megatron'",
    "megatron-core>=0.16.1; extra == 'dev'",
    "transformer-engine[pytorch]>=2.9; extra == 'te'",
    "pytest>=8.3; extra == 'dev'",
]
FINE = {"torch": "2.11.0+cu130", "megatron-core": "0.19.2", "transformer-engine": "2.20.2"}


def versions(**changed):
    installed = {**FINE, **{name.replace("_", "-"): text for name, text in changed.items()}}

    def version_of(name):
        if installed.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    return {finding.title: finding for finding in check_versions(REQUIREMENTS, version_of)}


def test_versions_that_were_run_with_are_fine():
    found = versions()
    assert {name: finding.found for name, finding in found.items()} == FINE
    assert {finding.level for finding in found.values()} == {"ok"}


@pytest.mark.parametrize(
    ("changed", "level", "advised"),
    [
        ({"torch": "2.5.1"}, "error", "pip install 'torch>=2.6'"),
        ({"torch": None}, "error", "pip install 'torch>=2.6'"),
        ({"torch": "2.12.0a0+nv26.1"}, "ok", ""),
        ({"torch": "2.99"}, "note", "compare"),
        ({"torch": "3.0"}, "note", "compare"),
        ({"torch": "of my own"}, "note", "wanted: torch>=2.6"),
        ({"megatron_core": "0.16.0"}, "warning", "pip install 'megatron-core>=0.16.1'"),
        ({"megatron_core": "0.16.1"}, "ok", ""),
        ({"megatron_core": None}, "ok", ""),
        ({"megatron_core": "0.20.0rc1"}, "note", "compare"),
        ({"transformer_engine": "2.8"}, "warning", "pip install 'transformer-engine>=2.9'"),
        ({"transformer_engine": None}, "ok", ""),
    ],
)
def test_versions_outside_are_told(changed, level, advised):
    (name,) = (key.replace("_", "-") for key in changed)
    finding = versions(**changed)[name]
    assert finding.level == level
    assert advised in finding.advice
    assert bool(finding.advice) == (level != "ok")


def test_what_two_extras_ask_for_is_told_once():
    names = [finding.title for finding in check_versions(REQUIREMENTS, lambda name: FINE[name])]
    assert sorted(names) == sorted(FINE)


def test_the_package_s_own_requirements_name_all_that_was_seen():
    found = check_versions(own_requirements())
    assert {finding.title for finding in found} == set(NEWEST_SEEN)
    assert "error" not in {finding.level for finding in found}


def test_sources_that_aren_t_installed_and_lines_that_aren_t_requirements_are_no_error():
    (finding,) = check_versions(None)
    assert finding.level == "note"
    assert check_versions(["==nonsense=="]) == []


@pytest.mark.parametrize(
    ("version", "level"), [("3.11.7", "ok"), (NEWEST_PYTHON_SEEN, "ok"), ("3.99.0rc1", "note")]
)
def test_a_python_that_was_never_tried_is_a_note(version, level):
    assert check_python(version).level == level


def test_the_running_python_is_told():
    assert check_python().title == "python"


# The environment.


@pytest.mark.parametrize(
    ("environ", "level", "said"),
    [
        ({}, "note", "not set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, "note", "not set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "ok", "expandable"),
        ({"PYTORCH_ALLOC_CONF": "a:[1:2,3:4], expandable_segments:True"}, "ok", "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "note", "False"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "note", "not PyTorch's own"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "note", "native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ":,,::\x1b[31m"}, "note", r"\x1b[31m"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x" * 9999}, "note", "..."),
    ],
)
def test_the_allocator_s_settings_are_told(environ, level, said):
    (finding,) = check_environment(environ)
    assert finding.level == level
    assert said in finding.found
    assert len(finding.found) < 200


def test_pinned_settings_are_said_to_be_another_s():
    value = "expandable_segments:True,pinned_use_cuda_host_register:True"
    first, second = check_environment({"PYTORCH_CUDA_ALLOC_CONF": value})
    assert (first.level, second.level) == ("ok", "note")
    assert "PyTorch's own pinned memory" in second.found


def test_two_names_for_one_setting_must_agree():
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "x:1"}
    (finding,) = check_environment(environ)
    assert finding.level == "warning"
    environ["PYTORCH_CUDA_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"]
    (finding,) = check_environment(environ)
    assert finding.level == "ok"


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("CUDA_LAUNCH_BLOCKING", "", None),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "0", "warning"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "33", "warning"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many", "warning"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "", "warning"),
        ("NVTE_CPU_OFFLOAD_V1", "1", "note"),
        ("NVTE_CPU_OFFLOAD_V1", "0", None),
    ],
)
def test_variables_that_matter_are_told(name, value, level):
    found = {finding.title: finding for finding in check_environment({name: value})}
    assert (found[name].level if name in found else None) == level


# Megatron's own.


@pytest.mark.parametrize(
    ("settings", "is_installed", "level"),
    [
        ({}, False, "ok"),
        ({"cpu_offloading": False, "fine_grained_activation_offloading": True}, True, "ok"),
        ({"fine_grained_activation_offloading": True}, False, "error"),
        ({"cpu_offloading": True}, True, "error"),
    ],
)
def test_two_offloads_at_once_are_an_error(settings, is_installed, level):
    found = check_megatron_settings(SimpleNamespace(**settings), is_installed=is_installed)
    assert found.level == level
    assert bool(found.advice) == (level == "error")


@pytest.fixture
def another_megatron(tmp_path, monkeypatch):
    """A megatron-core that comes first on the path, as sources do that pip knows nothing of."""
    folder = tmp_path / "megatron/core"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "package_info.py").write_text(
        "MAJOR = 0\nMINOR = 23\nPATCH = 4\nPRE_RELEASE = 'rc1'\n"
        "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    sys.modules.pop("megatron", None)


def test_the_version_is_of_the_megatron_core_that_is_imported(another_megatron, monkeypatch):
    assert found_version("megatron-core") == "0.23.4rc1"
    (finding,) = check_versions(["megatron-core>=0.16.1"])
    assert "0.23.4rc1" in finding.found
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__="0.24.0+abc"))
    assert found_version("megatron-core") == "0.24.0"
    assert found_version("numpy") == importlib.metadata.version("numpy")


def test_sources_that_do_not_say_their_version_have_that_of_the_package(another_megatron):
    (another_megatron / "package_info.py").write_text("MAJOR = input()")
    assert found_version("megatron-core") == importlib.metadata.version("megatron-core")

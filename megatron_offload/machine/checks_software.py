"""What is installed and how it is set: one small function for each question.

Text from outside is shown as Python would write it, and short.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from megatron_offload.errors import shorten
from megatron_offload.files.kernel import to_int
from megatron_offload.files.text import read_text
from megatron_offload.machine.finding import Finding, Level

NEWEST_SEEN = {"torch": "2.13", "megatron-core": "0.19", "transformer-engine": "2.20"}
"""The newest versions that this package was run with; README.md says how."""

NEWEST_PYTHON_SEEN = "3.12"

_MOST_CONNECTIONS = 32


def own_requirements() -> list[str] | None:
    """Return what this package asks of others; None where it runs uninstalled from its sources."""
    try:
        return importlib.metadata.requires("megatron-offload") or []
    except importlib.metadata.PackageNotFoundError:
        return None


def found_version(name: str) -> str:
    """Return the version of a distribution: of what an import gives, not of what pip lists.

    The two differ for megatron-core where another copy comes first on ``PYTHONPATH``. Its own file
    is read for that, which takes no import.

    Raises:
        PackageNotFoundError: it isn't there.
    """
    if name == "megatron-core":
        loaded = getattr(sys.modules.get("megatron.core"), "__version__", None)
        version = loaded.partition("+")[0] if isinstance(loaded, str) else _version_in_sources()
        if version:
            return version
    return importlib.metadata.version(name)


def _version_in_sources() -> str:
    """Return the version that the megatron-core which would be imported gives itself, or ""."""
    try:
        spec = importlib.util.find_spec("megatron.core")
        origin = spec.origin if spec is not None else None
        text = read_text(Path(origin).with_name("package_info.py")) if origin else ""
    except (ImportError, ValueError):  # ConfigError among them
        return ""
    parts = dict(re.findall(r"^(\w+) = '?\"?([\w.]*)['\"]?$", text, re.MULTILINE))
    numbers = [parts.get(key, "") for key in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(numbers) + parts.get("PRE_RELEASE", "") if "".join(numbers).isdigit() else ""


def check_versions(
    requirements: Sequence[str] | None, version_of: Callable[[str], str] | None = None
) -> list[Finding]:
    """Hold the installed versions of `NEWEST_SEEN` against the requirements.

    Args:
        requirements: those of the package, as its metadata gives them; None where it has none.
        version_of: returns the version of a distribution; None for `found_version`.
    """
    if requirements is None:
        found = "this package is not installed, so it doesn't say which versions it takes"
        advice = "pip install megatron-offload, or pip install -e its folder"
        return [Finding("note", "versions", found, advice)]
    findings: dict[str, Finding] = {}  # an extra that names others repeats what they ask for
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name in NEWEST_SEEN:
            is_extra = requirement.marker is not None and "extra" in str(requirement.marker)
            finding = _check_version(requirement, is_extra, version_of or found_version)
            findings.setdefault(requirement.name, finding)
    return list(findings.values())


def _check_version(
    requirement: Requirement, is_extra: bool, version_of: Callable[[str], str]
) -> Finding:
    name = requirement.name
    wanted = f"{name}{requirement.specifier}"
    try:
        text = version_of(name)
    except importlib.metadata.PackageNotFoundError:
        if is_extra:
            return Finding("ok", name, "not installed, and not needed")
        return Finding("error", name, "not installed", f"pip install '{wanted}'")
    try:
        version = Version(text)
    except InvalidVersion:
        return Finding("note", name, f"{shorten(repr(text))} is no version", f"wanted: {wanted}")
    if not requirement.specifier.contains(version, prereleases=True):
        level: Level = "warning" if is_extra else "error"
        return Finding(level, name, f"{text}, too old or too new", f"pip install '{wanted}'")
    if version.release[:2] > Version(NEWEST_SEEN[name]).release:
        return _newer(name, text, NEWEST_SEEN[name])
    return Finding("ok", name, text)


def check_python(version: str | None = None) -> Finding:
    """Say whether this Python is among those that the package was run with.

    Args:
        version: such as ``3.11.7``; None for the running one.
    """
    version = version if version is not None else platform.python_version()
    if Version(version).release[:2] > Version(NEWEST_PYTHON_SEEN).release:
        return _newer("python", version, NEWEST_PYTHON_SEEN)
    return Finding("ok", "python", version)


def _newer(name: str, version: str, newest: str) -> Finding:
    found = f"{version}, newer than any that this package was run with ({newest})"
    return Finding("note", name, found, "megatron-offload compare shows whether bits stay the same")


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """Say which environment variables stand in the way of copies beside kernels, or help."""
    unwanted = [
        Finding(level, name, f"{shorten(repr(environ[name]))}: {effect}", f"unset {name}{unless}")
        for name, (level, effect, unless) in _UNWANTED.items()
        if environ.get(name, "0") not in ("", "0")
    ]
    return [*_check_allocator(environ), *unwanted, *_check_connections(environ)]


_UNWANTED: dict[str, tuple[Level, str, str]] = {
    "CUDA_LAUNCH_BLOCKING": (
        "warning",
        "the host waits for every kernel and copy, so that nothing overlaps",
        "",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "warning",
        "every allocation goes to the driver, and every release waits for the device",
        "",
    ),
    "NVTE_CPU_OFFLOAD_V1": (
        "note",
        "for megatron-core's own offload; this package does without",
        ", unless you compare the two, or Megatron-LM's own scripts ask for it",
    ),
}
"""Variables, how bad they are, what they do, and when they may stay."""


def _check_allocator(environ: Mapping[str, str]) -> list[Finding]:
    names = [n for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if environ.get(n)]
    values = {environ[name] for name in names}
    title = names[0] if names else "PYTORCH_CUDA_ALLOC_CONF"
    if len(values) > 1:
        found = "both are set, to different values"
        advice = "which one counts depends on PyTorch's version: set one"
        return [Finding("warning", " and ".join(names), found, advice)]
    shown = shorten(repr(environ[title])) if names else "not set"
    parts = (part.partition(":") for part in "".join(values).split(","))
    settings = {key.strip(): value.strip() for key, _, value in parts}
    if settings.get("backend", "native") != "native":
        found = f"{shown}: not PyTorch's own allocator"
        advice = "device_target_bytes goes by what that one has reserved; use max_inflight_bytes"
        findings = [Finding("note", title, found, advice)]
    elif settings.get("expandable_segments") == "True":
        findings = [Finding("ok", title, shown)]
    else:
        advice = "where much more is reserved than allocated, try expandable_segments:True"
        findings = [Finding("note", title, shown, advice)]
    if any(key.startswith("pinned_") for key in settings):
        found = f"{shown}: pinned_... is for PyTorch's own pinned memory only"
        findings.append(Finding("note", title, found))
    return findings


def _check_connections(environ: Mapping[str, str]) -> list[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = environ.get(name)
    if value is None:
        return []
    number = to_int(value)
    if number is None or not 1 <= number <= _MOST_CONNECTIONS:
        found = f"{shorten(repr(value))} is none of 1 to {_MOST_CONNECTIONS}"
        return [Finding("warning", name, found, f"unset {name}, or set what Megatron asks for")]
    if number == 1:
        found = (
            "1, as Megatron asks with tensor parallelism on GPUs before Blackwell: all streams "
            "share one queue, in which a copy may stand behind a kernel"
        )
        advice = "where copies come late, and without tensor parallelism, leave it unset (8)"
        return [Finding("note", name, found, advice)]
    return [Finding("ok", name, value)]


def check_megatron_settings(settings: Any, *, is_installed: bool) -> Finding:
    """Say whether a Megatron job's own offload stands beside this package's.

    Args:
        settings: a ``TransformerConfig``, Megatron's arguments, or anything with their fields.
        is_installed: what `megatron_offload.integrations.megatron_core.is_installed` returns.
    """
    title = "megatron-core's own offload"
    if getattr(settings, "cpu_offloading", False):
        found = "cpu_offloading moves whole layers by TransformerEngine, beside this package"
        advice = "leave out --cpu-offloading-num-layers (cpu_offloading=False)"
        return Finding("error", title, found, advice)
    if getattr(settings, "fine_grained_activation_offloading", False) and not is_installed:
        found = "fine_grained_activation_offloading is on, and this package isn't in its place"
        advice = (
            "call megatron_offload.integrations.megatron_core.install() before the model is built"
        )
        return Finding("error", title, found, advice)
    return Finding("ok", title, "it is not in use")

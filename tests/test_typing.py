"""A type checker in a user's project accepts what the package accepts, with no plugin.

mypy takes some 15 s over torch's own annotations, hence slow; both tests share its cache.
"""

from __future__ import annotations

import pytest
from documents import blocks
from processes import ROOT, run_python

ACCEPTED = """
from megatron_offload import OffloadConfig
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig

OffloadConfig(max_inflight_bytes="1GiB", min_tensor_bytes=1024, prefetch_bytes=None)
OffloadConfig(modules=["mlp_fc1", "layers.*.mlp"], policy=AutoConfig(kind="auto"))
OffloadConfig(modules="mlp_fc1", recompute="norm")
OffloadConfig(modules=("mlp_fc1",), policy={"kind": "ratio", "ratio": 0.5})
MemoryTargetConfig(kind="memory_target", memory_target=["20GiB", 21 << 30])
total: int | None = OffloadConfig().max_inflight_bytes
names: tuple[str, ...] = OffloadConfig().modules
"""

REFUSED = """
from megatron_offload import OffloadConfig

OffloadConfig(max_inflight_bites="1GiB")
OffloadConfig(modules=1)
OffloadConfig(min_tensor_bytes=None)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("typing")


def errors_in(folder, text, strict=True):
    """Return the lines in which mypy finds an error, in a project that knows nothing of ours."""
    path = folder / "program.py"
    path.write_text(text)
    (folder / "mypy.ini").write_text(f"[mypy]\nstrict = {strict}\nmypy_path = {ROOT}\n")
    api = pytest.importorskip("mypy.api")
    words = [str(path), "--config-file", str(folder / "mypy.ini"), "--follow-imports=silent"]
    printed, complaints, _ = api.run([*words, "--cache-dir", str(folder / "cache")])
    assert not complaints
    errors = [line for line in printed.splitlines() if ": error:" in line]
    assert all(line.startswith(str(path)) for line in errors), printed
    return [int(line.split(":")[1]) for line in errors]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "lines"), [(ACCEPTED, []), (REFUSED, [4, 5, 6])])
def test_mypy_accepts_the_forms_that_settings_take_and_refuses_others(folder, text, lines):
    assert errors_in(folder, text) == lines


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_accepts_the_calls_of_readme_and_guides(folder):
    names = ("data", "embed", "layers", "loss", "model", "model_chunks", "optimizer", "train_step")
    presupposed = "from typing import Any\n" + "".join(f"{name}: Any\n" for name in names)
    pages = ("README.md", "docs/megatron.md")
    snippets = [b.text for b in blocks() if b.page in pages and b.language == "python"]
    assert len(snippets) >= 3
    # Each is a program of its own: they give one name several meanings.
    for text in snippets:
        assert errors_in(folder, presupposed + text, strict=False) == []


def test_what_type_checkers_accept_is_accepted(tmp_path):
    done = run_python("-c", ACCEPTED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

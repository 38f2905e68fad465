"""Who may import whom, read off the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_offload

PACKAGE = Path(megatron_offload.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TORCHLESS = (
    *("config.py", "errors.py", "files.py", "strict_model.py", "strict_yaml.py"),
    *("memory/host_limit.py", "memory/numa.py"),
    *("train/checkpoint_folder.py", "train/config.py"),
)


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def imports(path):
    """Return every module that a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def is_or_under(module, *roots):
    return any(module == root or module.startswith(root + ".") for root in roots)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_import_rules(path):
    name, found = name_of(path), imports(path)

    def forbid(*roots):
        wrong = {module for module in found if is_or_under(module, *roots)}
        assert not wrong, f"{name} must not import {sorted(wrong)}"

    if name.startswith("planning/") or name in TORCHLESS:
        forbid("torch", "megatron", "transformer_engine")
    if not name.startswith(("integrations/", "train/")):
        forbid("megatron", "transformer_engine")
    if not name.startswith("train/"):
        forbid("megatron_offload.train")
    if name.startswith(("engine/", "frontends/", "memory/", "planning/", "reporting/")):
        forbid("megatron_offload.backends.cuda", "megatron_offload.backends.simulated")
    if name.startswith(("backends/", "memory/", "planning/")):
        forbid("megatron_offload.engine", "megatron_offload.frontends", "megatron_offload.train")
    if name.startswith("engine/"):
        forbid("megatron_offload.frontends", "megatron_offload.integrations")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_cuda_backend_says_torch_cuda(path):
    name = name_of(path)
    if name == "backends/cuda.py" or name.startswith(("train/", "integrations/")):
        pytest.skip("may talk to the device itself")
    source = path.read_text()
    uses = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert not uses, f"{name} line {uses[0].lineno} uses torch.cuda"


def test_the_package_imports_quietly_without_megatron_and_transformer_engine():
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('megatron', 'transformer_engine'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import megatron_offload\n"
        "print(megatron_offload.PipelineOffloadManager.get_instance().backend.name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in ("simulated", "cuda")
    assert result.stderr == ""


def test_reading_a_configuration_needs_no_torch():
    program = (
        "import sys\n"
        "import importlib.util, types\n"
        "package = types.ModuleType('megatron_offload')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['megatron_offload'] = package\n"
        "import megatron_offload.config, megatron_offload.planning.policy\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

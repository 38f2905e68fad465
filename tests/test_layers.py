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
    *(
        "config.py",
        "errors.py",
        "example_configs.py",
        "files.py",
        "kernel_files.py",
        "strict_model.py",
        "strict_yaml.py",
    ),
    *(f"machine/{name}.py" for name in ("checks_host", "checks_software", "finding")),
    *("machine/pci.py", "machine/profile.py"),
    *("memory/host_limit.py", "memory/numa.py"),
    *("reporting/plan_rows.py", "reporting/plan_tables.py", "train/checkpoint_folder.py"),
    *(f"train/{name}.py" for name in ("cli", "compare_command", "config", "train_command")),
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

    if name.startswith(("commands/", "planning/")) or name in TORCHLESS:
        forbid("torch", "megatron", "transformer_engine")
    if not name.startswith(("integrations/", "train/")):
        forbid("megatron", "transformer_engine")
    if not name.startswith("train/") and name != "__main__.py":
        forbid("megatron_offload.train")
    without_devices = (
        "commands/",
        "engine/",
        "frontends/",
        "machine/",
        "memory/",
        "planning/",
        "reporting/",
    )
    if name.startswith(without_devices):
        forbid("megatron_offload.backends.cuda", "megatron_offload.backends.simulated")
    if name.startswith("machine/"):
        forbid("megatron_offload.integrations", "megatron_offload.reporting")
    if name.startswith(("backends/", "machine/", "memory/", "planning/")):
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


def in_a_new_process(program):
    subprocess.run([sys.executable, "-c", program], check=True)


def test_configuration_and_planning_need_no_torch():
    in_a_new_process(
        "import sys\n"
        "import megatron_offload.config, megatron_offload.planning.policy\n"
        "import megatron_offload.train.train_command\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_public_names_are_there_when_they_are_asked_for():
    in_a_new_process(
        "import sys\n"
        "import megatron_offload as package\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(package.__all__) <= set(dir(package))\n"
        "for name in package.__all__:\n"
        "    assert callable(getattr(package, name)), name\n"
        "assert not hasattr(package, 'nonsense')\n"
        "from megatron_offload import *\n"
        "assert group_start.__module__ == 'megatron_offload.fine_grained_activation_offload'\n"
    )


def test_every_chunk_looks_for_quantised_weights_whoever_started_it():
    in_a_new_process(
        "from megatron_offload.engine.extensions import before_chunk\n"
        "import megatron_offload.integrations.transformer_engine_weights as weights\n"
        "calls = []\n"
        "weights.install = lambda: calls.append(1)\n"
        "[prepare() for prepare in before_chunk]\n"
        "assert calls == [1]\n"
    )

"""Who may import whom, read off the sources; and the walks and notes of docs/design.md.

Each step's file of a walk has that function, and none climbs; each note is in its file.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest
from processes import run_python

import megatron_offload

PACKAGE = Path(megatron_offload.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = (
    "errors.py",
    "files",
    "core",
    "config.py",
    "backends",
    "memory",
    "machine",
    "planning",
    "engine",
    "model_map",
    "recompute",
    "observe",
    "autotune",
    "report",
    "frontends",
    "megatron_api",
    "fine_grained_activation_offload.py",
    "integrations",
    "run",
    "auto.py",
    "train",
    "cli",
    "__main__.py",
)
"""From the ground up: a package imports what stands before it."""
TORCHLESS = (
    "cli/",
    "config.py",
    "core/",
    "errors.py",
    "files/",
    "planning/",
    "backends/host_limit.py",
    "machine/profile.py",
    "report/tables.py",
    "run/flags.py",
    *(f"train/{name}.py" for name in ("config", "run_folder")),
)
PAGE = PACKAGE.parent / "docs" / "design.md"
WALKS = ("A saved tensor", "`max_inflight_bytes`", "A ratio")
NOTE = re.compile(r"^ *# \[Note: (.*?)\](?:.*\n *#)*.*", re.M)
STEP = re.compile(r"^\d+\. `([\w/]+\.py)`:? (.*)$")


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def package_of(name):
    return name.split("/")[0]


def imports(path):
    """Return every module that a file imports, at any depth of nesting, for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def files_imported(path):
    """Return the names of the files of this package that a file imports."""
    places = (PACKAGE.parent / module.replace(".", "/") for module in imports(path))
    files = {place.with_suffix(".py") for place in places} & set(FILES)
    return sorted(name_of(file) for file in files - {path})


def test_the_top_has_few_files():
    top = {path.name for path in PACKAGE.glob("*.py")}
    assert top == {"__init__.py", *(name for name in PACKAGES if name.endswith(".py"))}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downward(path):
    name, found = name_of(path), imports(path)

    def forbid(*roots):
        inside = tuple(f"{root}." for root in roots)
        wrong = {module for module in found if f"{module}.".startswith(inside)}
        assert not wrong, f"{name} must not import {sorted(wrong)}"

    if name != "__init__.py":  # public names, found when they are asked for
        mine = PACKAGES.index(package_of(name))
        above = [file for file in files_imported(path) if PACKAGES.index(package_of(file)) > mine]
        assert not above, f"{name} imports {above}, which stand above it"
    if name.startswith(TORCHLESS):
        forbid("torch", "megatron", "transformer_engine")
    if not name.startswith(("integrations/", "train/")):
        forbid("megatron", "transformer_engine")
    if not name.startswith("backends/"):
        forbid("megatron_offload.backends.cuda", "megatron_offload.backends.simulated")


def test_no_files_import_each_other_in_a_circle():
    graph = {name_of(path): files_imported(path) for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # its CycleError names the circle


def test_only_the_cuda_backend_says_torch_cuda():
    for path in FILES:
        name = name_of(path)
        if name == "backends/cuda.py" or name.startswith(("train/", "integrations/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "cuda":
                assert ast.unparse(node) != "torch.cuda", f"{name} line {node.lineno}"


def test_public_names_are_there_when_they_are_asked_for():
    program = (
        "import sys\n"
        "import megatron_offload as package\n"
        "assert 'torch' not in sys.modules\n"
        "import megatron_offload.fine_grained_activation_offload\n"
        "assert 'megatron_offload.observe.verdicts' in sys.modules, 'as at each door'\n"
        "assert set(package.__all__) <= set(dir(package))\n"
        "for name in package.__all__:\n"
        "    assert callable(getattr(package, name)), name\n"
        "assert not hasattr(package, 'nonsense')\n"
        "from megatron_offload import *\n"
        "assert group_start.__module__ == 'megatron_offload.megatron_api.names'\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


def walk(title):
    """Return the files of a walk, in order, each with the names that its line gives."""
    text = PAGE.read_text()
    _, found, rest = text.partition(f"\n### {title}")
    assert found, f"docs/design.md has no walk of {title}"
    lines = rest.split("\n### ")[0].split("\n## ")[0].split("\n")
    steps = [match for line in lines if (match := STEP.match(line))]
    return [(step[1], re.findall(r"`([A-Za-z_][\w.]*)`", step[2])) for step in steps]


def names_defined(path):
    """Return the functions, classes, methods and attributes that a file defines."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            inside = (part for part in node.body if isinstance(node, ast.ClassDef))
            for part in inside:
                if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
                    names.add(f"{node.name}.{part.name}")
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    names.add(f"{node.name}.{part.target.id}")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_short_and_names_what_is_there(title):
    steps = walk(title)
    assert 3 <= len(steps) <= 10
    for file, names in steps:
        assert names, f"{file}: what is called there?"
        missing = set(names) - names_defined(PACKAGE / file)
        assert not missing, f"{file} has no {sorted(missing)}"


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_never_climbs(title):
    """No file is imported, directly or not, by one that stands after it in the walk."""
    files = [file for file, _ in walk(title)]
    for place, file in enumerate(files):
        seen, ahead = set(), [file]
        while ahead:
            one = ahead.pop()
            if one not in seen:
                seen.add(one)
                ahead.extend(files_imported(PACKAGE / one))
        climbs = seen.intersection(files[:place])
        assert not climbs, f"{file} reaches back to {sorted(climbs)}"


def test_each_note_is_short_and_has_its_line_in_the_design():
    notes = []
    for path in FILES:
        for note in NOTE.finditer(path.read_text()):
            notes.append((note[1], name_of(path)))
            assert note[0].count("\n") < 8, note[1]
    cited = re.findall(r"\[Note: ([^\]]*)\] in `([\w/]+\.py)`", PAGE.read_text())
    assert sorted(cited) == sorted(notes)

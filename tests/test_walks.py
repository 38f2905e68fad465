"""The walks of docs/design.md: each step's file has that function, and none climbs."""

import ast
import re
from pathlib import Path

import pytest
from test_layers import files_imported

import megatron_offload

PACKAGE = Path(megatron_offload.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design.md"
WALKS = ("A saved tensor", "`max_inflight_bytes`", "A plan")
STEP = re.compile(r"^\d+\. `([\w/]+\.py)`:? (.*)$")


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

"""What others touch of ours, and what is replaced of theirs: one table of docs/megatron.md.

Sources of megatron-core are parsed, not imported, in the versions that are here.
"""

from __future__ import annotations

import ast
import re

import pytest
from processes import LATER, ROOT
from test_signatures import SOURCE, source_of

from megatron_offload import fine_grained_activation_offload as facade
from megatron_offload.run import launch

INTERFACE = "FineGrainedActivationOffloadingInterface"
MANAGER = "PipelineOffloadManager"
MODULE = SOURCE.stem
ROW = re.compile(r"^\| (the module|`[\w.]+`) \| ((?:`\w+` ?)+) \| (.+) \|$", re.MULTILINE)


def contract():
    """Return names by what they are of."""
    text = (ROOT / "docs" / "megatron.md").read_text().partition("\n## What is relied on\n")[2]
    found = {}
    for owner, names, _ in ROW.findall(text):
        found.setdefault(owner.strip("`"), set()).update(re.findall(r"`(\w+)`", names))
    return found


TABLE = contract()


def test_the_table_is_read():
    assert len(TABLE) == 12
    assert len(TABLE[INTERFACE]) > 18


def test_a_trainer_switches_off_the_manager_that_it_finds():
    manager = facade.PipelineOffloadManager.get_instance()
    found = facade.PipelineOffloadManager.OFFLOAD_MGR
    assert found is manager
    for name in TABLE[MANAGER]:
        assert hasattr(facade.PipelineOffloadManager if name.isupper() else manager, name), name
    was_on = found.do_offload
    found.disable_offload()
    assert not found.do_offload
    found.enable_offload()
    assert found.do_offload
    assert was_on


def trees(version):
    """Yield what megatron-core's files hold that have to do with the module."""
    package = source_of(version).parents[1]
    for path in package.rglob("*.py"):
        text = path.read_text()
        if path.name != SOURCE.name and MODULE in text:
            yield path, ast.parse(text)


def touched(tree):
    """Yield what a file imports from the module, and touches of the class and of its objects."""
    classes, objects = {"off_interface"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(f".{MODULE}"):
            for alias in node.names:
                yield "the module", alias.name
                if alias.name == INTERFACE:
                    classes.add(alias.asname or alias.name)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).removeprefix("self.")
            if called in classes:
                objects.update(ast.unparse(t).removeprefix("self.") for t in node.targets)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("self.")
            if owner in classes | objects:
                yield INTERFACE, node.attr


@pytest.mark.parametrize("version", ["0.16", "later"])
def test_the_table_has_all_that_megatron_core_touches(version):
    found = {(owner, name) for _, tree in trees(version) for owner, name in touched(tree)}
    assert {name for owner, name in found if owner == INTERFACE} >= {"init_chunk_handler", "reset"}
    missing = {(owner, name) for owner, name in found if name not in TABLE[owner]}
    assert not missing


def definitions(version):
    """Return the names that megatron-core's classes define, by class."""
    package = source_of(version).parents[1]
    places = ("transformer/transformer_config", "models/gpt/gpt_model", "tensor_parallel/random")
    files = [f"{place}.py" for place in places]
    found = {}
    for tree in (ast.parse((package / file).read_text()) for file in files):
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            members = [getattr(m, "name", None) or getattr(m, "target", None) for m in node.body]
            names = (m if isinstance(m, str) else getattr(m, "id", None) for m in members)
            found[node.name] = set(filter(None, names))
    return found


@pytest.mark.parametrize("version", ["0.16", "later"])
@pytest.mark.parametrize("owner", ["TransformerConfig", "GPTModel", "CheckpointWithoutOutput"])
def test_megatron_core_has_what_install_replaces(version, owner):
    assert TABLE[owner] <= definitions(version)[owner]


@pytest.mark.parametrize("version", ["0.16", "later"])
def test_megatron_core_checkpoints_layers_where_install_looks(version):
    package = source_of(version).parents[1]

    def names(place):
        path = package / f"{place}.py"
        nodes = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
        return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

    assert names("tensor_parallel/random") >= TABLE["tensor_parallel"]
    loss = "tensor_parallel.cross_entropy"
    assert names("tensor_parallel/cross_entropy") >= TABLE[loss]
    assert "te_checkpoint" in names("extensions/transformer_engine")
    layer = "MultiTokenPredictionLayer"
    assert names("transformer/multi_token_prediction") >= {layer} | TABLE[layer]
    in_block = names("transformer/transformer_block") >= TABLE["TransformerBlock"]
    assert in_block != ("checkpointed_forward" in names("recompute"))


@pytest.mark.parametrize("module", [name for name in TABLE if name.startswith("megatron.")])
def test_megatron_has_what_the_launcher_replaces(module):
    path = LATER.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        pytest.skip(f"no {module} in {LATER}")
    names = TABLE[module]
    assert names <= {getattr(node, "name", "") for node in ast.parse(path.read_text()).body}
    source = (ROOT / launch.__file__).read_text()
    assert {name for name in names if name in source} == names

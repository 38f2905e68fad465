"""Every call form of both eras' documented module fits the callable of the same name here.

The forms are read off megatron-core's sources, which are not imported.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
from processes import LATER, later

from megatron_offload import fine_grained_activation_offload as facade
from megatron_offload.megatron_api.manager import chunk_arguments

SOURCE = Path("megatron/core/pipeline_parallel/fine_grained_activation_offload.py")

VALUES = {
    "pp_rank": 0,  # so that three bare positions are a form of their own
    "vp_size": 2,
    "vp_stage": 1,
    "min_offloaded_tensor_size": 4096,
    "delta_offload_bytes_across_pp_ranks": 7,
    "activation_offload_fraction": 0.25,
    "max_inflight_offloads": 5,
    "name": "core_attn",
}


def source_of(version):
    if version == "later":
        return later() / SOURCE
    spec = importlib.util.find_spec("megatron")
    folders = list(spec.submodule_search_locations) if spec is not None else []
    for folder in folders:
        path = Path(folder).parent / SOURCE
        if path.is_file() and LATER not in path.parents:
            return path
    pytest.skip("megatron-core is not installed")


def signature_of(function, *, drop_first):
    """Turn a parsed definition into a signature; defaults stand for themselves only by presence."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    num_required = len(names) - len(arguments.defaults)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kind, **({} if i < num_required else {"default": None}))
        for i, name in enumerate(names)
    ]
    if arguments.vararg is not None:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    return inspect.Signature(parameters[1:] if drop_first else parameters)


def is_a(kind, function):
    """Whether a parsed function is decorated so: a static method, or a property."""
    return any(isinstance(d, ast.Name) and d.id == kind for d in function.decorator_list)


def is_public(name):
    return not name.startswith("_") or name in ("__init__", "__enter__", "__exit__")


def definitions(path):
    """Yield owner and name of all that is public, and the signature of what can be called."""
    for node in ast.parse(path.read_text()).body:
        for target in getattr(node, "targets", ()):
            yield "", target.id, None
        if isinstance(node, ast.FunctionDef):
            yield "", node.name, signature_of(node, drop_first=False)
        if not isinstance(node, ast.ClassDef):
            continue
        yield "", node.name, None
        is_function = any(ast.unparse(base).endswith("Function") for base in node.bases)
        for member in (one for one in node.body if isinstance(one, ast.FunctionDef)):
            if is_function and member.name == "forward":
                yield node.name, "apply", signature_of(member, drop_first=True)
            elif not is_function and is_public(member.name):
                drop_first = not is_a("staticmethod", member)
                signature = signature_of(member, drop_first=drop_first)
                yield node.name, member.name, None if is_a("property", member) else signature


def calls(signature):
    """Yield arguments for every way to write a call: so many by position, the rest by name."""
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    num_required = sum(p.default is p.empty for p in parameters)
    for num_given in range(num_required, len(parameters) + 1):
        given = [(p.name, VALUES.get(p.name, object())) for p in parameters[:num_given]]
        for num_positional in range(num_given + 1):
            args = tuple(value for _, value in given[:num_positional])
            yield args, dict(given[num_positional:]), dict(given)


def ours(owner, name):
    """Return the signature of what is called so here."""
    holder = getattr(facade, owner) if owner else facade
    if name == "__init__":
        return inspect.signature(holder)
    # What `apply` takes is what forward takes; newer torch gives it no signature of its own.
    name = "forward" if name == "apply" else name
    signature = inspect.signature(getattr(holder, name))
    own = inspect.getattr_static(holder, name)
    if not owner or (isinstance(own, (staticmethod, classmethod)) and name != "forward"):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@pytest.mark.parametrize("version", ["0.16", "later"])
def test_every_public_name_of_megatrons_module_exists(version):
    found = [(owner, name) for owner, name, _ in definitions(source_of(version)) if is_public(name)]
    assert len(found) > 80
    missing = [
        f"{owner}.{name}"
        for owner, name in found
        if not hasattr(getattr(facade, owner) if owner else facade, name)
    ]
    assert missing == []


@pytest.mark.parametrize("version", ["0.16", "later"])
def test_every_call_form_of_megatrons_module_binds(version):
    num_calls = 0
    for owner, name, signature in definitions(source_of(version)):
        if signature is None or not is_public(name):
            continue
        mine = ours(owner, name)
        for args, kwargs, _ in calls(signature):
            try:
                mine.bind(*args, **kwargs)
            except TypeError as error:
                pytest.fail(f"{owner}.{name}{signature}: {len(args)} args, {[*kwargs]}: {error}")
            num_calls += 1
    assert num_calls > 150


@pytest.mark.parametrize("version", ["0.16", "later"])
def test_a_chunk_s_arguments_are_read_by_their_right_names(version):
    found = {name: signature for _, name, signature in definitions(source_of(version))}
    for args, kwargs, expected in calls(found["init_model_chunk_offload_handler"]):
        found = chunk_arguments(*args, **kwargs)
        assert {key: found[key] for key in expected} == expected, (args, kwargs)


@pytest.mark.parametrize("args", [(None, None, 64), (1, 0, 0), (2, 1, 1024), (4, None, 0)])
def test_three_positions_in_the_documented_form(args):
    found = chunk_arguments(*args)
    names = ("vp_size", "vp_stage", "min_offloaded_tensor_size")
    assert tuple(found[name] for name in names) == args
    assert "pp_rank" not in found


@pytest.mark.parametrize("args", [(0, 1, 0), (1, 1, 0), (1, 2, 1), (3, 4, 3), (0, None, 0)])
def test_three_positions_that_only_the_later_form_allows(args):
    names = ("pp_rank", "vp_size", "vp_stage")
    expected = dict(zip(names, args, strict=True)) | {"min_offloaded_tensor_size": 1 << 20}
    assert chunk_arguments(*args).items() >= expected.items()


def test_arguments_of_no_form_name_both():
    with pytest.raises(TypeError, match=r"begin with \(1, size=2\); .*\(vp_size.* or \(pp_rank"):
        chunk_arguments(1, size=2)


def test_later_spellings_beyond_0_19_bind():
    inspect.signature(facade.print_offload_summary_table).bind(
        {}, local_duplicate_summary={}, process_group=None
    )
    interface = facade.FineGrainedActivationOffloadingInterface
    inspect.signature(interface.reset).bind(process_group=None)
    inspect.signature(interface.forward_record).bind()
    inspect.signature(interface.backward_record).bind(object())

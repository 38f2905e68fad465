"""Run a script of Megatron-LM, or of a trainer over megatron-core, with this package's offload.

reads    SCRIPT, which gets all words behind it; --offload-config
prints   what the script does; on rank 0, once the plan has converged, one line about it, and in
         the end one if no forward came to offload
writes   what the script does; --offload-report

The flags below are the script's too, where it parses its own by megatron.training: its --help lists
them, and what stands behind SCRIPT wins. Offload is on unless the configuration has enabled: false,
with Megatron's --offload-modules if they are given; these may be mlp_fc1, mlp_act, mlp_fc2,
expert_fc2, shared_experts, router, layer, layer_input and patterns (decoder.layers.*.mlp) too.
Under torchrun: torchrun ... -m megatron_offload.run SCRIPT ...

exit status: 0 the script ended well, 1 no such module, 2 bad input, others are the script's

example: megatron-offload run --offload-policy auto --offload-report runs/job pretrain_gpt.py ...
"""

from __future__ import annotations

import argparse
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_offload.cli.options import parse_known
from megatron_offload.errors import ConfigError
from megatron_offload.run.flags import add_flags


def read(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the options: those before the script, and the script with its words."""
    add_flags(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT", help="the job's own program")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parse_known(parser, words)


def run(given: argparse.Namespace) -> Callable[[], object]:
    """Put offload in place; return the script's run, whose errors and exit are its own."""
    path = Path(given.script).absolute()
    if not (given.module or path.exists()):
        raise ConfigError(f"can't open file '{path}': no such file or directory")
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if given.module else path.resolve().parent)
    _check(given.script, is_module=given.module)
    from megatron_offload.run.launch import prepare, run_program

    prepare({name: value for name, value in vars(given).items() if name.startswith("offload_")})
    sys.argv[:] = [given.script, *given.words]
    run_module = partial(runpy.run_module, run_name="__main__", alter_sys=True)
    program = partial(run_module if given.module else _run_script, given.script)
    return partial(run_program, given.script, program)


def _check(name: str, *, is_module: bool) -> None:
    """End as Python does where there is no such module, or no program in a folder or archive."""
    try:
        if is_module:
            runpy._get_module_details(name, runpy._Error)  # type: ignore[attr-defined]
    except runpy._Error as error:  # type: ignore[attr-defined]
        sys.exit(f"{sys.executable}: {error}")
    path = str(Path(name).absolute())
    importer: Any = None if is_module else pkgutil.get_importer(path)
    if importer is not None and importer.find_spec("__main__") is None:
        sys.exit(f"{sys.executable}: can't find '__main__' module in {path!r}")


def _run_script(name: str) -> None:
    """Run a script as Python does, which gives it its whole path and leaves it the name it has."""
    path = Path(name).absolute()
    if path.suffix == ".pyc" or pkgutil.get_importer(str(path)) is not None:  # a folder, or zipped
        runpy.run_path(str(path), run_name="__main__")
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec"), vars(main))  # noqa: S102 - the user's own

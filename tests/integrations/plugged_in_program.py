"""Trains megatron-core's GPT as trainers over it do, with the plug-in and what their pages tell.

The arguments are modules to offload. The last line of the output is JSON: of a job that checks its
configuration as it makes it, and of one that does so by a call of its own, what was offloaded and
what was said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import sys

import torch
from megatron_programs import build_config, build_model, load_megatron, one_process, train


def make_late(**options):
    """Make a configuration as Megatron-Bridge does: settings first, checks later."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class Config(TransformerConfig):
        def __post_init__(self):
            pass

        def finalize(self):
            TransformerConfig.__post_init__(self)

    names = ("fine_grained_activation_offloading", "offload_modules")
    settings = {name: options.pop(name) for name in names}
    config = Config(**options)
    for name, value in settings.items():
        setattr(config, name, value)
    config.finalize()
    return config


def plug_in(make, expected):
    from megatron_offload.engine.manager import PipelineOffloadManager as Engine
    from megatron_offload.fine_grained_activation_offload import PipelineOffloadManager
    from megatron_offload.integrations import megatron_core

    Engine.instance = None
    sys.modules.pop("megatron_offload.auto", None)
    settings = {"fine_grained_activation_offloading": True, "offload_modules": sys.argv[1:]}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        importlib.import_module("megatron_offload.auto")
        config = build_config(settings, offload=True, make=make)
        found, counts = train(build_model(config), "", PipelineOffloadManager.get_instance())
    megatron_core.uninstall()
    return {
        "equal": all(map(torch.equal, expected, found)),
        "moved": counts[-1]["names"],
        "left": counts[-1]["left"],
        "said": said.getvalue(),
    }


def main():
    load_megatron()
    import megatron.core

    torch.compiler.set_stance("force_eager")
    with one_process():
        expected, _ = train(build_model(build_config({}, offload=False)), "")
        found = [plug_in(make, expected) for make in (None, make_late)]
    sys.stdout.write(json.dumps({"version": megatron.core.__version__, "jobs": found}) + "\n")


if __name__ == "__main__":
    main()

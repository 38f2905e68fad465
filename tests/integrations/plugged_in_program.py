"""Trains megatron-core's GPT as trainers over it do, with what their pages tell a user to write.

The argument is JSON: by trainer, what is imported, the settings, and whether they are checked by a
call of their own. The last line of the output is JSON: by trainer, what was offloaded and what was
said.
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


def plug_in(module, settings, is_late):
    from megatron_offload import PipelineOffloadManager
    from megatron_offload.integrations import megatron_core

    PipelineOffloadManager.instance = None
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        importlib.import_module(module)
        config = build_config(settings, offload=True, make=make_late if is_late else None)
        found, counts = train(build_model(config), "", PipelineOffloadManager.get_instance())
    megatron_core.uninstall()
    for name in (module, "megatron_offload.auto"):
        sys.modules.pop(name, None)
    return {
        "numbers": found,
        "moved": counts[-1]["names"],
        "left": counts[-1]["left"],
        "said": said.getvalue(),
    }


def main():
    load_megatron()
    import megatron.core

    torch.compiler.set_stance("force_eager")
    found = {}
    with one_process():
        expected, _ = train(build_model(build_config({}, offload=False)), "")
        for trainer, plan in json.loads(sys.argv[1]).items():
            found[trainer] = one = plug_in(**plan)
            pairs = zip(expected, one.pop("numbers"), strict=True)
            one["equal"] = all(torch.equal(*pair) for pair in pairs)
    sys.stdout.write(json.dumps({"version": megatron.core.__version__, "trainers": found}) + "\n")


if __name__ == "__main__":
    main()

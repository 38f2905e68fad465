"""A job's own script: parses, validates and configures as Megatron's pretrain does.

The last line of its output is JSON. The words after ``--then`` say how it ends, and ``OTHERS`` in
the environment has the words of jobs that are looked at in the same process, by name.
"""

import contextlib
import io
import json
import os
import sys

at_start = {"name": __name__, "argv": sys.argv[:], "path": sys.path[0]}

import launcher_beside  # noqa: E402 - what lies beside the script
import megatron.core  # noqa: E402
from megatron.core.pipeline_parallel import utils  # noqa: E402
from megatron.training import arguments, initialize  # noqa: E402


def add_own(parser):
    parser.add_argument("--then", default="")
    return parser


def config_of(args):
    from megatron.core.transformer import transformer_config

    names = ("num_layers", "hidden_size", "num_attention_heads")
    names += ("recompute_granularity", "recompute_method", "recompute_num_layers")
    graphs = ("cuda_graph_impl", "cuda_graph_warmup_steps")
    graphs += ("fine_grained_offloading_max_inflight_offloads",)
    names += tuple(name for name in graphs if hasattr(args, name))
    return transformer_config.TransformerConfig(
        **{name: getattr(args, name) for name in names},
        fine_grained_activation_offloading=args.fine_grained_activation_offloading,
        offload_modules=args.offload_modules,
    )


# Where pretrain finds it: in 0.16 under a name that another module has imported.
holder = initialize if hasattr(initialize, "validate_args") else arguments


def found_with(words):
    """Return what a job finds that is given words."""
    sys.argv[1:] = words
    args = holder.parse_args(add_own)
    plain = {key: value for key, value in vars(args).items() if key.startswith("offload_")}
    given = args.offload_modules
    before = list(given)
    holder.validate_args(args)
    config = config_of(args)
    config_of(args)
    if hasattr(utils, "set_ideal_affinity_for_current_gpu"):
        utils.set_ideal_affinity_for_current_gpu()  # raises where cuda-python is missing
    from megatron_offload import PipelineOffloadManager

    settings = PipelineOffloadManager.get_instance().config
    return {
        "then": args.then,
        "plain": plain,
        "unchanged": given == before,
        "copied": config.offload_modules is not args.offload_modules,
        "on": config.fine_grained_activation_offloading,
        "modules": config.offload_modules,
        "replays": settings.whole_step_graph,
        "warmup": getattr(config, "cuda_graph_warmup_steps", None),
        "seen": getattr(args, "seen", None),
        "variable": os.environ.get("NVTE_CPU_OFFLOAD_V1"),
        "policy": settings.policy and settings.policy.model_dump(mode="json", exclude_unset=True),
        "recompute": settings.recompute,
    }


def outcome(words):
    """Return what another job finds, or how it ends and what it has said."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            return found_with(words)
        except (SystemExit, Exception) as error:  # noqa: BLE001 - the test looks at it
            return {"error": repr(error), "said": said.getvalue()}


if __name__ == "__main__":
    found = {**at_start, **found_with(sys.argv[1:])}
    others = json.loads(os.environ.get("OTHERS", "{}"))
    found["others"] = {name: outcome(words) for name, words in others.items()}
    found["version"], found["beside"] = megatron.core.__version__, launcher_beside.__name__
    from megatron_offload.integrations import megatron_core

    found["installed"] = megatron_core.is_installed()
    megatron_core.uninstall()
    found["restored"] = holder.validate_args.__module__ == "megatron.training.arguments"
    found["restored"] &= not hasattr(holder.validate_args, "__wrapped__")
    sys.stdout.write(json.dumps(found) + "\n")
    if found["then"] == "raise":
        raise RuntimeError("the job's own")
    sys.exit(int(found["then"] or 0))

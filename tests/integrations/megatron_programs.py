"""Trains megatron-core's own GPT on a CPU, without and with this package, and prints what differs.

Run in a process of its own, because both the version of megatron-core (the first on PYTHONPATH) and
the order of imports are what is tested:

    python tests/integrations/megatron_programs.py imports-first dense moe

The last line of the output is JSON: for each case its findings.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from megatron_cases import ATTENTION, CASES
from megatron_parts import GroupedLinear, LatentAttention, overlapping
from programs import Capturing

torch.set_num_threads(1)

SEQUENCE, VOCABULARY, MICROBATCHES, STEPS = 16, 64, 3, 3


def load_megatron():
    for name in ("models.gpt", "models.gpt.gpt_layer_specs", "pipeline_parallel.schedules"):
        importlib.import_module(f"megatron.core.{name}")


def grouped_experts(provider, *_):
    """Return megatron-core's TEGroupedMLP on `GroupedLinear`, in the form its version wants."""
    from megatron.core.transformer.moe import experts

    if hasattr(experts, "GroupedMLPSubmodules"):
        submodules = experts.GroupedMLPSubmodules(
            linear_fc1=GroupedLinear, linear_fc2=GroupedLinear
        )
        return functools.partial(experts.TEGroupedMLP, submodules=submodules)
    return experts.TEGroupedMLP, experts.MLPSubmodules(
        linear_fc1=GroupedLinear, linear_fc2=GroupedLinear
    )


def build_config(overrides, *, offload, make=None):
    from megatron.core.transformer import transformer_config

    is_latent = overrides.get("multi_latent_attention", False)
    kind = "MLATransformerConfig" if is_latent else "TransformerConfig"
    options = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "min_offloaded_tensor_size": 0,
        "offload_modules": ATTENTION,
        "fine_grained_activation_offloading": True,
        **overrides,
    }
    if not offload:
        for name in [*options]:
            if "offload" in name:
                del options[name]
    return (make or getattr(transformer_config, kind))(**options)


def build_model(config):
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils

    if config.moe_grouped_gemm:
        LocalSpecProvider.grouped_mlp_modules = grouped_experts
    if config.multi_latent_attention:
        from megatron.core.transformer import multi_latent_attention

        for name in ("TELinear", "TEColumnParallelLinear"):
            if not isinstance(getattr(multi_latent_attention, name), type):  # asked for it
                setattr(multi_latent_attention, name, type(name, (), {}))
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16.1 asks for it by name even where TransformerEngine is absent.
        moe_utils.te_general_gemm = None
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    with contextlib.ExitStack() as stack:
        if config.multi_latent_attention:
            stack.enter_context(
                mock.patch.object(LocalSpecProvider, "core_attention", return_value=LatentAttention)
            )
        specification = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            multi_latent_attention=config.multi_latent_attention,
            qk_layernorm=config.qk_layernorm,
        )
    further = None
    if config.mtp_num_layers:
        further = get_gpt_mtp_block_spec(config, specification, use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=specification,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        mtp_block_spec=further,
    ).to(config.params_dtype)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return tokens[:, :-1], positions, mask, tokens[:, 1:]


def forward_step(data, model, return_schedule_plan=False):
    tokens, positions, mask, labels = next(data)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens, positions, mask, labels=labels)

    def loss(output):
        mean = output.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


def one_pass(model, first_seed, *, forward_only=False):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parts = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([batch(first_seed + i) for i in range(MICROBATCHES)]),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=forward_only,
    )
    return [part["loss"].clone() for part in parts]


def evaluate(model, case):
    if "evaluation" not in case:
        return
    model.eval()
    # With grad on, groups are recorded whose backward never comes.
    with torch.set_grad_enabled(case == "evaluation-with-grad"):
        one_pass(model, 900, forward_only=True)
    model.train()


def is_captured(case, step, manager):
    """Whether a step is captured as if into a graph: the last of some cases."""
    return "captured" in case and manager is not None and step == STEPS - 1


def train(model, case, manager=None):
    """Return all losses and gradients of three steps, and what the manager counted in each."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(2)
    model_parallel_cuda_manual_seed(2, force_reset_rng=True)
    nothing = contextlib.nullcontext()
    numbers, counts = [], []
    for step in range(STEPS):
        evaluate(model, case)
        model.zero_grad()
        with manager.backend.capture() if is_captured(case, step, manager) else nothing:
            numbers += one_pass(model, 100 * step)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        numbers += [grad.clone() for grad in gradients.values() if grad is not None]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        if manager is not None:
            stats = manager.last_step
            counts.append(
                {
                    "offloaded_bytes": stats.offloaded_bytes,
                    "reloaded_bytes": stats.reloaded_bytes,
                    "kept": len(manager.learner.kept),
                    "names": sorted(
                        n
                        for n, g in stats.by_name.items()
                        if g.offloaded_bytes or g.recomputed_bytes
                    ),
                    "recomputed": {n: g.recomputed_bytes for n, g in stats.by_name.items()},
                    "remade": sorted(stats.recomputed_bytes_by_unit),
                    "groups": {name: g.num_groups for name, g in stats.by_name.items()},
                    "summary": manager.offload_summary_bytes,
                    "left": manager.state_of(),
                    "is_captured": stats.is_captured,
                }
            )
    return numbers, counts


def run_case(case, *, built_first):
    from megatron_offload.config import OffloadConfig
    from megatron_offload.fine_grained_activation_offload import PipelineOffloadManager
    from megatron_offload.frontends.modules import offload_modules
    from megatron_offload.integrations import megatron_core

    overrides = dict(CASES[case])
    marks_mlp = "recomputes" in overrides
    recomputes = overrides.pop("recomputes", None)
    rows = overrides.pop("rows", None)
    expected, _ = train(build_model(build_config(overrides, offload=False)), case)
    manager = PipelineOffloadManager.get_instance()
    more = {} if recomputes is None else {"recompute": [*recomputes], "checking": True}
    settings = OffloadConfig(
        **({"policy": "modules"} if rows is None else {"rows": rows}),
        backend="simulated",
        host_slab_bytes=1 << 20,
        max_inflight_bytes=0,
        prefetch_bytes=0,
        **more,
    )
    manager.configure(settings, backend=Capturing(settings.simulated))
    # Megatron itself refuses some names.
    if built_first and not ("beyond" in case or "inputs" in case):
        megatron_core.uninstall()
        model = build_model(build_config(overrides, offload=True))
        megatron_core.install()
    else:
        model = build_model(build_config(overrides, offload=True))
    marks = contextlib.nullcontext()
    if marks_mlp:  # Megatron's own call sites leave most of the MLP out
        marks = offload_modules(model, ["decoder.layers.*.mlp"])
    with marks:
        found, counts = train(model, case, manager)
    return {
        "equal": len(found) == len(expected) and all(map(torch.equal, expected, found)),
        "finite": all(bool(torch.isfinite(number).all()) for number in found),
        "steps": counts,
        "recomputed": [
            hasattr(getattr(layer.mlp, "experts", None), "activation_checkpoint")
            for layer in model.decoder.layers
        ],
    }


def namespaces():
    """Return what every megatron module, and the class that layers call, holds; by identity."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as target
    from megatron.core.tensor_parallel.random import (
        CheckpointWithoutOutput,
        CheckpointWithoutOutputFunction,
    )

    owners = {n: m for n, m in sys.modules.items() if n.startswith("megatron.")}
    owners["interface"] = target.FineGrainedActivationOffloadingInterface
    owners["checkpoint"] = CheckpointWithoutOutput
    owners["checkpoint's function"] = CheckpointWithoutOutputFunction
    return {
        f"{owner}:{name}": id(value)
        for owner, module in owners.items()
        for name, value in vars(module).items()
        if isinstance(value, (type, types.FunctionType, types.ModuleType, staticmethod))
    }


def check_references():
    """Install and uninstall, and say who held what meanwhile."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as target
    from megatron.core.transformer import attention

    from megatron_offload import fine_grained_activation_offload as facade
    from megatron_offload.integrations import megatron_core

    megatron_core.uninstall()
    original = target.FineGrainedActivationOffloadingInterface
    before = namespaces()
    megatron_core.install()
    megatron_core.install()
    ours = facade.FineGrainedActivationOffloadingInterface
    shared = {
        name
        for name, value in vars(facade).items()
        if hasattr(target, name) and getattr(value, "__module__", "")[:16] == "megatron_offload"
    } - {ours.__name__}
    found = {
        "module": all(getattr(target, name) is getattr(facade, name) for name in shared),
        "num_shared": len(shared),
        "reference": attention.off_interface is original,
        "class": original.__init__ is ours.__init__ and original.reset is ours.reset,
        "manager": target.PipelineOffloadManager.get_instance()
        is facade.PipelineOffloadManager.get_instance(),
    }
    megatron_core.uninstall()
    megatron_core.uninstall()
    after = namespaces()
    found["changed"] = sorted(n for n in before if before[n] != after.get(n))
    found["added"] = sorted(n for n in after if n not in before)
    megatron_core.install()
    return found


@contextlib.contextmanager
def one_process():
    from megatron.core import parallel_state

    from megatron_offload.integrations.megatron_cpu import cpu_bridges

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            with overlapping(), cpu_bridges():
                parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
                yield
                parallel_state.destroy_model_parallel()
        finally:
            dist.destroy_process_group()


def main(order, *cases):
    from megatron_offload.integrations import megatron_core

    built_first = order == "imports-first"
    if not built_first:
        megatron_core.install()
    load_megatron()
    import megatron.core

    results = {}
    # Fused functions are megatron-core's own compiled ones; what they compute is the same.
    torch.compiler.set_stance("force_eager")
    with one_process():
        for case in cases:
            results[case] = run_case(case, built_first=built_first)
        references = check_references()
    version = megatron.core.__version__
    findings = {"version": version, "cases": results, "references": references}
    sys.stdout.write("\n" + json.dumps(findings) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

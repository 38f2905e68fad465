"""One rank of one mode of `bench_peers.py`: builds the model, takes the steps, writes what it saw.

    echo | python bench_peers_worker.py SPEC.json

`bench_peers.py` starts it once per rank, with the rank in the environment. It imports what it needs
and waits for a line before it takes the device, so that the mode before it may still run. What
differs between the modes is one class each, in `bench_peers_modes.py`; the model, the data and the
steps know nothing of it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_peers_measure import numbers_of, work
from bench_peers_modes import FULL, MODES

from megatron_offload.backends import cuda
from megatron_offload.machine.bandwidth import BLOCK_BYTES, Link, median_rates
from megatron_offload.train.data import digest


class _LinkBesideOthers(Link):
    """Copies when all ranks do."""

    def start(self, *names):
        dist.barrier()
        super().start(*names)


def measure_link():
    """Return what all ranks together get of the link to the host, before there is a model.

    That is this rank's GB/s: ``d2h`` and ``h2d`` alone, ``both_d2h`` and ``both_h2d`` at once, of
    plain blocks, page-locked as this package takes them.
    """
    links = [_LinkBesideOthers(cuda.CudaBackend(), BLOCK_BYTES)]
    median_rates(links, "d2h", "h2d")  # a link that was idle may have to wake
    ((d2h,),), ((h2d,),), ((both_d2h, both_h2d),) = (
        median_rates(links, *names) for names in (("d2h",), ("h2d",), ("d2h", "h2d"))
    )
    return {"d2h": d2h, "h2d": h2d, "both_d2h": both_d2h, "both_h2d": both_h2d}


_EXPERTS = {
    "moe_ffn_hidden_size": 1408,
    "moe_router_topk": 4,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}


def build_chunks(spec, mode, device, *, layer_spec=None, config_type=None, make=None):
    """Build this rank's chunks; parameters and persistent gradients of the same dtype.

    ``make`` makes a chunk in place of ``GPTModel``, which it gets the arguments of.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if spec["dtype"] == "bf16" else torch.float32
    virtual = spec["vpp"] if spec["vpp"] > 1 else None
    full, num_experts = FULL if spec.get("full_recompute") else {}, spec.get("experts")
    experts = _EXPERTS | {"num_moe_experts": num_experts} if num_experts else {}
    experts |= {"expert_model_parallel_size": spec["ep"]} if spec.get("ep", 1) > 1 else {}
    config = (config_type or TransformerConfig)(
        num_layers=spec["layers"],
        hidden_size=spec["hidden"],
        num_attention_heads=spec["heads"],
        ffn_hidden_size=4 * spec["hidden"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=spec["normalization"],
        layernorm_epsilon=1e-5,
        add_bias_linear=False,
        pipeline_model_parallel_size=spec["pp"],
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=spec["dtype"] == "bf16",
        use_cpu_initialization=not on_gpu,
        # Two ranks that are each other's previous and next must not batch their requests.
        batch_p2p_comm=on_gpu and virtual is None,
        overlap_p2p_comm=virtual is not None,
        deallocate_pipeline_outputs=True,
        deterministic_mode=on_gpu and spec["deterministic"],
        # Inductor would compile the fused kernels, for nothing that matters here.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        **{"activation_func": F.gelu, **full, **mode.transformer_options()},
        **experts,
    )
    if layer_spec is None and on_gpu:
        layer_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=num_experts is not None
        )
    elif layer_spec is None:
        layer_spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=spec["normalization"])
    chunks = []
    for stage in range(spec["vpp"]):
        vp_stage = stage if virtual else None
        chunk = (make or GPTModel)(
            config=config,
            transformer_layer_spec=layer_spec,
            vocab_size=spec["vocabulary"],
            max_sequence_length=spec["seq"],
            pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type=spec["positions"],
            vp_stage=vp_stage,
        ).to(device=device, dtype=dtype)
        for parameter in chunk.parameters():
            parameter.grad = torch.zeros_like(parameter)
        chunks.append(chunk)
    return chunks


class Program:
    """The steps: the same microbatches and the same schedule in every mode."""

    def __init__(self, spec, mode, chunks, device):
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.spec, self.mode, self.chunks, self.device = spec, mode, chunks, device
        self.forward_backward = get_forward_backward_func()
        if spec.get("whole_step_graph"):
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            self.forward_backward = FullCudaGraphWrapper(self.whole_step, sys.maxsize)
        self.gradients = [p.grad for chunk in chunks for p in chunk.parameters()]
        self.replicas = replicas_of(chunks) if spec.get("dp", 1) > 1 else ()
        # Each replica has data of its own.
        self.first_seed = spec["seed"] + 1_000_000 * parallel_state.get_data_parallel_rank()
        self.positions = torch.arange(spec["seq"], device=device).expand(spec["mbs"], -1)

    def average(self, times_ms):
        """Return what counts of the measured steps' times."""
        return statistics.median(times_ms)

    def capture_next(self):
        """Capture the step that comes next, where steps are captured."""
        if self.spec.get("whole_step_graph"):
            self.forward_backward.cuda_graph_warmup_steps = self.forward_backward.curr_iter(
                "training"
            )

    def whole_step(self, **options):
        """Take what a graph has of a step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses = get_forward_backward_func()(**options)
        self.mode.end_step()
        return losses

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, number, *, forward_only=False):
        """Take a step; return its time in ms, its loss (None but on the last stage), its hash."""
        step_ms, _, losses = self.timed_step(number, forward_only=forward_only)
        loss = None
        if losses:
            loss = float(torch.stack([entry["loss"] for entry in losses]).double().mean()).hex()
        return step_ms, loss, digest(self.gradients)

    def timed_step(self, number, *, forward_only=False):
        """Take a step; return its time in ms, the host's part of it, and the schedule's losses."""
        tokens = self.tokens(number)
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        torch._foreach_zero_(self.gradients)
        iterators = [iter([{"tokens": one} for one in tokens]) for _ in self.chunks]
        losses = self.forward_backward(
            forward_step_func=self.forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=self.spec["microbatches"],
            seq_length=self.spec["seq"],
            micro_batch_size=self.spec["mbs"],
            forward_only=forward_only,
        )
        if not self.spec.get("whole_step_graph"):
            self.mode.end_step()
        for gradient, group in self.replicas:
            dist.all_reduce(gradient, group=group)
        host_ms = (time.perf_counter() - start) * 1e3
        self.synchronize()
        return (time.perf_counter() - start) * 1e3, host_ms, losses

    def tokens(self, number):
        generator = torch.Generator(self.device).manual_seed(self.first_seed + number)
        size = (self.spec["microbatches"], self.spec["mbs"], self.spec["seq"] + 1)
        return torch.randint(
            self.spec["vocabulary"], size, device=self.device, generator=generator
        ).unbind()

    def own(self, part):
        """Return what is this rank's of a sequence: all."""
        return part.contiguous()

    def forward(self, iterator, model, return_schedule_plan=False):
        tokens = next(iterator)["tokens"]
        inputs, labels = self.own(tokens[:, :-1]), self.own(tokens[:, 1:])
        make = model.build_schedule_plan if return_schedule_plan else model
        with self.mode.forward_context():
            output = make(inputs, self.own(self.positions), None, labels=labels)
        self.mode.after_forward()
        return output, mean_loss


def replicas_of(chunks):
    """Return the gradients that several ranks have, each with the group of these."""
    from megatron.core import parallel_state

    dense = parallel_state.get_data_parallel_group()
    experts = parallel_state.get_expert_data_parallel_group()
    both = [
        (p.grad, dense if getattr(p, "allreduce", True) else experts)
        for chunk in chunks
        for p in chunk.parameters()
    ]
    return [(gradient, group) for gradient, group in both if group.size() > 1]


def mean_loss(losses):
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def join_ranks(kind, timeout_s):
    """Join all ranks; return this rank's device."""
    on_gpu = kind == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    return device


NEEDED = ("models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel.schedules")
NEEDED = tuple(f"megatron.core.{name}" for name in NEEDED)
"""What takes long to import."""


@contextlib.contextmanager
def prepared_megatron(*, on_gpu, is_deterministic):
    """Load megatron-core: with bridges for a CPU, or deterministic where that is asked for."""
    for name in NEEDED:
        importlib.import_module(name)
    with contextlib.ExitStack() as stack:
        if not on_gpu:  # its bridges reach the modules that are loaded
            from megatron.core.transformer.moe import moe_utils

            from megatron_offload.integrations import megatron_cpu

            # Some versions ask for it by this name where TransformerEngine is not installed.
            vars(moe_utils).setdefault("te_general_gemm", None)
            stack.enter_context(megatron_cpu.cpu_bridges())
        elif is_deterministic:
            use_deterministic_kernels()
        yield


def use_deterministic_kernels():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def run(spec, rank):
    """Build, warm up, measure; return this rank's numbers."""
    started = time.perf_counter()
    on_gpu = spec["device"] == "cuda"
    device = join_ranks(spec["device"], spec["timeout_s"])
    dist.barrier()  # no rank's start is part of what follows
    link_started = time.perf_counter()
    link_gbps = measure_link() if on_gpu else None
    link_s = time.perf_counter() - link_started
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with prepared_megatron(on_gpu=on_gpu, is_deterministic=spec["deterministic"]):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=spec["pp"],
            virtual_pipeline_model_parallel_size=spec["vpp"] if spec["vpp"] > 1 else None,
            expert_model_parallel_size=spec.get("ep", 1),
            create_gloo_process_groups=False,
        )
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(spec["seed"] + pp_rank)
        graphed = {"use_cudagraphable_rng": True} if spec.get("whole_step_graph") else {}
        model_parallel_cuda_manual_seed(spec["seed"] + pp_rank, force_reset_rng=True, **graphed)
        mode = MODES[spec["kind"]](spec)
        mode.prepare()
        chunks = build_chunks(spec, mode, device)
        mode.attach(chunks, pp_rank)
        program = Program(spec, mode, chunks, device)
        result = {"parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters())}
        result |= {"link_gbps": link_gbps, "link_s": link_s}
        result |= numbers_of(spec, program, started)
        dist.barrier()
    return result


if __name__ == "__main__":
    work(NEEDED, run)

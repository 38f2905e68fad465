"""Modes of `bench_peers.py` on a Llama of transformers with adapters, peft's or its own.

    yes | python bench_peers_lora.py SPEC.json

The model is built once for all modes of a process, and each leaves it as it was: adapters,
optimizer and random numbers begin anew, so that all see the same tokens and the same dropout. Times
are of the host, with one read of the loss a step. Bits are compared with ``--deterministic`` alone:
else attention's backward adds up in another order each time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import statistics
import time

import torch
from bench_peers_measure import numbers_of, work
from bench_peers_modes import Nothing, OursWhole, SaveOnCpu, Trl
from bench_peers_worker import Program, use_deterministic_kernels
from torch import nn
from torch.utils.checkpoint import checkpoint


def layers_of(model):
    return model.get_decoder().layers


class Adapted(nn.Module):
    """A frozen linear layer behind an adapter of its own dtype."""

    def __init__(self, base, rank):
        super().__init__()
        own = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, **own)
        self.up = nn.Linear(rank, base.out_features, **own)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.up(self.down(x)) * 2.0 + self.base(x)


class Checkpoint(Nothing):
    """Gradient checkpointing by transformers, of each layer or of the first ones."""

    def attach(self, chunks, pp_rank):
        (self.model,) = chunks
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers_of(self.model)[self.spec["arguments"].get("layers") :]:
            layer.gradient_checkpointing = "layers" not in self.spec["arguments"]

    def detach(self):
        self.model.gradient_checkpointing_disable()


class Selective(Nothing):
    """Torch's checkpoint around some parts of each layer."""

    def attach(self, chunks, pp_rank):
        self.parts = [
            layer.get_submodule(name)
            for layer in layers_of(chunks[0])
            for name in self.spec["modules"]
        ]
        for part in self.parts:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)

    def detach(self):
        for part in self.parts:
            del part.forward


@functools.cache
def inductor(budget):
    """Return torch's compiler with a budget; what it has compiled serves the next round too."""
    from torch._inductor.compile_fx import compile_fx

    def compiled(graph, inputs):
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return compiled


class Compiled(Nothing):
    def attach(self, chunks, pp_rank):
        (self.model,) = chunks
        torch._dynamo.config.recompile_limit = 64
        backend = inductor(self.spec["arguments"].get("compile", 1.0))
        for layer in layers_of(self.model):
            layer.compile(backend=backend, dynamic=None if "length" in self.spec else True)

    def detach(self):
        for layer in layers_of(self.model):
            layer._compiled_call_impl = None


class TrlOfModel(Trl):
    def prepare(self):
        self.make = importlib.import_module("trl.models.activation_offloading")

    def attach(self, chunks, pp_rank):
        self.context = self.make.get_act_offloading_ctx_manager(chunks[0])


class OursAroundForward(OursWhole):
    """This package's context around the model's forward, as a user has it."""

    def attach(self, chunks, pp_rank):
        from megatron_offload import get_act_offloading_ctx_manager

        options = {"config": self.read_config(), **self.spec["arguments"]}
        self.compiled = Compiled(self.spec)
        if options.pop("compile", None) is not None:
            self.compiled.attach(chunks, pp_rank)
        self.context = get_act_offloading_ctx_manager(chunks[0], **options)
        self.manager = self.context.manager

    def take_step(self, step):
        return step()

    def end_step(self):
        """Nothing is asked of the program; the next forward ends the step."""
        self.held_bytes = max(self.held_bytes, self.manager.last_step.peak_released_bytes)

    def detach(self):
        self.context.end_step()
        self.context.close()
        if "compile" in self.spec["arguments"]:
            self.compiled.detach()


KINDS = {
    "none": Nothing,
    "trl": TrlOfModel,
    "save_on_cpu": SaveOnCpu,
    "checkpoint": Checkpoint,
    "recompute-layers": Checkpoint,
    "selective": Selective,
    "compile": Compiled,
}


class FineTuning(Program):
    """Steps of the adapters' training; the base is frozen."""

    def __init__(self, spec, device):
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        self.spec, self.device, self.mode = spec, device, None
        torch.manual_seed(spec["seed"])
        config = LlamaConfig(
            hidden_size=spec["hidden"],
            intermediate_size=spec["ffn"],
            num_hidden_layers=spec["layers"],
            num_attention_heads=spec["heads"],
            num_key_value_heads=spec["kv_heads"],
            vocab_size=spec["vocabulary"],
            tie_word_embeddings=True,
        )
        dtype = torch.bfloat16 if spec["dtype"] == "bf16" else torch.float32
        with torch.device(device):
            model = LlamaForCausalLM(config).to(dtype)
        names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        if spec.get("own_adapters"):
            model.requires_grad_(False)
            for path, module in [*model.named_modules()]:
                if path.rpartition(".")[2] in names:
                    model.set_submodule(path, Adapted(module, spec["lora_rank"]))
        else:
            adapters = LoraConfig(
                r=spec["lora_rank"], lora_dropout=spec["lora_dropout"], target_modules=names
            )
            model = get_peft_model(model, adapters)
        self.model = model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.first = [p.detach().clone() for p in self.trained]
        # What a step leaves in the adapters tells of all gradients until then.
        self.gradients = self.trained if spec["deterministic"] else []

    def begin(self):
        """Begin a run: adapters and optimizer as at first."""
        with torch.no_grad():
            torch._foreach_copy_(self.trained, self.first)
        self.optimizer = torch.optim.AdamW(self.trained)

    def length(self, number):
        if "length" in self.spec:
            return self.spec["length"]
        longest = self.spec["seq"]
        return random.Random(f"{self.spec['seed']} {number}").randrange(longest // 4, longest + 1)

    def average(self, times_ms):
        """Return the median; of lengths that differ the mean, which is that of a token too."""
        return (statistics.median if "length" in self.spec else statistics.mean)(times_ms)

    def timed_step(self, number, *, forward_only=False):
        torch.manual_seed(self.spec["seed"] + number)
        size = (self.spec["mbs"], self.length(number))
        tokens = torch.randint(self.spec["vocabulary"], size, device=self.device)
        self.synchronize()
        start = time.perf_counter()
        with self.mode.forward_context():
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.mode.after_forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.mode.end_step()
        host_ms = (time.perf_counter() - start) * 1e3
        loss.item()
        return (time.perf_counter() - start) * 1e3, host_ms, [{"loss": loss.detach()}]


BUILT = {}
"""The program of this process, once there is one."""


def run(spec, rank):
    """Take the steps of a mode; return its numbers."""
    started = time.perf_counter()
    if not BUILT:
        if spec["device"] == "cpu":
            torch.set_num_threads(1)
        elif spec["deterministic"]:
            use_deterministic_kernels()
        BUILT["program"] = FineTuning(spec, torch.device(spec["device"]))
    program = BUILT["program"]
    program.mode = mode = KINDS.get(spec["kind"], OursAroundForward)(spec)
    program.begin()
    with contextlib.ExitStack() as stack:
        mode.prepare()
        mode.attach([program.model], rank)
        stack.callback(mode.detach)
        if isinstance(mode, OursAroundForward) and "length" in spec:
            mode.plan(lambda: program.step(0))
            program.begin()
        return numbers_of(spec, program, started) | {
            "parameters": sum(p.numel() for p in program.model.parameters())
        }


if __name__ == "__main__":
    work(("peft", "transformers"), run)

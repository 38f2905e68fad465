"""The modes that `bench_peers.py` compares, one class each: what differs from no offload.

A mode may prepare the process, add options to the TransformerConfig, attach itself to the built
chunks, wrap each forward, and end the step; afterwards it reports what it moved and held in the
measured steps.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from bench_peers_options import KINDS, named_modules, options_of_rank

MOST_STEPS = 200
"""Of a search; what it hasn't found by then isn't waited for."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Mode:
    """No offload; the base of all others."""

    def __init__(self, spec):
        self.spec = spec
        self.examination = {}
        self.planning = {}
        self.followed = None
        self.held_bytes = 0
        self.d2h_bytes = None
        self.h2d_bytes = None

    def prepare(self):
        """Before the model is built."""

    def transformer_options(self):
        return {}

    def attach(self, chunks, pp_rank):
        """After the model is built."""

    def forward_context(self):
        return contextlib.nullcontext()

    def after_forward(self):
        """After the forward of one microbatch through one chunk."""

    def end_step(self):
        """After all backwards, inside the time that is measured."""

    def take_step(self, step):
        """Take a step of the warm-up."""
        return step()

    def begin_measured(self):
        """Warm-up is over: the most that is held counts from here."""
        self.held_bytes = 0

    def follow(self, *, is_on):
        """Take the next step with the rows that are followed, or without."""

    def detach(self):
        """Leave the model as it was built."""

    @contextlib.contextmanager
    def examined(self, rank):
        """Look closely at one more step, at a cost that the measured ones don't pay."""
        yield

    def report(self):
        """Return what this mode did in a steady step."""
        return {
            "held_bytes": self.held_bytes,
            "d2h_bytes": self.d2h_bytes,
            "h2d_bytes": self.h2d_bytes,
            "pinned_bytes": torch_pinned_bytes(),
        }


class Nothing(Mode):
    def report(self):
        return {**super().report(), "d2h_bytes": 0, "h2d_bytes": 0}


class Recompute(Nothing):
    def transformer_options(self):
        return FULL


class RecomputeLayers(Nothing):
    def transformer_options(self):
        number = self.spec["arguments"]["layers"]
        return FULL | {"recompute_method": "block", "recompute_num_layers": number}


class Selective(Nothing):
    def transformer_options(self):
        modules = list(self.spec["modules"])
        return {"recompute_granularity": "selective", "recompute_modules": modules}


class Marked(Mode):
    """Megatron's own call sites mark the groups."""

    def __init__(self, spec):
        from megatron_offload.config import MEGATRON_MODULES

        super().__init__(spec)
        self.core = [name for name in spec["modules"] if name in MEGATRON_MODULES]
        self.hooked = [name for name in spec["modules"] if name not in MEGATRON_MODULES]

    def transformer_options(self):
        if not self.core:
            return {}
        return {
            "fine_grained_activation_offloading": True,
            "offload_modules": list(self.core),
            "min_offloaded_tensor_size": self.spec["min_elements"],
        }


class Ours(Marked):
    def transformer_options(self):
        named = super().transformer_options()
        return named | ({"offload_modules": list(self.spec["modules"])} if named else {})

    def read_config(self, **more):
        from megatron_offload.config import OffloadConfig, apply_overrides
        from megatron_offload.files.strict_model import validate

        options = apply_overrides({}, options_of_rank(self.spec["options"], self.spec["rank"]))
        return validate(OffloadConfig, options | more, self.spec["mode"])

    def prepare(self):
        from megatron_offload import PipelineOffloadManager
        from megatron_offload.integrations import megatron_core

        self.manager = PipelineOffloadManager.get_instance()
        config = self.read_config(enabled=True, **named_modules(self.spec))
        if self.spec["min_elements"] <= 1 and "min_tensor_bytes" not in config.model_fields_set:
            config = config.model_copy(update={"min_tensor_bytes": 0})
        self.manager.configure(config)
        megatron_core.install()

    def attach(self, chunks, pp_rank):
        from megatron_offload.frontends.modules import offload_modules

        if self.hooked and not self.core:  # else Megatron's configuration names them
            offload_modules(chunks, self.hooked)

    def take_step(self, step):
        """Take as many steps as the search for rows needs, of the same microbatches."""
        taken = self.plan(step)
        if self.spec["deterministic"] and len({found[1:] for found in taken}) > 1:
            raise RuntimeError(f"steps of planning differ in loss or gradients: {taken}")
        return taken[0]

    def plan(self, step):
        """Take a step, and more until the search for rows ends; return what each of them gave."""
        taken, search = [step()], self.manager.tuner
        while search is not None and any_rank(not search.is_converged) and len(taken) < MOST_STEPS:
            taken.append(step())
        if len(taken) > 1:
            self.planning = {"planning_steps_ms": [found[0] for found in taken]}
            print(f"planned for {len(taken)} steps: {search.said}")
            search.save(self.spec["results"])
        return taken

    def follow(self, *, is_on):
        manager = self.manager
        if self.followed is None:
            self.followed = manager.rows, manager.rows_are_own
        rows, are_own = self.followed if is_on else ((), True)
        manager.follow_rows(rows, is_own=are_own)
        if manager.tuner is not None:
            manager.tuner._follow_in_library(rows)

    def end_step(self):
        if not self.core:  # else the schedule has done it
            self.manager.reset()
        self.held_bytes = max(self.held_bytes, self.manager.last_step.peak_released_bytes)

    @contextlib.contextmanager
    def examined(self, rank):
        from megatron_offload.core.trace import write_traces
        from megatron_offload.observe.trace_step import trace_step

        with trace_step(self.manager, rank) as trace:
            yield
        write_traces(Path(self.spec["results"]) / f"trace_{rank}.json", [trace])
        gbps = {}
        for stream, num_bytes in trace.num_bytes.items():
            busy_us = sum(span.duration_us for span in trace.of(stream))
            gbps[stream] = num_bytes / busy_us / 1e3 if busy_us else None
        self.examination = {
            "traced_step_us": trace.duration_us,
            "stall_us": trace.stall_us,
            "gbps": gbps,
        }

    def report(self):
        stats, pool = self.manager.last_step, self.manager.host_pool.stats
        return {
            "held_bytes": self.held_bytes,
            "d2h_bytes": stats.offloaded_bytes,
            "recomputed_bytes": stats.recomputed_bytes,
            "refused_recipe_bytes": stats.refused_recipe_bytes,
            "h2d_bytes": stats.reloaded_bytes,
            "pinned_bytes": pool.peak_slab_bytes,
            "pinned_now_bytes": pool.slab_bytes_total,
            "in_use_bytes": stats.peak_host_bytes,
            "late_reloads": stats.num_late_reloads,
            "cancelled_offloads": stats.num_cancelled_offloads,
            "kept_bytes": sum(group.kept_bytes for group in stats.by_name.values()),
            "refused_bytes": stats.refused_bytes,
            "externally_referenced_bytes": stats.externally_referenced_bytes,
            "num_groups": stats.num_groups,
            "max_inflight_bytes": self.manager.budget.max_inflight_bytes,
            "prefetch_bytes": self.manager.budget.prefetch_bytes,
            "result": getattr(self.manager.tuner, "said", ""),
            **self.planning,
        }


class OursWhole(Ours):
    """`OffloadActivations` around each forward, as a program without marks would have it."""

    def __init__(self, spec):
        super().__init__(spec)
        self.core = self.hooked = ()

    def transformer_options(self):
        return {}

    def prepare(self):
        """Each context has its own manager."""

    def attach(self, chunks, pp_rank):
        from megatron_offload import OffloadActivations, get_act_offloading_ctx_manager

        options = {"config": self.read_config(), **self.spec["arguments"]}
        heads = [chunk for chunk in chunks if getattr(chunk, "output_layer", None) is not None]
        self.context = (
            get_act_offloading_ctx_manager(heads[0], True, **options)
            if heads
            else OffloadActivations(**options)
        )
        self.manager = self.context.manager
        for chunk in chunks:
            for tensor in (*chunk.parameters(), *chunk.buffers()):
                self.manager.mark_not_offload(tensor)

    def forward_context(self):
        return self.context

    def end_step(self):
        if not self.context.end_step():
            raise RuntimeError("something of the step is still alive")
        self.held_bytes = max(self.held_bytes, self.manager.last_step.peak_released_bytes)


class Megatron(Marked):
    def report(self):
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as original

        manager = original.PipelineOffloadManager.get_instance()
        moved = sum(
            group.total_offload_bytes
            for chunk in manager._cached_chunks_forward
            for group in chunk.offload_groups
            if group.offload
        )
        self.held_bytes = manager.offload_summary_total_bytes
        self.d2h_bytes = self.h2d_bytes = moved
        return super().report()


class OneAtATime(Mode):
    """Without a pipeline the host holds most between a microbatch's forward and its backward."""

    step_bytes = 0

    def count(self, num_bytes):
        self.held_bytes = max(self.held_bytes, num_bytes)
        self.step_bytes += num_bytes

    def end_step(self):
        self.d2h_bytes = self.h2d_bytes = self.step_bytes
        self.step_bytes = 0


class TransformerEngine(OneAtATime):
    def transformer_options(self):
        return {
            "cpu_offloading": True,
            "cpu_offloading_num_layers": self.spec["layers"] - 1,
            "cpu_offloading_activations": True,
            "cpu_offloading_weights": False,
        }

    def attach(self, chunks, pp_rank):
        self.synchronizers = [
            chunk.decoder.offload_context.offload_synchronizer for chunk in chunks
        ]

    def after_forward(self):
        sizes = [each.get_offloaded_total_size_mb() for each in self.synchronizers]
        self.count(int(sum(sizes) * 2**20))


class Trl(OneAtATime):
    def prepare(self):
        try:
            module = importlib.import_module("trl.models.activation_offloading")
        except ImportError as error:
            raise RuntimeError(f"not installed ({error})") from error
        self.context = module.OffloadActivations()

    def attach(self, chunks, pp_rank):
        update = getattr(self.context, "update_model_params", None)
        for chunk in chunks if update is not None else ():
            update(chunk)

    def forward_context(self):
        return self.context

    def after_forward(self):
        held = {}
        for entry in self.context.tracker.values():
            if entry[1]:
                held[entry[0].data_ptr()] = entry[0].nbytes
        self.count(sum(held.values()))


class SaveOnCpu(OneAtATime):
    """Counts its bytes through the hook that torch's own context manager has set."""

    now_bytes = 0

    def forward_context(self):
        context = torch.autograd.graph.save_on_cpu(pin_memory=self.spec["device"] == "cuda")
        pack = context.pack_hook

        def counted(tensor):
            packed = pack(tensor)
            self.now_bytes += tensor.nbytes
            self.step_bytes += tensor.nbytes
            self.held_bytes = max(self.held_bytes, self.now_bytes)
            weakref.finalize(packed[1], self._drop, tensor.nbytes)
            return packed

        context.pack_hook = counted
        return context

    def _drop(self, num_bytes):
        self.now_bytes -= num_bytes


MODES = {
    "none": Nothing,
    **dict.fromkeys((kind for kind in KINDS if kind.startswith("ours")), Ours),
    "ours-whole": OursWhole,
    "megatron": Megatron,
    "te": TransformerEngine,
    "trl": Trl,
    "save_on_cpu": SaveOnCpu,
    "recompute": Recompute,
    "recompute-layers": RecomputeLayers,
    "selective": Selective,
}


def any_rank(flag):
    """Return whether it is so on any rank."""
    if not dist.is_initialized():
        return flag
    flags = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def torch_pinned_bytes():
    """Return the most that torch's own pinned allocator ever had; None where it doesn't count."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None or not torch.cuda.is_available():
        return None
    return stats().get("allocated_bytes.peak")

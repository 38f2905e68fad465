"""Host time per layer group: start, four saved tensors, commit, backward.

Runs the same program three ways, alternating, in one process on the CPU with copies that take no
device time, so that what is left is the cost of the bookkeeping itself:

    none      the program alone
    package   with this package on the simulated backend (copies at once, no checks)
    megatron  with megatron-core's own handler, its CUDA streams and events replaced by stand-ins
              that do nothing; left out where megatron-core has no such module

    python scripts/bench_host_overhead.py --output docs/benchmarks/host_overhead.json

To measure against a megatron-core that lies unpacked in a folder, put the folder first on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager

NUM_ELEMENTS = 256


class SaveFour(torch.autograd.Function):
    """One node that saves four tensors."""

    @staticmethod
    def forward(ctx, x, *tensors):
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad, *[None for _ in ctx.saved_tensors])


def program(num_groups, start, context, commit):
    x = torch.zeros(1, requires_grad=True)
    for _ in range(num_groups):
        tensors = [torch.empty(NUM_ELEMENTS) for _ in range(4)]
        x = start(x)
        with context():
            x = SaveFour.apply(x, *tensors)
        x = commit(x)
    x.backward()


class NoContext:
    """Costs what any context costs."""

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


def run_none(num_groups):
    program(num_groups, lambda x: x.view(1), NoContext, lambda x: x.view(1))


class Package:
    """This package's engine."""

    def __init__(self):
        config = OffloadConfig(
            backend="simulated",
            simulated=SimulatedConfig(copy_timing="eager", poison=False, check_hazards=False),
            min_tensor_bytes=0,
            host_memory_bytes=1 << 30,
            max_inflight_bytes=16 * NUM_ELEMENTS * 4,
            prefetch_bytes=16 * NUM_ELEMENTS * 4,
        )
        self.manager = PipelineOffloadManager(config, backend=SimulatedBackend(config.simulated))

    def run(self, num_groups):
        manager = self.manager
        manager.begin_chunk()
        program(
            num_groups,
            lambda x: start_group(manager, x, "group"),
            lambda: manager,
            lambda x: commit_group(manager, x, "group"),
        )
        manager.reset()
        moved = manager.last_step.offloaded_bytes
        if moved < 0.9 * num_groups * 4 * NUM_ELEMENTS * 4:
            raise RuntimeError(f"only {moved} bytes moved: this would measure something else")


class StandIn:
    """A CUDA stream, event or context that does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait_event(self, *args):
        pass

    def wait_stream(self, *args):
        pass

    def record_event(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


class Megatron:
    """Megatron-core's own handler, driven through its own interface."""

    def __init__(self):
        self.module = module = import_module(
            "megatron.core.pipeline_parallel.fine_grained_activation_offload"
        )
        stream = StandIn()
        self.patches = [
            mock.patch.object(torch.cuda, "Stream", StandIn),
            mock.patch.object(torch.cuda, "Event", StandIn),
            mock.patch.object(torch.cuda, "stream", StandIn),
            mock.patch.object(torch.cuda, "current_stream", lambda *a: stream),
            mock.patch.object(torch.Tensor, "record_stream", lambda *a: None),
            mock.patch.object(torch.Tensor, "is_pinned", lambda *a: False),
            mock.patch.object(module, "print_offload_summary_table", lambda *a: None),
            mock.patch.object(module.torch.cuda.nvtx, "range_push", lambda *a: None),
            mock.patch.object(module.torch.cuda.nvtx, "range_pop", lambda *a: None),
        ]
        import megatron.core.extensions.transformer_engine as te

        self.patches.append(
            mock.patch.object(te, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
        )
        if hasattr(module.ChunkOffloadHandler, "_can_manage_tensor_for_offload"):
            accept = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
            self.patches.append(
                mock.patch.object(
                    module.ChunkOffloadHandler, "_can_manage_tensor_for_offload", accept
                )
            )
        with self._patched():
            manager = module.PipelineOffloadManager()
            pool = type(manager.cpu_tensor_pool)(device="cpu", pin_memory=False)
            manager._cpu_tensor_pool = pool
        module.PipelineOffloadManager.OFFLOAD_MGR = manager
        self.manager = manager

    def _patched(self):
        from contextlib import ExitStack

        stack = ExitStack()
        for patch in self.patches:
            stack.enter_context(patch)
        return stack

    def run(self, num_groups):
        interface = self.module.FineGrainedActivationOffloadingInterface
        manager = self.manager
        later = hasattr(interface, "group_offload")
        commit = (
            self.module.fine_grained_offloading_group_offload
            if later
            else self.module.fine_grained_offloading_group_commit
        )
        with self._patched():
            if later:
                manager.init_model_chunk_offload_handler(0, 1, 0, 1)
            else:
                manager.init_model_chunk_offload_handler(1, 0, 1)
            program(
                num_groups,
                lambda x: self.module.fine_grained_offloading_group_start(x, "group"),
                lambda: manager,
                lambda x: commit(x, "group"),
            )
            manager.reset()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-groups", type=int, default=80)
    parser.add_argument("--num-runs", type=int, default=60)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    modes = {"none": run_none, "package": Package().run}
    version = None
    try:
        modes["megatron"] = Megatron().run
        version = import_module("megatron.core").__version__
    except (ImportError, AttributeError) as error:
        print(f"megatron-core's own handler is left out: {error}")
    times = {name: [] for name in modes}
    for run in range(arguments.num_runs + 3):
        names = list(modes) if run % 2 else list(reversed(modes))
        for name in names:
            start = time.perf_counter()
            modes[name](arguments.num_groups)
            if run >= 3:
                times[name].append((time.perf_counter() - start) / arguments.num_groups * 1e6)
    median = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"CPU, {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "megatron_core": version,
        "num_groups": arguments.num_groups,
        "saved_tensors_per_group": 4,
        "median_us_per_group": {name: round(value, 2) for name, value in median.items()},
        "added_us_per_group": {
            name: round(value - median["none"], 2) for name, value in median.items()
        },
        "us_per_group": {name: [round(v, 2) for v in values] for name, values in times.items()},
    }
    for name, value in median.items():
        print(f"{name:10} {value:8.1f} us a group, {value - median['none']:+8.1f} us")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

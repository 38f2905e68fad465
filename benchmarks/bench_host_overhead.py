"""Host time per layer group: start, four saved tensors, commit, backward.

Runs the same program three ways, alternating, in one process, on tensors of 1 KiB:

    none      the program alone
    package   with this package
    megatron  with megatron-core's own handler; left out where megatron-core has no such module

``--cold-mib 16`` writes so much of the host's memory before each group, as a job's other work may:
caches hold nothing of the package then.

On a CPU copies take no device time, and the streams and events of both are patches that do
nothing. What is left is the cost of the bookkeeping itself:

    python benchmarks/bench_host_overhead.py --output docs/benchmarks/host_overhead.json

On a GPU both run as they are, with real streams, events, pinned memory and copies:

    python benchmarks/bench_host_overhead.py --device cuda --num-groups 10000 --num-chunks 100 \
        --num-runs 7 --output FILE

A run is one step: the groups lie in chunks of equal size, and each chunk's backward follows its
forward. The clock stops when the host has issued everything; the time until the device is done is
a number of its own, and hardly more where the host was the limit.

To measure against a megatron-core that lies unpacked in a folder, put the folder first on
PYTHONPATH. Of the handler only the table that it prints once is left out, for it needs a process
group; and without TransformerEngine the switch that its modules would read is a patch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import shlex
import statistics
import sys
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


def program(mode, num_groups, start, context, commit):
    """Take one chunk forward and backward."""
    device, others = mode.device, mode.others
    x = torch.zeros(1, requires_grad=True, device=device)
    for _ in range(num_groups):
        tensors = [torch.empty(NUM_ELEMENTS, device=device) for _ in range(4)]
        others.add_(1)
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


class Alone:
    """Nothing but the program."""

    others = torch.zeros(0)
    """What is written before each group."""

    def __init__(self, device):
        self.device = device

    def active(self):
        """Return a context for `run`, outside the time that is measured."""
        return contextlib.nullcontext()

    def run(self, num_groups, num_chunks):
        for _ in range(num_chunks):
            program(
                self,
                num_groups // num_chunks,
                lambda x: x.view(1),
                NoContext,
                lambda x: x.view(1),
            )

    def moved_bytes(self):
        """Return what the last run has copied to the host."""
        return 0


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


class NoDevice(SimulatedBackend):
    """Copies at once; its streams and events do nothing, as those of the handler."""

    def __init__(self, config):
        super().__init__(config)
        self.d2h_stream = self.h2d_stream = self.stream = StandIn()

    def compute_stream(self):
        return self.stream

    def record(self, stream):
        return StandIn()

    def wait(self, stream, event, why):
        stream.wait_event(event)

    def wait_compute(self, stream, why):
        stream.wait_stream(self.stream)

    def copy(self, pairs, stream, label):
        torch._foreach_copy_(*zip(*pairs, strict=True))
        return StandIn()


class Package(Alone):
    """This package's engine."""

    def __init__(self, device):
        super().__init__(device)
        config = OffloadConfig(
            backend="cuda" if device == "cuda" else "simulated",
            simulated=SimulatedConfig(copy_timing="eager", poison=False, check_hazards=False),
            min_tensor_bytes=0,
            host_memory_bytes=1 << 30,
        )
        backend = NoDevice(config.simulated) if device == "cpu" else None
        self.manager = PipelineOffloadManager(config, backend=backend)

    def run(self, num_groups, num_chunks):
        manager = self.manager
        for _ in range(num_chunks):
            manager.begin_chunk()
            program(
                self,
                num_groups // num_chunks,
                lambda x: start_group(manager, x, "group"),
                lambda: manager,
                lambda x: commit_group(manager, x, "group"),
            )
        manager.reset()

    def moved_bytes(self):
        return self.manager.last_step.offloaded_bytes


class Megatron(Alone):
    """Megatron-core's own handler, driven through its own interface."""

    def __init__(self, device):
        super().__init__(device)
        self.module = module = import_module(
            "megatron.core.pipeline_parallel.fine_grained_activation_offload"
        )
        te = import_module("megatron.core.extensions.transformer_engine")
        self.has_te = te.cpu_offload is not None
        self.patches = [mock.patch.object(module, "print_offload_summary_table", lambda *a: None)]
        if not self.has_te:
            switch = SimpleNamespace(CPUOffloadEnabled=False)
            self.patches.append(mock.patch.object(te, "cpu_offload", switch))
        if device == "cpu":
            self._patch(module)
        with self.active():
            self.manager = manager = module.PipelineOffloadManager()
            if device == "cpu":
                pool = type(manager.cpu_tensor_pool)(device="cpu", pin_memory=False)
                manager._cpu_tensor_pool = pool
        module.PipelineOffloadManager.OFFLOAD_MGR = manager

    def _patch(self, module):
        """Let it run without a device."""
        stream = StandIn()
        self.patches += [
            mock.patch.object(torch.cuda, "Stream", StandIn),
            mock.patch.object(torch.cuda, "Event", StandIn),
            mock.patch.object(torch.cuda, "stream", StandIn),
            mock.patch.object(torch.cuda, "current_stream", lambda *a: stream),
            mock.patch.object(torch.Tensor, "record_stream", lambda *a: None),
            mock.patch.object(torch.Tensor, "is_pinned", lambda *a: False),
            mock.patch.object(module.torch.cuda.nvtx, "range_push", lambda *a: None),
            mock.patch.object(module.torch.cuda.nvtx, "range_pop", lambda *a: None),
        ]
        if hasattr(module.ChunkOffloadHandler, "_can_manage_tensor_for_offload"):
            accept = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
            self.patches.append(
                mock.patch.object(
                    module.ChunkOffloadHandler, "_can_manage_tensor_for_offload", accept
                )
            )

    def active(self):
        stack = contextlib.ExitStack()
        for patch in self.patches:
            stack.enter_context(patch)
        return stack

    def run(self, num_groups, num_chunks):
        interface = self.module.FineGrainedActivationOffloadingInterface
        manager = self.manager
        later = hasattr(interface, "group_offload")
        commit = (
            self.module.fine_grained_offloading_group_offload
            if later
            else self.module.fine_grained_offloading_group_commit
        )
        for _ in range(num_chunks):
            if later:
                manager.init_model_chunk_offload_handler(0, 1, 0, 1)
            else:
                manager.init_model_chunk_offload_handler(1, 0, 1)
            program(
                self,
                num_groups // num_chunks,
                lambda x: self.module.fine_grained_offloading_group_start(x, "group"),
                lambda: manager,
                lambda x: commit(x, "group"),
            )
        manager.reset()

    def moved_bytes(self):
        return sum(
            group.total_offload_bytes
            for chunk in self.manager._cached_chunks_forward
            for group in chunk.offload_groups
            if group.offload
        )


def measure(mode, num_groups, num_chunks):
    """Take one step; return microseconds of the host, and of all until the device is done."""
    synchronize = torch.cuda.synchronize if mode.device == "cuda" else lambda: None
    with mode.active():
        # The garbage collector looks at what this step makes, not at what others have left.
        gc.collect()
        gc.freeze()
        synchronize()
        start = time.perf_counter()
        mode.run(num_groups, num_chunks)
        issued = time.perf_counter()
        synchronize()
        done = time.perf_counter()
        gc.unfreeze()
        return (issued - start) * 1e6, (done - start) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cold-mib", type=int, default=0, help="written before each group")
    parser.add_argument("--num-groups", type=int, default=80, help="of a step, all chunks together")
    parser.add_argument("--num-chunks", type=int, default=1)
    parser.add_argument("--num-runs", type=int, default=60)
    parser.add_argument("--num-warmups", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    num_groups, num_chunks, device = arguments.num_groups, arguments.num_chunks, arguments.device
    if num_chunks < 1 or num_groups < 1 or num_groups % num_chunks:
        parser.error("--num-groups is a multiple of --num-chunks, and both are at least 1")
    torch.set_num_threads(1)
    Alone.others = torch.zeros(arguments.cold_mib << 20, dtype=torch.uint8)
    modes = {"none": Alone(device), "package": Package(device)}
    version = has_te = None
    try:
        modes["megatron"] = Megatron(device)
        version = import_module("megatron.core").__version__
        has_te = modes["megatron"].has_te
    except (ImportError, AttributeError) as error:
        print(f"megatron-core's own handler is left out: {error}")
    times = {name: [] for name in modes}
    done = {name: [] for name in modes}
    for run in range(arguments.num_warmups + arguments.num_runs):
        names = list(modes) if run % 2 else list(reversed(modes))
        for name in names:
            host_us, done_us = measure(modes[name], num_groups, num_chunks)
            if run >= arguments.num_warmups:
                times[name].append(host_us / num_groups)
                done[name].append(done_us / num_groups)
    moved = {name: mode.moved_bytes() / num_groups for name, mode in modes.items()}
    saved = dict.fromkeys(modes, 4 * NUM_ELEMENTS * 4) | {"none": 0}
    if any(not 0.8 * saved[name] <= moved[name] <= saved[name] for name in modes):
        raise RuntimeError(f"of {saved} bytes a group moved {moved}: not what was to be measured")
    median = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine_of(device),
        "torch": torch.__version__,
        "megatron_core": version,
        "transformer_engine": has_te,
        "num_groups": num_groups,
        "num_chunks": num_chunks,
        "saved_tensors_per_group": 4,
        "cold_mib": arguments.cold_mib,
        "moved_bytes_per_group": {name: round(value) for name, value in moved.items()},
        "median_us_per_group": {name: round(value, 2) for name, value in median.items()},
        "added_us_per_group": {
            name: round(value - median["none"], 2) for name, value in median.items()
        },
        "median_us_per_group_until_device_is_done": {
            name: round(statistics.median(values), 2) for name, values in done.items()
        },
        "us_per_group": {name: [round(v, 2) for v in values] for name, values in times.items()},
    }
    for name, value in median.items():
        print(
            f"{name:10} {value:8.1f} us a group, {value - median['none']:+8.1f} us, "
            f"device done after {statistics.median(done[name]):8.1f} us"
        )
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def machine_of(device):
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    return f"{name}, {platform.machine()}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()

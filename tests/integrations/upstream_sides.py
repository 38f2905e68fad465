"""Megatron-core's own handler, this package's, and none, where megatron-core calls its own.

Megatron's runs on devices that stand for CUDA, whose copies run as late as their order allows.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from types import SimpleNamespace
from unittest import mock

import torch

KIB = 1024


class Event:
    """A point in a stream, as ``torch.cuda.Event``."""

    def __init__(self, **_):
        self.stream, self.position = None, 0

    def record(self, stream):
        self.stream, self.position = stream, stream.issued


class Stream:
    """A queue of copies and waits; the compute stream, as the host, is never late."""

    def __init__(self, *, is_late=True):
        self.is_late = is_late
        self.queue, self.issued = deque(), 0

    def issue(self, work):
        self.issued += 1
        self.queue.append(work)
        if not self.is_late:
            self.run_to(self.issued)

    def run_to(self, position):
        while self.issued - len(self.queue) < position:
            self.queue.popleft()()

    def wait_event(self, event):
        if event.stream is not None:
            self.issue(functools.partial(event.stream.run_to, event.position))

    def wait_stream(self, stream):
        self.issue(functools.partial(stream.run_to, stream.issued))


class Theirs:
    """Megatron-core's own handler, and what stands for CUDA where it asks for that.

    Pinned memory holds NaN at first.

    Attributes:
        host_bytes: all that was asked for.
        moved_bytes: copied to the host in the last step.
        num_back: copies back to the device.
    """

    name, has_switch = "theirs", True

    def __init__(self, *, is_late=True):
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

        from megatron_offload.integrations import megatron_core

        megatron_core.uninstall()
        self.interface = module.FineGrainedActivationOffloadingInterface
        self.current = Stream(is_late=False)
        self.streams, self.is_late = [], is_late
        self.pinned, self.host_bytes = [], 0
        self.moved_bytes = self.copied_bytes = self.num_back = 0
        self._copy = torch.Tensor.copy_
        self._module = module

    def stream(self):
        self.streams.append(Stream(is_late=self.is_late))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty(self, *size, device=None, pin_memory=False, **more):
        tensor = torch.empty(*size, **more)
        if torch.device(device or "cpu").type == "cpu" and tensor.is_floating_point():
            tensor.fill_(torch.nan)
            self.pinned.append(tensor)
            self.host_bytes += tensor.nbytes
        return tensor

    def copy(self, tensor, source, non_blocking):
        if not non_blocking:
            return self._copy(tensor, source)
        if any(source is known for known in self.pinned):
            self.num_back += 1
        else:
            self.copied_bytes += source.nbytes
            # A copy may read at once what it writes late. Emptied memory may hold anything.
            is_there = source.untyped_storage().nbytes() >= source.nbytes
            source = source.detach().clone() if is_there else torch.full_like(tensor, torch.nan)
        # A copy that runs late is no change that autograd has to hear of.
        self.current.issue(lambda: self._copy(tensor.data, source.data))
        return tensor

    def end_step(self):
        self.interface.reset()
        for stream in self.streams:
            stream.run_to(stream.issued)
        self.moved_bytes, self.copied_bytes = self.copied_bytes, 0

    @contextlib.contextmanager
    def active(self):
        module, patch = self._module, mock.patch.object
        from megatron.core.extensions import transformer_engine

        cuda = SimpleNamespace(
            Stream=self.stream,
            Event=Event,
            stream=self.on,
            current_stream=lambda: self.current,
            is_available=lambda: False,
        )
        names = {**vars(torch), "cuda": cuda, "empty": self.empty}
        accepts = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))

        def copy_(*tensors, non_blocking=False):
            return self.copy(*tensors, non_blocking)

        with contextlib.ExitStack() as stack:
            for patched in (
                patch(module, "torch", SimpleNamespace(**names)),
                patch(module.ChunkOffloadHandler, "_can_manage_tensor_for_offload", accepts),
                patch(module, "print_offload_summary_table", lambda *_: None),
                patch(torch.Tensor, "copy_", copy_),
                patch(torch.Tensor, "is_pinned", lambda _: True),
                patch(torch.Tensor, "record_stream", lambda *_: None),
            ):
                stack.enter_context(patched)
            if self.has_switch:
                switch = SimpleNamespace(CPUOffloadEnabled=False)
                stack.enter_context(patch(transformer_engine, "cpu_offload", switch))
            module.PipelineOffloadManager.reset_instance()
            yield


class NoGroup(contextlib.nullcontext):
    """What a group is without a handler."""

    def __init__(self, offload, tensor, name):
        super().__init__(tensor)

    def group_offload(self, tensor):
        return tensor

    init_chunk_handler = mark_not_offload = staticmethod(lambda *_: None)


class Without:
    """No handler."""

    name, interface = "without", NoGroup
    active = contextlib.nullcontext
    host_bytes = num_back = 0
    moved_bytes = 1

    def end_step(self):
        """Nothing to end."""


class Ours:
    """This package's, in the same place."""

    name = "ours"

    def __init__(self, *, is_late=True, **settings):
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

        from megatron_offload import OffloadConfig, PipelineOffloadManager
        from megatron_offload.integrations import megatron_core

        self.manager = PipelineOffloadManager.get_instance()
        timing = "late" if is_late else "eager"
        settings = {"host_slab_bytes": 64 * KIB, "min_tensor_bytes": 0, **settings}
        config = OffloadConfig(
            backend="simulated",
            simulated={"copy_timing": timing},
            recompute=(),
            **{"policy": {"kind": "modules"}, **settings},
        )
        self.manager.configure(config)
        megatron_core.install()
        self.interface = module.FineGrainedActivationOffloadingInterface
        self.active = contextlib.nullcontext
        self.num_back = 0
        backend, copy = self.manager.backend, self.manager.backend.copy

        def counted(pairs, stream, label):
            self.num_back += len(pairs) * (stream is backend.h2d_stream)
            return copy(pairs, stream, label)

        backend.copy = counted

    def end_step(self):
        self.interface.reset()

    host_bytes = property(lambda self: self.manager.host_pool.stats.peak_slab_bytes)
    moved_bytes = property(lambda self: self.manager.last_step.offloaded_bytes)

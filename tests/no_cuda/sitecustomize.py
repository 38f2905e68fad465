"""Lets Megatron-LM's own programs run on a CPU: a folder that stands first on PYTHONPATH.

Once a process has loaded `megatron.training`, the CPU stands for CUDA in Megatron's modules and
nowhere else: this package and the program itself see a machine without a GPU. What megatron-core
needs is `megatron_offload.integrations.megatron_cpu`'s; here is what `pretrain` asks for beyond
that. Of torch's own, tensors name their type to Megatron as CUDA's, meshes of CUDA are the CPU's,
and data loaders leave the random state alone.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
import typing

if not hasattr(typing, "override"):  # megatron-core 0.19 asks for Python 3.12
    typing.override = lambda method: method


class Devices(type):
    """The type of what is called as ``torch.device`` is: CUDA's devices are the CPU."""

    def __call__(cls, kind, *index):
        import torch

        is_on_cuda = str(kind).startswith("cuda")
        return torch.device("cpu") if is_on_cuda else torch.device(kind, *index)

    def __instancecheck__(cls, found):
        import torch

        return isinstance(found, torch.device)


class Device(metaclass=Devices):
    """What `Devices` is the type of."""


class Finished:
    """A stream or an event of a device that has done all it was asked for."""

    def __init__(self, *_, **__):
        pass

    def _nothing(self, *_):
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _nothing


class Bridges:
    """The CPU in the place of the CUDA that Megatron asks for."""

    def __init__(self):
        self.view = None
        """What Megatron's modules take for torch, once there is one."""
        self._stack = contextlib.ExitStack()

    def build(self):
        """Let CUDA stand for the CPU in all that is loaded."""
        import torch

        from megatron_offload.integrations.megatron_cpu import cpu_bridges

        self._stack.enter_context(cpu_bridges())
        self.view = sys.modules["megatron.core.parallel_state"].torch
        vars(self.view).update(rand=self._on_cpu(torch.rand), device=Device)
        vars(self.view.cuda).update(
            is_available=lambda: True,
            device_count=lambda: 1,
            set_device=lambda device: None,
            get_device_properties=lambda device=None: types.SimpleNamespace(major=9),
            empty_cache=lambda: None,
            Stream=Finished,
            Event=Finished,
            current_stream=lambda device=None: Finished(),
            stream=lambda stream: contextlib.nullcontext(),
        )
        mesh = torch.distributed.device_mesh.DeviceMesh
        mesh.__init__ = self._of_the_cpu(mesh.__init__)
        torch.Tensor.type = self._said_to_be_on_cuda(torch.Tensor.type)
        loaded = torch.utils.data.dataloader._BaseDataLoaderIter
        loaded.__init__ = self._keeping_random_state(loaded.__init__)
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron."):
                self.reach(module)

    def reach(self, module):
        """Let CUDA stand for the CPU in a module that has been loaded."""
        if self.view is not None and vars(module).get("torch") is sys.modules["torch"]:
            module.torch = self.view

    @staticmethod
    def _on_cpu(factory):
        return lambda *sizes, device=None, **named: factory(*sizes, **named)

    @staticmethod
    def _of_the_cpu(make):
        def begin(mesh, device_type, *words, **named):
            make(mesh, "cpu" if device_type == "cuda" else device_type, *words, **named)

        return begin

    @staticmethod
    def _said_to_be_on_cuda(say):
        """Megatron's optimizers know parameters by such names as ``torch.cuda.BFloat16Tensor``."""

        def name_type(tensor, *words, **named):
            answer = say(tensor, *words, **named)
            asks = sys._getframe(1).f_globals.get("__name__", "")
            is_name = isinstance(answer, str) and asks.startswith("megatron.")
            return answer.replace("torch.", "torch.cuda.") if is_name else answer

        return name_type

    @staticmethod
    def _keeping_random_state(make):
        """A loader's iterator draws a seed on the CPU, whose generator is the device's as well."""

        def begin(self, *words, **named):
            import torch

            before = torch.get_rng_state()
            make(self, *words, **named)
            torch.set_rng_state(before)

        return begin


bridges = Bridges()


class Loader:
    """Loads a module as another loader does, and then reaches it."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        self._loader.exec_module(module)
        if module.__name__ == "megatron.training":
            bridges.build()
        bridges.reach(module)


class Finder:
    """Finds Megatron's modules where they are."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = None
        if name.startswith("megatron."):
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder)

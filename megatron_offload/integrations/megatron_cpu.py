"""Bridges that let megatron-core's model and schedules run on a CPU over gloo.

In its modules the name ``torch``, through which it asks for CUDA, stands for a view of torch whose
current CUDA device is the CPU.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed

from megatron_offload.recompute.patches import Call, PatchStack, around

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like")
_CPU = torch.device("cpu")
_STATES: dict[str, Call] = {
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda new_state, *_, **__: torch.set_rng_state(new_state),
}
"""What stands for CUDA's functions, whatever device these are asked about."""


@contextlib.contextmanager
def cpu_bridges() -> Iterator[None]:
    """Run megatron-core on the CPU inside this context; restores all that it found.

    Import whatever of megatron-core is needed before entering: modules that are loaded later keep
    the plain torch. Contexts may nest.

    Raises:
        RuntimeError: there is a CUDA device, so that no bridge is wanted.
    """
    if torch.cuda.is_available():
        raise RuntimeError("cpu_bridges() is for machines without a CUDA device; this one has one")
    # The modules that hold the names replaced below must be loaded before the sweep.
    from megatron.core.optimizer import optimizer
    from megatron.core.tensor_parallel import random

    view = _cpu_view_of_torch()
    with PatchStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core") and vars(module).get("torch") is torch:
                patches.replace(module, "torch", view)
        patches.replace(random, "_set_cuda_rng_state", _STATES["set_rng_state"])
        patches.replace(optimizer, "clip_grad_by_total_norm_fp32", _clip_grads)
        patches.replace(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
        if not hasattr(random, "FP8GlobalStateManager"):  # there is no TransformerEngine
            patches.wrap(random.CheckpointWithoutOutput, "__init__", without_fp8)
        yield


def without_fp8(init: Call, self: Any, *args: Any, **kwargs: Any) -> None:
    """Take the default, ``fp8=False``, for what it says, and don't ask TransformerEngine."""
    init(self, *args, **kwargs)
    self.fp8 = False


def _view(module: types.ModuleType, **overrides: Any) -> types.ModuleType:
    """Return a module with another module's attributes, except for those that are given."""
    view = types.ModuleType(module.__name__)
    # Attributes that torch loads on first use are not in its dictionary yet.
    vars(view).update(vars(module), **overrides, __getattr__=partial(getattr, module))
    return view


def _cpu_view_of_torch() -> types.ModuleType:
    """Return torch with the CPU in the place of the current CUDA device and of its random state.

    What megatron-core takes for the CPU's own generator stands still, so that it neither warns that
    it moved nor restores it over the GPU's.
    """
    cuda = _view(
        torch.cuda,
        **_STATES,
        random=_view(torch.cuda.random, **_STATES),
        current_device=lambda: _CPU,
        manual_seed=torch.manual_seed,
        # Asked for, but waited on only where a CUDA graph left an event.
        current_stream=lambda device=None: None,
        synchronize=lambda device=None: None,
    )
    return _view(
        torch,
        cuda=cuda,
        distributed=_view(torch.distributed, isend=_isend),
        get_rng_state=lambda: torch.empty(0, dtype=torch.uint8),
        set_rng_state=lambda new_state: None,
        **{name: around(getattr(torch, name), _on_cpu) for name in _FACTORIES},
    )


def _on_cpu(factory: Call, *args: Any, **kwargs: Any) -> Any:
    """Call a tensor factory, for which ``device="cuda"`` means the CPU."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        kwargs["device"] = _CPU
    return factory(*args, **kwargs)


def _isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.distributed.Work | None:
    """Send an alias of ``tensor``, which keeps its storage for as long as the request lives.

    The schedules empty an output right after they posted its send, and gloo holds only the tensor.
    """
    return torch.distributed.isend(tensor.detach(), *args, **kwargs)


def _clip_grads(parameters: Any, max_norm: float, total_norm: float, *_: Any, **__: Any) -> None:
    """Scale gradients in place to ``max_norm``; megatron-core's own insists on CUDA tensors."""
    norm = torch.tensor(total_norm, dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

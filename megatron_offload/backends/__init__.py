"""Where tensors live: a CUDA device, or its simulation on a CPU."""

from __future__ import annotations

from collections.abc import Hashable

from megatron_offload.backends import cuda
from megatron_offload.backends.base import Backend
from megatron_offload.backends.cuda import visible_devices as visible_devices
from megatron_offload.backends.simulated import HostTimedBackend, SimulatedBackend
from megatron_offload.config import OffloadConfig


def current_device(config: OffloadConfig) -> Hashable:
    """Return what distinguishes the device that `create_backend` would take now from others.

    None is the simulated one, or a CUDA device that isn't there, which `create_backend` refuses.
    """
    return cuda.current_index() if _takes_cuda(config) else None


def _takes_cuda(config: OffloadConfig) -> bool:
    return config.backend == "cuda" or (
        config.backend == "auto" and cuda.current_index() is not None
    )


def create_backend(config: OffloadConfig, device_index: int | None = None) -> Backend:
    """Build the backend that ``config.backend`` names; ``auto`` takes CUDA where there is a device.

    ``device_index`` is a CUDA device to make the process's current one first. Without a device that
    was asked for it is an `IntegrationError`.
    """
    if _takes_cuda(config):
        return cuda.CudaBackend(config, device_index)
    simulated = config.simulated
    if not config.copy_streams:  # a copy that is queued on the compute stream comes before the rest
        simulated = simulated.model_copy(update={"copy_timing": "eager"})
    return HostTimedBackend(simulated) if simulated.host_time else SimulatedBackend(simulated)

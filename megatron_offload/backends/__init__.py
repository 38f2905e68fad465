"""Where tensors live: a CUDA device, or its simulation on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_offload.config import OffloadConfig

if TYPE_CHECKING:
    from megatron_offload.backends.base import Backend, DeviceInfo

__all__ = ["create_backend", "visible_devices"]


def visible_devices() -> tuple[DeviceInfo, ...]:
    """Describe the CUDA devices that this process can use, in their order; none without any.

    Raises:
        RuntimeError: CUDA has devices and can't be started.
    """
    from megatron_offload.backends import cuda

    return cuda.visible_devices()


def create_backend(config: OffloadConfig, device_index: int | None = None) -> Backend:
    """Build the backend that ``config.backend`` names; ``auto`` takes CUDA where there is a device.

    Args:
        config: the settings.
        device_index: a CUDA device to make the process's current one first; None leaves it.

    Raises:
        IntegrationError: CUDA was asked for and there is no device.
    """
    from megatron_offload.backends.cuda import CudaBackend, is_available
    from megatron_offload.backends.host_timed import HostTimedBackend
    from megatron_offload.backends.simulated import SimulatedBackend

    if config.backend == "cuda" or (config.backend == "auto" and is_available()):
        return CudaBackend(
            nvtx=config.nvtx,
            pin_memory=config.pin_memory,
            copy_streams=config.copy_streams,
            device_index=device_index,
        )
    simulated = config.simulated
    if not config.copy_streams:  # a copy that is queued on the compute stream comes before the rest
        simulated = simulated.model_copy(update={"copy_timing": "eager"})
    return HostTimedBackend(simulated) if simulated.host_time else SimulatedBackend(simulated)

"""Where tensors live: a CUDA device, or its simulation on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_offload.config import OffloadConfig

if TYPE_CHECKING:
    from megatron_offload.backends.base import Backend

__all__ = ["create_backend"]


def create_backend(config: OffloadConfig) -> Backend:
    """Build the backend that ``config.backend`` names; ``auto`` takes CUDA where there is a device.

    Raises:
        IntegrationError: CUDA was asked for and there is no device.
    """
    from megatron_offload.backends.cuda import CudaBackend, is_available
    from megatron_offload.backends.host_timed import HostTimedBackend
    from megatron_offload.backends.simulated import SimulatedBackend

    if config.backend == "cuda" or (config.backend == "auto" and is_available()):
        return CudaBackend(
            nvtx=config.nvtx, pin_memory=config.pin_memory, copy_streams=config.copy_streams
        )
    simulated = config.simulated
    if not config.copy_streams:  # a copy that is queued on the compute stream comes before the rest
        simulated = simulated.model_copy(update={"copy_timing": "eager"})
    return HostTimedBackend(simulated) if simulated.host_time else SimulatedBackend(simulated)

"""Process groups, devices and seeds: all that is global to a training process.

Invariant: two runs in one process, one after the other, start from the same state.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.utils.deterministic
from torch.distributed import DistNetworkError, DistStoreError

from megatron_offload.config import environment_int
from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place."""

    rank: int
    world_size: int
    pp_rank: int
    dp_rank: int
    dp_size: int
    host_group: Any
    """A gloo group over all ranks, for plain numbers."""


def check_device(config: TrainConfig, local_ranks: int, *, can_hide: bool) -> str:
    """Return ``"cuda"`` or ``"cpu"`` for a run of ``local_ranks`` processes on this machine.

    Where they are yet to be started (``can_hide``), CUDA devices can be kept from them.
    """
    wanted = config.run.device
    found = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if found else "cpu"
    if wanted == "cpu" and found and not can_hide:
        raise ConfigError(
            f"run.device cpu, but this machine shows {found} CUDA devices; hide them with "
            f"CUDA_VISIBLE_DEVICES= or set run.device: auto"
        )
    if wanted == "cuda" and found < local_ranks:
        raise ConfigError(
            f"{local_ranks} ranks on this machine need as many CUDA devices, and it has {found}; "
            f"lower parallel.ranks or set run.device: cpu"
        )
    return wanted


@contextlib.contextmanager
def open_process_group(kind: str, timeout_s: float = 600.0) -> Iterator[torch.device]:
    """Join all ranks, from the environment that a launcher set; leaves the group at the end.

    Yields this rank's device.
    """
    local_rank = environment_int("LOCAL_RANK")
    # cuBLAS and TransformerEngine read these once; without them equal runs may differ in bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if kind == "cuda" else None,
        )
    except (ValueError, DistNetworkError, DistStoreError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"the ranks can't meet at {place}: {str(error).partition(chr(10))[0]}; start the ranks "
            f"with torchrun, or set MASTER_ADDR and MASTER_PORT to a free port of the first rank's "
            f"machine"
        ) from error
    torch.set_num_threads(1)  # ranks share the cores, and sums on a CPU hang on the number
    with _closing(torch.distributed.destroy_process_group):
        yield device


@contextlib.contextmanager
def _closing(close: Callable[[], None]) -> Iterator[None]:
    """Close connections at the end, unless this rank alone fails.

    The others would fail of it, and might be reported, before its own error is written down.
    """
    try:
        yield
    except OffloadError:
        close()
        raise
    close()


@contextlib.contextmanager
def open_model_parallel(config: TrainConfig, device: torch.device) -> Iterator[Parallel]:
    """Split the ranks into pipelines and seed every generator; on a CPU also opens the bridges."""
    # megatron-core takes seconds to import; only processes that train should pay for it.
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_offload.integrations.megatron_cpu import (
        cpu_bridges,
        recompute_without_transformer_engine,
    )

    # The bridges reach the modules that are loaded, so all that training uses comes first.
    for name in ("models.gpt", "optimizer", "pipeline_parallel.schedules"):
        importlib.import_module(f"megatron.core.{name}")
    virtual = config.parallel.virtual
    with contextlib.ExitStack() as stack:
        stack.enter_context(recompute_without_transformer_engine())
        if device.type == "cpu":
            stack.enter_context(cpu_bridges())
        else:
            # Only kernels that give the same bits every time, where there is such a kernel.
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Overwriting every fresh tensor costs time and proves nothing here.
            deterministic: Any = torch.utils.deterministic
            deterministic.fill_uninitialized_memory = False
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=config.parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=config.run.timeout_s / 60,
        )
        host_group = torch.distributed.new_group(
            timeout=timedelta(seconds=config.run.timeout_s), backend="gloo"
        )

        def close() -> None:
            torch.distributed.destroy_process_group(host_group)
            parallel_state.destroy_model_parallel()

        with _closing(close):
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            dp_rank = parallel_state.get_data_parallel_rank()
            # Stages hold different layers and data-parallel ranks drop different units.
            seed = config.run.seed + 100 * pp_rank + 10_000 * dp_rank
            torch.manual_seed(seed)
            model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            yield Parallel(
                rank=torch.distributed.get_rank(),
                world_size=torch.distributed.get_world_size(),
                pp_rank=pp_rank,
                dp_rank=dp_rank,
                dp_size=parallel_state.get_data_parallel_world_size(),
                host_group=host_group,
            )

"""Devices and process groups: what a training process needs before it knows of megatron-core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed

from megatron_offload.errors import ConfigError
from megatron_offload.train.config import TrainConfig


def check_device(config: TrainConfig, ranks: int) -> str:
    """Return ``"cuda"`` or ``"cpu"`` for a run of so many processes on this machine."""
    wanted = config.run.device
    found = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if found else "cpu"
    if wanted == "cuda" and found < ranks:
        raise ConfigError(
            f"{ranks} ranks on this machine need as many CUDA devices, and it has {found}; "
            f"lower parallel.ranks or set run.device: cpu"
        )
    return wanted


@contextlib.contextmanager
def open_process_group(kind: str, timeout_s: float = 600.0) -> Iterator[torch.device]:
    """Join all ranks, from the environment that a launcher set; leaves the group at the end.

    Yields this rank's device.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    # cuBLAS and TransformerEngine read these once; without them equal runs may differ in bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if kind == "cuda" else None,
    )
    torch.set_num_threads(1)  # ranks share the cores, and sums on a CPU hang on the number
    yield device
    # Not behind an error: others would fail of that, and might be reported, before it is written.
    torch.distributed.destroy_process_group()

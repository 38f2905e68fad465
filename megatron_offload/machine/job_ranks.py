"""What the ranks of a job say to one another."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_offload.backends.host_limit import default_cap_bytes, to_int
from megatron_offload.errors import ConfigError, shorten

_Said = TypeVar("_Said")

_LOCAL_SIZES = (
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    *("LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Where OpenMPI, MPICH, MVAPICH, DeepSpeed and SLURM (``4(x2),3``) say how many a host has."""

_counted: WeakKeyDictionary[dist.Store, int] = WeakKeyDictionary()
"""Stores in which this rank is counted, and what all have made of it; 0 while some haven't."""


def num_local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks of the job are on this host, at most; waits for none of them.

    Their launcher says it, else the job's store, in which each counts itself when it first asks.

    Raises:
        ConfigError: ``LOCAL_WORLD_SIZE`` is not a positive integer.
    """
    given = environ.get("LOCAL_WORLD_SIZE")
    if given is not None:
        if num_ranks := to_int(given):
            return num_ranks
        given = shorten(repr(given))
        raise ConfigError(f"LOCAL_WORLD_SIZE must be an integer of 1 or more, got {given}")
    said = re.sub(r"\(x\d+\)", "", ",".join(environ.get(name, "") for name in _LOCAL_SIZES))
    num_launched = max(to_int(word) or 1 for word in said.split(","))
    has_group = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    store = dist.distributed_c10d._get_default_store() if has_group else None
    if num_launched > 1 or store is None:  # one that was launched may have started others
        return num_launched
    if known := _counted.get(store):
        return known
    everywhere, num_ranks = "megatron_offload/ranks", dist.get_world_size()
    here = f"{everywhere}/{socket.gethostname()}"
    try:
        if store not in _counted:
            store.add(here, 1)
            store.add(everywhere, 1)
        num_unknown = max(num_ranks - store.add(everywhere, 0), 0)  # each may be on this host
        # A file keeps the counts of jobs before.
        found = min(num_unknown + store.add(here, 0), num_ranks)
        _counted[store] = 0 if num_unknown else found
        return found
    except dist.DistError:  # the store has gone
        return num_ranks


def cap_of_rank(share: float) -> Callable[[], int]:
    """Return what says how many bytes this rank may pin, by then, of a share of what is free now.

    Errors are those of `num_local_ranks`.
    """
    shared_bytes = default_cap_bytes(share)
    num_local_ranks()  # which counts this one for the others
    return lambda: shared_bytes // num_local_ranks()


def gather(mine: _Said, group: dist.ProcessGroup | None = None) -> list[_Said]:
    """Return what every rank of the group says, in the order of ranks; collective.

    Without `torch.distributed` that is ``mine`` alone.
    """
    said = [mine] * num_ranks(group)
    if len(said) > 1:
        dist.all_gather_object(said, mine, group=group)
    return said


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's place in what `gather` returns."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    """Return how many `gather` returns."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1

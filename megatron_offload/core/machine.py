"""What copies and messages of a node get: the bandwidths that plans and simulations reckon with.

Bandwidths are in GB/s, 10^9 bytes a second, of one direction unless said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_offload.errors import ConfigError

__all__ = ["Machine", "check", "check_numbers"]


def check(owner: str, is_right: bool, message: str) -> None:
    """Raise `ConfigError` about ``owner`` unless something is right."""
    if not is_right:
        raise ConfigError(f"{owner}: {message}")


def check_numbers(described: object, owner: str, *, above_zero: Sequence[str] = ()) -> None:
    """Refuse what is negative, infinite or no number, and zero where there must be something."""
    for field in fields(described):  # type: ignore[arg-type]
        value = getattr(described, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        check(owner, math.isfinite(value) and value >= 0, f"{field.name} can't be {value}")
        if field.name in above_zero:
            check(owner, value > 0, f"{field.name} must be above 0")


@dataclass(frozen=True, slots=True)
class Machine:
    """What copies and messages get. The defaults were measured on a host with four H200s.

    A host whose directions differ gives less one way: four H200s that all copy to the host get 41
    GB/s each, to the device 55, and 25.6 each way when both run, which no single limit explains.
    """

    d2h_gbps: float = 55.0
    """To the host, one GPU with the host to itself."""
    h2d_gbps: float = 55.0
    """To the device, likewise."""
    both_gbps: float = 51.0
    """Each way, when both directions of a GPU run."""
    node_gbps: float = 205.0
    """What all GPUs of a node copy together, in and out added."""
    node_d2h_gbps: float | None = 164.0
    """The most of it that goes to the host; None sets no such bound."""
    node_h2d_gbps: float | None = None
    """The most of it that goes to the devices; None sets no such bound."""
    ranks_per_node: int = 4
    """Pipeline ranks, in order, that share a node."""
    p2p_gbps: float = 100.0
    """Between neighbouring stages; messages don't slow each other down."""
    p2p_latency_us: float = 10.0

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if f.name != "p2p_latency_us"]
        check_numbers(self, "machine", above_zero=given)

"""How copies that run at once share the bandwidth between the devices and the host of a node.

Max-min fair, by progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).
All GPUs being alike, the shares depend only on how many of them copy which way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron_offload.core.machine import Machine


class Rates(NamedTuple):
    """Bytes per microsecond of each copy, by what its GPU copies."""

    d2h: float
    """To the host, the other direction idle."""
    h2d: float
    both_d2h: float
    """To the host, with the other direction busy."""
    both_h2d: float


class FairShare:
    """The shares of the copies of one node; every copy stands for ``gpus_per_rank`` at once."""

    def __init__(self, machine: Machine, gpus_per_rank: int = 1) -> None:
        self._machine = machine
        self._gpus_per_rank = gpus_per_rank
        self._known: dict[tuple[int, int, int], Rates] = {}

    def rates(self, num_d2h: int, num_h2d: int, num_both: int) -> Rates:
        """Return the rates where so many ranks copy each way, or both; 0 for what none does."""
        case = (num_d2h, num_h2d, num_both)
        if case not in self._known:
            self._known[case] = self._fill(*(self._gpus_per_rank * number for number in case))
        return self._known[case]

    def _fill(self, num_d2h: int, num_h2d: int, num_both: int) -> Rates:
        """Raise all rates together, and stop those that a limit binds."""
        machine = self._machine
        numbers = (num_d2h, num_h2d, num_both, num_both)
        limits = [
            ((0,), machine.d2h_gbps * num_d2h),
            ((1,), machine.h2d_gbps * num_h2d),
            ((2,), min(machine.both_gbps, machine.d2h_gbps) * num_both),
            ((3,), min(machine.both_gbps, machine.h2d_gbps) * num_both),
            ((0, 2), machine.node_d2h_gbps or math.inf),
            ((1, 3), machine.node_h2d_gbps or math.inf),
            ((0, 1, 2, 3), machine.node_gbps),
        ]
        rates = [0.0] * 4
        rising = {kind for kind in range(4) if numbers[kind]}
        while rising:
            levels = []
            for kinds, gbps in limits:
                taken = sum(rates[kind] * numbers[kind] for kind in kinds if kind not in rising)
                number = sum(numbers[kind] for kind in kinds if kind in rising)
                if number:
                    levels.append(((gbps - taken) / number, kinds))
            level, kinds = min(levels)
            for kind in rising.intersection(kinds):
                rates[kind] = level
            rising -= set(kinds)
        return Rates(*(rate * 1e3 for rate in rates))

"""Pipeline schedules as data: which rank runs which pass of which microbatch, in which order.

Sources: GPipe (Huang et al., arXiv:1811.06965); 1F1B and its interleaved form (Narayanan et al.,
arXiv:2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, TypeAlias

from megatron_offload.errors import ConfigError

_MOST_PASSES = 10_000_000  # of a schedule


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one microbatch through one stage of the whole pipeline, as in ``2F0``."""

    stage: int
    kind: Literal["F", "B"]
    """Forward, or backward: gradients of inputs and weights in one. The letters are those of
    torch's pipelining."""
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The passes of a training step through all stages, in the order of each pipeline rank.

    Each pass comes once, backwards behind their forwards, and stages go round the ranks. Ranks that
    wait for each other for ever are found where they are simulated.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Pass, ...], ...]
    """All passes, but for cycles that repeat another one."""
    num_repeats: int = 0
    """Of the passes in ``cycles``, which are only once in ``ranks``."""
    cycles: tuple[tuple[int, int], ...] = ()
    """By rank, where something repeats: the first pass of a cycle, and that behind its last. In it
    each stage has a forward and a backward of as many microbatches."""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank; virtual pipeline stage ``i`` is the i-th of them."""
        return tuple(range(rank, self.num_stages, self.num_ranks))


ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved"]


def make_schedule(
    name: ScheduleName,
    num_ranks: int,
    num_microbatches: int,
    num_virtual: int = 1,
    group_size: int | None = None,
) -> Schedule:
    """Return the schedule of a name, as megatron-core runs it.

    ``gpipe`` runs all forwards, then all backwards; ``1f1b`` a warm-up that is shorter on later
    ranks, then forward and backward in turn. So does ``interleaved``, which alone has several
    virtual stages of each rank. Microbatches go through a virtual stage in groups: of as many as
    there are ranks, or of ``group_size``, Megatron's ``microbatch_group_size_per_vp_stage``. The
    last may be smaller.

    Raises:
        ConfigError: a group is smaller than there are ranks, or larger than the step.
    """
    is_interleaved = name == "interleaved"
    if (num_virtual, group_size) != (1, None) and not is_interleaved:
        raise ConfigError(
            f"schedule {name!r} has no virtual stages, got {num_virtual}, in groups of {group_size}"
        )
    if num_ranks * num_microbatches * num_virtual * 2 > _MOST_PASSES:
        raise ConfigError(f"a schedule has at most {_MOST_PASSES} passes")
    size = group_size or num_ranks
    smallest = min(size, num_microbatches % size or size)
    if is_interleaved and not num_ranks <= smallest <= size <= num_microbatches:
        raise ConfigError(
            f"interleaved 1F1B takes its {num_microbatches} microbatches in groups of at least its "
            f"{num_ranks} ranks, the last of what is left, and {size} leave "
            f"{num_microbatches % size}; give more microbatches, or another "
            "microbatch_group_size_per_vp_stage"
        )
    table = [
        (virtual, microbatch)
        for first in range(0, num_microbatches, size)
        for virtual in range(num_virtual)
        for microbatch in range(first, min(first + size, num_microbatches))
    ]
    ranks = []
    for rank in range(num_ranks):
        forwards = [Pass(v * num_ranks + rank, "F", m) for v, m in table]
        backwards = [Pass((num_virtual - 1 - v) * num_ranks + rank, "B", m) for v, m in table]
        num_later = num_ranks - rank - 1
        num_warmup = 2 * num_later + (num_virtual - 1) * size if is_interleaved else num_later
        num_warmup = len(table) if name == "gpipe" else min(num_warmup, len(table))
        in_turn = zip(forwards[num_warmup:], backwards, strict=False)
        last = backwards[len(table) - num_warmup :]
        ranks.append((*forwards[:num_warmup], *chain.from_iterable(in_turn), *last))
    return Schedule(name, num_ranks * num_virtual, num_microbatches, tuple(ranks))


def steady_schedule(
    name: ScheduleName,
    num_ranks: int,
    num_microbatches: int,
    num_virtual: int = 1,
    group_size: int | None = None,
) -> Schedule:
    """Return the schedule of `make_schedule`, of a long step without the groups that repeat others.

    The first groups are there, one cycle of those between them, and the last ones: with these ranks
    hold as much as in the whole step.
    """
    size = group_size or num_ranks
    num_groups = 3  # that are kept: warm-ups take more than one, and ranks have to get in step
    num_repeats = num_microbatches // size - num_groups
    if name == "gpipe" or num_repeats < 2:
        return make_schedule(name, num_ranks, num_microbatches, num_virtual, group_size)
    num_left = num_microbatches - num_repeats * size
    short = make_schedule(name, num_ranks, num_left, num_virtual, group_size)
    num_forwards = size * num_virtual  # of a cycle
    cycles = []
    for passes in short.ranks:
        num_warmup = [one.kind for one in passes].index("B") - 1
        # Those behind that come in turn with backwards; the cycle lies in their middle.
        num_others = (num_groups - 1) * num_forwards - num_warmup
        first = num_warmup + num_others // 2 * 2
        cycles.append((first, first + 2 * num_forwards))
    return replace(
        short, num_microbatches=num_microbatches, num_repeats=num_repeats, cycles=tuple(cycles)
    )

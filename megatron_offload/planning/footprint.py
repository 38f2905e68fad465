"""The device memory of one rank's step without offload, and when each group could be away.

The allocator's samples and the times of the compute stream are paired by their order, because the
host runs ahead of the device. Without samples, as on a CPU, memory is what the groups save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_offload.core.profile import GroupKey, MemorySample, StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.planning.cover import Item, Problem

_START, _COMMIT, _BACKWARD, _DONE = range(4)


@dataclass(frozen=True)
class Footprint:
    """One rank's step as far as its memory goes.

    Attributes:
        profile: what was seen.
        keys: of the groups that hold something and have a backward, in the order of ``items``.
        items: these groups.
        memory_bytes: most memory in each row, allocated.
        waste_bytes: what is reserved besides.
    """

    profile: StepProfile
    keys: tuple[GroupKey, ...]
    items: tuple[Item, ...]
    memory_bytes: tuple[int, ...]
    waste_bytes: int

    @classmethod
    def of(cls, profile: StepProfile) -> Footprint:
        """Return the footprint of a step as it is without offload.

        Raises:
            ConfigError: times are missing, something moved uncounted, or samples lie elsewhere.
        """
        who = f"the profile of pipeline rank {profile.run.pp_rank}"
        if profile.groups and not (profile.times and profile.step_us > 0):
            raise ConfigError(f"{who} holds no times; profile a step with times and memory")
        if profile.offloaded_bytes and not profile.counts_what_moved:
            raise ConfigError(
                f"{who} is of a step that moved {profile.offloaded_bytes} bytes, which its memory "
                "doesn't count; profile another"
            )
        boundaries = [(index, kind) for _, _, index, kind in sorted(_boundaries(profile))]
        samples = profile.memory or _saved_bytes(profile, boundaries)
        if len(samples) not in (len(boundaries), len(boundaries) + 1):
            raise ConfigError(
                f"{who} holds {len(samples)} samples of memory for {len(boundaries)} boundaries of "
                "groups"
            )
        nothing = MemorySample(0.0, 0, 0)
        memory_bytes = tuple(
            max(before.allocated_bytes, behind.allocated_bytes, behind.peak_bytes)
            for before, behind in pairwise([nothing, *samples, nothing])
        )
        row_of = {boundary: row for row, boundary in enumerate(boundaries, start=1)}
        moving = [
            index
            for index, group in enumerate(profile.groups)
            if group.num_bytes and (index, _BACKWARD) in row_of
        ]
        reserved = max((sample.reserved_bytes for sample in samples), default=0)
        return cls(
            profile,
            tuple(profile.groups[index].key for index in moving),
            tuple(
                Item(
                    profile.groups[index].num_bytes,
                    row_of[index, _COMMIT],
                    row_of[index, _BACKWARD],
                    profile.times[index].committed_us,
                    profile.times[index].backward_us,
                )
                for index in moving
            ),
            memory_bytes,
            max(0, reserved - max(memory_bytes, default=0)),
        )

    @cached_property
    def peak_bytes(self) -> int:
        """What the step takes without offload, waste included."""
        return max(self.memory_bytes, default=0) + self.waste_bytes

    @cached_property
    def saved_peak_bytes(self) -> int:
        """The most that all groups hold at one time."""
        live = self.problem(0, 0, 1.0).live_bytes(range(len(self.items)))
        return int(live.max(initial=0))

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest group."""
        return max((item.num_bytes for item in self.items), default=0)

    def problem(self, target_bytes: int, device_bytes: int, link_gbps: float) -> Problem:
        """Return what to solve for a target that counts waste too; see `Problem`."""
        target = target_bytes - self.waste_bytes
        return Problem(self.items, self.memory_bytes, target, device_bytes, link_gbps)


def _boundaries(profile: StepProfile) -> Iterator[tuple[float, int, int, int]]:
    """Yield time, place among those of the same time, group and kind of every boundary."""
    backward_places = {key: place for place, key in enumerate(profile.backward_order)}
    for index, (group, times) in enumerate(zip(profile.groups, profile.times, strict=False)):
        yield times.started_us, 2 * index, index, _START
        yield times.committed_us, 2 * index + 1, index, _COMMIT
        place = backward_places.get(group.key)
        if place is not None:
            place += len(profile.groups)
            yield times.backward_us, 2 * place, index, _BACKWARD
            yield times.done_us, 2 * place + 1, index, _DONE


def _saved_bytes(
    profile: StepProfile, boundaries: list[tuple[int, int]]
) -> tuple[MemorySample, ...]:
    """Return samples that hold what the groups save, and nothing else."""
    held, samples = 0, []
    for index, kind in boundaries:
        num_bytes = profile.groups[index].num_bytes
        held += {_COMMIT: num_bytes, _DONE: -num_bytes}.get(kind, 0)
        samples.append(MemorySample(0.0, held, 0))
    return tuple(samples)

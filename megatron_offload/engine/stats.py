"""Counters of a step: what moved, what stayed, what came late."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupStats:
    """All groups of one name in one step."""

    name: str
    num_groups: int = 0
    offloaded_bytes: int = 0
    """Bytes copied to the host."""
    reloaded_bytes: int = 0
    """Bytes copied back."""
    remade_bytes: int = 0
    """Bytes that were dropped, to be made again in backward."""
    kept_bytes: int = 0
    """Bytes that stayed: by plan, for want of host memory, needed soon, or too small to move. What
    several groups save counts once."""
    kept_bytes_by_reason: dict[str, int] = field(default_factory=dict)
    """The same bytes by why they stayed, in words for people."""
    num_late_reloads: int = 0
    """Groups whose backward began before their reload was issued."""

    def keep(self, num_bytes: int, reason: str) -> None:
        """Count bytes that stayed on the device."""
        self.kept_bytes += num_bytes
        before_bytes = self.kept_bytes_by_reason.get(reason, 0)
        self.kept_bytes_by_reason[reason] = before_bytes + num_bytes


class _ByName(dict[str, GroupStats]):
    def __missing__(self, name: str) -> GroupStats:
        self[name] = stats = GroupStats(name)
        return stats


@dataclass(slots=True)
class StepStats:
    """One training step on one rank."""

    num_late_reloads: int = 0
    num_early_returns: int = 0
    """Groups whose backward came before their device memory had been released: copied for
    nothing."""
    num_refused_blocks: int = 0
    """Blocks that stayed on the device for want of host memory."""
    refused_bytes: int = 0
    num_unpinnable_blocks: int = 0
    """Those of them for which the cap had room, but whose memory could not be pinned."""
    num_memory_shortages: int = 0
    """Reloads for which the device had no memory at first. All in flight was released then; one
    that was ahead of its time came later where that did not suffice."""
    held_elsewhere_bytes: int = 0
    """Released bytes whose storage something else kept alive, so that nothing was freed."""
    peak_host_bytes: int = 0
    """Most bytes of host memory in use at one time."""
    peak_away_bytes: int = 0
    """Most bytes whose device memory was released, at one time: less what is being copied."""
    peak_away_bytes_by_name: dict[str, int] = field(default_factory=dict)
    """The same moment, by group name."""
    leaks: tuple[str, ...] = ()
    """In checking mode, the groups that still held memory when the step ended."""

    refused_recipe_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that have a recipe and were kept or moved all the same, by why, in words for people."""

    by_name: dict[str, GroupStats] = field(default_factory=_ByName)
    """By group name; of a name that is new, zeros."""

    @property
    def num_groups(self) -> int:
        """Groups whose forward is over."""
        return sum(group.num_groups for group in self.by_name.values())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host."""
        return sum(group.offloaded_bytes for group in self.by_name.values())

    @property
    def reloaded_bytes(self) -> int:
        """Bytes copied back to the device."""
        return sum(group.reloaded_bytes for group in self.by_name.values())

    @property
    def remade_bytes(self) -> int:
        """Bytes dropped, to be made again."""
        return sum(group.remade_bytes for group in self.by_name.values())

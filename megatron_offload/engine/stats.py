"""Counters of a step: what was offloaded, what was kept, what came late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megatron_offload.core.units import format_bytes
from megatron_offload.files.renames import OldAttributes, OldKeys


class Sums(dict[str, int]):
    """Bytes by name; of a name that is new, 0."""

    def __missing__(self, name: str) -> int:
        return 0


@dataclass(slots=True)
class GroupStats(OldAttributes):
    """All groups of one name in one step."""

    name: str
    num_groups: int = 0
    """Groups whose forward is over."""
    offloaded_bytes: int = 0
    """Bytes copied to the host in the whole step. Those whose backward came before their release
    were kept on the device too: they are not in `StepStats.saved_bytes`."""
    reloaded_bytes: int = 0
    """Bytes copied back."""
    recomputed_bytes: int = 0
    """Bytes that were dropped, to be recomputed in backward."""
    kept_bytes: int = 0
    """Bytes that were kept: by rule, for want of host memory, needed soon, or too small to be
    offloaded. What several groups save counts once."""
    kept_bytes_by_reason: dict[str, int] = field(default_factory=Sums)
    """The same bytes by why they were kept, in words for people."""
    num_late_reloads: int = 0
    """Groups whose backward began before their reload was issued."""

    def keep(self, num_bytes: int, reason: str) -> None:
        """Count bytes that were kept on the device."""
        self.kept_bytes += num_bytes
        self.kept_bytes_by_reason[reason] += num_bytes


class _ByName(dict[str, GroupStats]):
    def __missing__(self, name: str) -> GroupStats:
        self[name] = stats = GroupStats(name)
        return stats


def _summed(name: str) -> int:
    """Make a property of what all groups have together; who reads it gets a number."""
    found: Any = property(lambda self: sum(getattr(x, name) for x in self.by_name.values()))
    return found


@dataclass(slots=True)
class StepStats(OldAttributes):
    """One training step on one rank."""

    num_late_reloads: int = 0
    num_cancelled_offloads: int = 0
    """Groups whose backward came before their device memory had been released: copied for
    nothing."""
    num_refused_blocks: int = 0
    """Blocks that were kept on the device for want of host memory."""
    refused_bytes: int = 0
    num_unpinnable_blocks: int = 0
    """Those of them for which the cap had room, but whose memory could not be pinned."""
    num_memory_shortages: int = 0
    """Reloads for which the device had no memory at first. All in flight was released then; one
    that was ahead of its time came later where that did not suffice."""
    num_hidden_groups: int = 0
    """Groups that were not made, because hooks of saved tensors of others were in force, of a
    checkpoint or of what compresses, or because `nn.DataParallel` made them in threads."""
    externally_referenced_bytes: int = 0
    """Released bytes whose storage something else kept alive, so that nothing was freed."""
    peak_host_bytes: int = 0
    """Most bytes of host memory in use at one time."""
    peak_recorded_bytes: int = 0
    """Most bytes that groups had recorded, at one time: without offload all are on the device."""
    peak_released_bytes: int = 0
    """Most bytes whose device memory was released, at one time: less what is being copied. Of a
    group that is recomputed, till its backward begins."""
    peak_released_bytes_by_name: dict[str, int] = field(default_factory=dict)
    """The same moment, by group name."""
    is_captured: bool = False
    """Whether the step was captured into a CUDA graph: what replays move counts nowhere else."""
    leaks: tuple[str, ...] = ()
    """In checking mode, or where a graph is kept for good, the groups that still held memory when
    the step ended."""
    why: str = ""
    """Why nothing is offloaded, as far as that was decided; else nothing."""

    recomputed_bytes_by_unit: dict[str, int] = field(default_factory=Sums)
    """What was dropped to be recomputed, by kind and pattern of `OffloadConfig.recompute`."""
    proven_bytes: int = 0
    """Bytes that were recomputed and compared with what was saved."""
    refused_recipe_bytes: dict[str, int] = field(default_factory=Sums)
    """Bytes that have a recipe and were kept or offloaded all the same, by why, in words for
    people."""

    by_name: dict[str, GroupStats] = field(default_factory=_ByName)
    """By group name; of a name that is new, zeros."""

    # Of all names together, each as in `GroupStats`.
    num_groups = _summed("num_groups")
    offloaded_bytes = _summed("offloaded_bytes")
    reloaded_bytes = _summed("reloaded_bytes")
    recomputed_bytes = _summed("recomputed_bytes")
    kept_bytes = _summed("kept_bytes")

    @property
    def saved_bytes(self) -> int:
        """Bytes off the device, as `verdict` says: `peak_released_bytes`, and what sites drop.

        All that these recompute in the step counts, though it need not be missing at one time. What
        was copied and kept doesn't, nor what a loss by rows saves, which isn't known;
        `externally_referenced_bytes` do, and were on the device.
        """
        by_recipe_bytes = sum(self.recomputed_bytes_by_unit.values())  # released, too
        return self.peak_released_bytes + self.recomputed_bytes - by_recipe_bytes

    def metrics(self, *, all_counters: bool = False) -> dict[str, float]:
        """Return `saved_bytes`, offloaded and kept bytes and peak host bytes in MiB, in this order.

        They are called ``offload/saved_mib`` and so on, for TensorBoard and its like.

        Args:
            all_counters: add all counters, by their own names and in their own units.
        """
        own = ((name, getattr(self, name)) for name in dir(self) if name[0] != "_")
        counters = {f"offload/{name}": value for name, value in own if type(value) is int}
        names = ("saved", "offloaded", "kept", "peak_host")
        found = OldKeys({f"offload/{x}_mib": getattr(self, f"{x}_bytes") / 2**20 for x in names})
        found.counters = counters
        found.update(counters if all_counters else ())
        return found

    @property
    def verdict(self) -> str:
        """What the step has won, or why that is nothing, and why most of the rest was kept."""
        off_bytes, recorded_bytes = self.saved_bytes, self.peak_recorded_bytes
        recorded_bytes += off_bytes - self.peak_released_bytes  # by sites, which have no groups
        sizes = recorded_bytes, off_bytes, self.peak_host_bytes, self.recomputed_bytes
        recorded, device, host, again = map(format_bytes, sizes)
        whose = " at each replay of the graph that it was captured into" if self.is_captured else ""
        text = f"at most {recorded} of activations were saved{whose}, {device} of them off the "
        text += f"device, {host} on the host"
        text += f"; {again} recomputed" if self.recomputed_bytes else ""
        if not (self.offloaded_bytes or self.recomputed_bytes):
            text = self.why or "nothing was offloaded or recomputed"
        reasons = Counter[str]()
        for group in self.by_name.values():
            reasons.update(group.kept_bytes_by_reason)
        largest = reasons.most_common(3)
        least = largest[0][1] / 100 if largest else 0
        kept = ", ".join(f"{format_bytes(size)} ({why})" for why, size in largest if size > least)
        return f"{text}; kept: {kept}" if kept else text

    def __str__(self) -> str:
        """Return a table with a line for each group name, and the verdict."""
        titles = ("group", "groups", "offloaded", "reloaded", "recomputed", "kept", "late")
        rows: list[tuple[str, ...]] = [titles]
        for group in self.by_name.values():
            if group == GroupStats(group.name):  # made by a look-up
                continue
            moved = group.offloaded_bytes, group.reloaded_bytes, group.recomputed_bytes
            sizes = [format_bytes(size) for size in (*moved, group.kept_bytes)]
            rows.append((group.name, str(group.num_groups), *sizes, str(group.num_late_reloads)))
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = []
        for name, *cells in rows:
            aligned = (cell.rjust(width) for cell, width in zip(cells, others, strict=True))
            lines.append("  ".join((name.ljust(first), *aligned)))
        held = (f"still held by a graph: {leak}" for leak in self.leaks)
        table = lines if len(lines) > 1 else []
        return "\n".join((*table, self.verdict, *held))

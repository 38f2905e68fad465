"""What a pipeline-parallel training step consists of, in bytes and microseconds.

Bytes and times are those of one GPU and one microbatch; bandwidths are in GB/s, 10^9 bytes a
second, of one direction unless said.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_offload.core.row_config import LOSS
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.strict_model import Bytes, NamesField, StrictModel, default
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.schedule import Pass, Schedule


class UnitWork(NamedTuple):
    """What one unit of a group saves that can be recomputed instead."""

    unit: str
    num_bytes: int
    """Part of what the group saves."""
    us: float
    """What recompute takes, in the group's backward."""
    parents: tuple[str, ...] = ()
    """The groups of its layer that hold what it is made from, besides its own."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One part of a stage's forward, and of its backward.

    Groups follow one another and are not nested. What the engine sees no boundary of (an embedding,
    a loss, whatever lies between groups) is a part that is not marked.
    """

    name: str
    num_bytes: int
    """What it saves that can be offloaded: offloading it copies this much and frees as much."""
    forward_us: float
    backward_us: float
    kept_bytes: int = 0
    """What it saves besides, that can't move (too small, or something else holds it)."""
    forward_temp_bytes: int = 0
    """The most its forward takes for a while beyond what it saves."""
    backward_temp_bytes: int = 0
    """The most its backward takes for a while beyond what was saved."""
    backward_block_bytes: int = 0
    """What its backward takes besides and leaves no gaps of behind: one block of one size, or a
    layer that is recomputed."""
    is_apart: bool = False
    """Whether its tensors are larger than those of layers, whose freed memory they can't use."""
    is_marked: bool = True
    """Whether the engine sees it as a group; if not, all that it saves is kept."""
    units: tuple[UnitWork, ...] = ()
    """What of ``num_bytes`` can be recomputed."""
    recomputed: tuple[UnitWork, ...] = ()
    """What is recomputed, and so no part of ``num_bytes`` any more."""
    layer: int | None = None
    """Of which layer of the model it is a part, as far as that is known."""

    @property
    def saved_bytes(self) -> int:
        """All that it saves."""
        return self.num_bytes + self.kept_bytes

    def with_recompute(self, names: Collection[str]) -> GroupWork:
        """Return the same work with some units recomputed.

        Their bytes are there while its forward runs, which makes them, and while its backward does.
        """
        chosen = tuple(unit for unit in self.units if unit.unit in names)
        if not (chosen and self.is_marked):
            return self
        num_bytes = sum(unit.num_bytes for unit in chosen)
        return replace(
            self,
            num_bytes=self.num_bytes - num_bytes,
            backward_us=self.backward_us + sum(unit.us for unit in chosen),
            forward_temp_bytes=self.forward_temp_bytes + num_bytes,
            backward_temp_bytes=self.backward_temp_bytes + num_bytes,
            units=tuple(unit for unit in self.units if unit not in chosen),
            recomputed=self.recomputed + chosen,
        )


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage of the pipeline, virtual ones counted."""

    groups: tuple[GroupWork, ...]
    """In the order of the forward; backward takes them from the end."""
    output_bytes: int = 0
    """What goes to the next stage, and as a gradient returns."""
    buffer_bytes: int = 0
    """What receiving and sending takes on the device while a pass of the stage runs, beyond what
    its groups save."""
    num_launches: float = math.inf
    """Kernels that a pass launches, the mean of forward and backward: how many passes the host may
    be ahead, while the memory of messages isn't free (`pending_bytes`). Infinite: none."""
    host_us: float = 0.0
    """What the host takes to launch a forward and a backward."""
    host_us_per_group: float = 0.0
    """What it takes besides for a marked group, where there is an engine."""

    def slowness(self, *, has_engine: bool) -> float:
        """Return by how much the host draws out the stage's passes: the slower of two counts."""
        host_us = self.host_us
        if has_engine:
            host_us += self.host_us_per_group * sum(group.is_marked for group in self.groups)
        device_us = sum(group.forward_us + group.backward_us for group in self.groups)
        return max(1.0, host_us / device_us) if device_us else 1.0


class RankSettings(StrictModel):
    """The device memory of a rank's copies, as in ``OffloadConfig``, and what may be recomputed."""

    max_inflight_bytes: Bytes | None = None
    """Device memory for groups on their way out. None leaves it to the package."""
    prefetch_bytes: Bytes | None = None
    """Device memory for groups that are back ahead of their use. None leaves it to the package."""
    recompute: NamesField = default(())
    """The units, and the sites of rows, that may be recomputed; unless set, all."""

    def recomputable(self, known: Sequence[str]) -> Sequence[str]:
        """Return what of that which is known may be recomputed; `ConfigError` for other names."""
        for name in {*self.recompute} - {*known, LOSS}:
            raise ConfigError(
                f"offload.recompute: the job has no kind {name!r}{did_you_mean(name, known)}"
            )
        return self.recompute if "recompute" in self.model_fields_set else known


UNLIMITED = RankSettings()


@dataclass(frozen=True, slots=True)
class Job:
    """A training step on all pipeline ranks.

    The GPUs of one pipeline rank, of a tensor-parallel group and of replicas, do the same at the
    same time, so one of them is simulated, with the share of the node's bandwidth that those of its
    node take (`gpus_per_rank`).
    """

    schedule: Schedule
    stages: tuple[StageWork, ...]
    """By stage of the pipeline; `Schedule.stages_of` says whose they are."""
    static_bytes: tuple[int, ...]
    """Per pipeline rank: weights, gradients, optimizer state, whatever lies there all the time."""
    machine: Machine = Machine()  # noqa: RUF009 - frozen
    gpus_per_rank: int = 1
    """GPUs of a node that do exactly the same at the same time."""
    replicas_us: tuple[float, ...] = ()
    """Per pipeline rank: what it waits in the end for messages of replicas; none for nothing."""
    expandable_segments: bool = False
    """Whether what is reserved has no gaps."""
    unused_bytes: tuple[int, ...] = ()
    """Per pipeline rank: what is reserved beside ``static_bytes``; none for nothing."""

    @property
    def ranks_per_node(self) -> int:
        """Pipeline ranks, in order, whose GPUs share a node; one whose GPUs take several too."""
        return max(1, self.machine.gpus_per_node // self.gpus_per_rank)


def node_bytes(job: Job, sizes: Sequence[int]) -> int:
    """Return what GPUs hold on a node's host at most, of what one of each pipeline rank does."""
    num_gpus, size = min(job.gpus_per_rank, job.machine.gpus_per_node), job.ranks_per_node
    nodes = (sum(sizes[first : first + size]) for first in range(0, len(sizes), size))
    return num_gpus * max(nodes, default=0)


QUEUED_LAUNCHES = 1024
"""Kernels that wait in a stream of CUDA before the next launch blocks the host. NVIDIA documents no
number; about a thousand are seen (https://stackoverflow.com/questions/53970187)."""


def message_bytes(job: Job, rank: int, passes: Sequence[Pass]) -> Iterator[tuple[int, int]]:
    """Yield, before each pass that a rank launches, what messages hold, and have freed too early.

    A Megatron stage refers to its last input, and so to that one's gradient, until its next
    forward; the interleaved schedule to the input that came last in its warm-up, until the end.

    PyTorch marks messages between stages with `record_stream`, so the allocator reuses their memory
    again only some launches later; docs/simulation.md says how many.
    """
    stages, own_stages = job.stages, frozenset(job.schedule.stages_of(rank))
    num_launched, pending, held_bytes = 0.0, 0, 0
    freed: deque[tuple[float, int]] = deque()  # at how many launches they are back, and bytes
    last_inputs: dict[int, int] = {}  # by stage, of which no other pass is in flight
    num_inflight: Counter[int] = Counter()
    warmed_up = None  # the backward of that input
    if len(own_stages) > 1:
        warmed_up = replace(passes[[one.kind for one in passes].index("B") - 1], kind="B")
    for one in passes:
        is_forward = one.kind == "F"
        num_inflight[one.stage] += 1 if is_forward else -1
        if is_forward:
            last_inputs.pop(one.stage, None)
        yield held_bytes + sum(last_inputs.values()), pending
        num_launched += stages[one.stage].num_launches
        # A forward is the last to need what it sends. A backward is so of its input, of the
        # gradient that has come and of that which it sends; each is as large as its output.
        for other, number in ((one.stage + 1, 1), (one.stage - 1, 0 if is_forward else 2)):
            if 0 <= other < len(stages) and other not in own_stages:
                num_bytes = number * stages[min(one.stage, other)].output_bytes
                freed.append((num_launched + QUEUED_LAUNCHES, num_bytes))
                pending += num_bytes
        while freed and freed[0][0] <= num_launched:
            pending -= freed.popleft()[1]
        if is_forward or one.stage == 0 or one.stage - 1 in own_stages:
            continue
        num_bytes = 2 * stages[one.stage - 1].output_bytes
        if one == warmed_up:
            held_bytes += num_bytes
        elif not num_inflight[one.stage]:
            last_inputs[one.stage] = num_bytes

"""The contract between the engine and the machine that really copies.

Three streams run side by side: *compute*, which belongs to the user's program, *d2h* and *h2d*.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch

Stream: TypeAlias = Any
"""A queue of device work; opaque outside its backend."""

Event: TypeAlias = Any
"""A point in a stream; opaque outside its backend. Waiting on it covers all that came before."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Destination and source of one copy: contiguous tensors of the same dtype and shape. The source is
read when it is copied: its storage may move on to other tensors, its bytes not before a wait."""


class Wait(enum.Enum):
    """The six waits, each at one place in the package; the value says what breaks without it."""

    W1 = "D2H reads the source before its producer on the compute stream has finished"
    W2 = "device memory of the source is reused before D2H has finished"
    W3 = "H2D reads the host buffer before D2H has finished"
    W4 = "the reloaded tensor is used before H2D has finished"
    W5 = "the host buffer is reused before H2D has finished"
    W6 = "the reload target's memory is reused before its last consumer has finished"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is a call into Python


class DeviceMemory(NamedTuple):
    """What the process has of the device's memory; 0 where unknown."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    """Taken and not handed back: allocated or cached."""
    peak_allocated_bytes: int = 0
    num_out_of_memory: int = 0
    """How often memory could not be had so far."""


class Backend(abc.ABC):
    """Streams, events, memory and copies of one device.

    All regions are contiguous tensors. Nothing here blocks the host except the ``sync_`` calls.
    """

    name: str
    observes: bool = False
    """Whether the ``note_`` calls do anything; else the engine leaves them out."""
    d2h_stream: Stream
    h2d_stream: Stream

    @abc.abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a strided one, not a nested, in this backend's device memory."""

    @abc.abstractmethod
    def compute_stream(self) -> Stream:
        """Return the stream that the calling program computes on now, one object for each."""

    @abc.abstractmethod
    def computing_on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which ``stream`` is the one that the program computes on."""

    @abc.abstractmethod
    def read_on(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Say that ``stream`` reads a tensor, which may have been allocated on another.

        Once it is freed, its memory is handed on when all that ``stream`` has queued then is over.
        """

    @abc.abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return a new event behind all work queued on ``stream`` so far."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event, why: Wait) -> None:
        """Make later work on ``stream`` run after ``event``; ``why`` names the contract's row."""

    def wait_compute(self, stream: Stream, why: Wait) -> None:
        """Make later work on ``stream`` run after all that the compute stream has queued so far."""
        self.wait(stream, self.record(self.compute_stream()), why)

    @abc.abstractmethod
    def copy(self, pairs: Sequence[Pair], stream: Stream, label: str) -> Event:
        """Queue copies (at least one, one side on the host) on a copy stream, in any order.

        Returns the event behind them. ``label`` is for NVTX ranges and hazard reports.
        """

    @abc.abstractmethod
    def is_done(self, event: Event) -> bool:
        """Whether the work before ``event`` has finished, without waiting."""

    @abc.abstractmethod
    def sync_copies(self) -> None:
        """Block the host until both copy streams are empty."""

    @abc.abstractmethod
    def empty_device_like(self, host: torch.Tensor) -> torch.Tensor:
        """Allocate what a contiguous host tensor is reloaded to, in the compute stream's order.

        Its previous owner may still be in use there: the first write from another stream has to
        wait for the compute stream's present point (W6).
        """

    def capacity_bytes(self) -> int | None:
        """Return the most device memory that the process can reserve now, if known."""
        return None

    def memory(self) -> DeviceMemory:
        """Return what is allocated and reserved, by the order of the host's calls."""
        return DeviceMemory()

    def trim_device(self) -> None:
        """Hand device memory that is cached and unused back; may block the host."""
        return

    @abc.abstractmethod
    def empty_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-locked host memory; a RuntimeError where it can't be had or pinned."""

    def discard(self, memory: list[Any]) -> None:
        """Empty a list of host memory that nothing else refers to, where that takes time later."""
        memory.clear()

    @property
    def is_host_prepared(self) -> bool:
        """Whether all is there that `prepare_host` was to make ready, or can be had of it."""
        return True

    @property
    def num_host_prepared(self) -> int:
        """How many calls of `empty_host` are quick already."""
        return 0

    def prepare_host(self, num_bytes: int, number: int) -> None:  # noqa: B027 - pinning is quick
        """Let so many calls of `empty_host` with this size be quick soon; what is left over goes.

        A call takes the place of the one before.
        """

    # For traces, by default on the host's clock: when work was queued, not when it ran.

    def timestamp(self, stream: Stream) -> Any:
        """Return a point behind all work queued on ``stream`` so far whose time can be read."""
        return time.perf_counter() * 1e6

    def host_us(self) -> float:
        """Return what the host's clock shows, by which work is queued."""
        return time.perf_counter() * 1e6

    def sync_elapsed_us(self, start: Any, end: Any) -> float:
        """Block the host until both points have passed; return the time between them."""
        return float(end - start)

    def pause(self) -> None:  # noqa: B027 - where the host is the device, nothing gets ahead
        """Let the compute stream do nothing for about a millisecond, and the host go on."""

    # For CUDA graphs; a device without them captures nothing and has neither.

    def is_capturing(self) -> bool:
        """Whether the compute stream is captured: nothing runs, and the host may wait for nothing.

        Memory can't be pinned then, events of before can't be waited for, nor those of inside it
        afterwards.
        """
        return False

    def graph_stream(self) -> Stream | None:
        """Return a new stream to capture a graph on; None where there are no graphs."""
        return None

    def graph_event(self) -> Event | None:
        """Return a new event that orders work inside a graph with work outside; None likewise."""
        return None

    # What the engine reports to a backend that `observes`.

    def note_produced(self, region: torch.Tensor, label: str) -> None:  # noqa: B027 - optional
        """The compute stream has written ``region``."""

    def note_consumed(self, region: torch.Tensor, label: str) -> None:  # noqa: B027 - optional
        """The compute stream reads ``region`` from here on."""

    def note_freed(  # noqa: B027 - optional
        self, region: torch.Tensor, label: str, *, sole_owner: bool
    ) -> None:
        """Whatever comes next on the compute stream may overwrite ``region``.

        With a ``sole_owner``, the engine, the memory really is freed.
        """

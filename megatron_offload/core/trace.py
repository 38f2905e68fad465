"""One traced step: what each stream did when, how many bytes that held, and the sums.

Files hold Chrome trace events, which chrome://tracing and ui.perfetto.dev open. Times are
microseconds since the trace began; spans of one stream don't overlap.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from megatron_offload.core.units import format_bytes, format_us
from megatron_offload.errors import ConfigError, shorten
from megatron_offload.files.renames import RENAMED
from megatron_offload.files.text import read_json, replace_text

STREAMS = ("compute", "d2h", "h2d")

PIPELINE_WAIT = "pipeline"
"""The wait of a stall that is for another stage, and no copy: only a simulation knows."""

_WAITS = {"W2": "to the host", "W4": "back", PIPELINE_WAIT: "waits for a stage"}


class ByteCount(StrEnum):
    """The counters of bytes in a trace."""

    INFLIGHT = "bytes in flight"
    """Copied or being copied to the host, with the device memory still held."""
    HOST = "bytes on the host"
    """Held in host memory, from the issue of the offload to the issue of the reload."""
    PREFETCHED = "bytes prefetched, not consumed"
    """Back on the device, or kept there because it is needed soon, and not yet consumed."""
    LIVE = "bytes saved"
    """What the groups between their commit and their backward have saved, wherever it lies."""
    HELD = "bytes saved, on the device"
    """The part of `LIVE` that takes device memory; an upper bound while a copy that was called off
    is still in flight."""


_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Time = Annotated[_Number, Field(ge=0, le=1e15)]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one stream."""

    stream: str
    """One of `STREAMS`."""
    kind: str
    """On the compute stream ``forward``, ``backward``, ``recompute`` (of what a backward needs),
    ``stall`` or ``other`` (outside any group); else the stream's name."""
    label: str
    """The group; empty outside any."""
    start_us: _Time
    duration_us: _Time
    num_bytes: StrictInt = 0
    wait: str = ""
    """Which of the six waits a stall is, or `PIPELINE_WAIT`."""

    @property
    def end_us(self) -> float:
        """When the stretch is over."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that holds from a moment on."""

    name: str
    time_us: _Time
    value: _Number


@dataclass(slots=True)
class StepTrace:
    """One step on one rank, and its sums."""

    rank: int = 0
    spans: list[Span] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)

    def of(self, stream: str) -> list[Span]:
        """Return the spans of one stream in the order of time."""
        spans = (span for span in self.spans if span.stream == stream)
        return sorted(spans, key=lambda span: span.start_us)

    @property
    def duration_us(self) -> float:
        """From the first span's start to the last one's end."""
        first_us = min((span.start_us for span in self.spans), default=0.0)
        return max((span.end_us for span in self.spans), default=0.0) - first_us

    @property
    def stall_us(self) -> dict[str, float]:
        """What the compute stream lost, by wait."""
        lost_us: dict[str, float] = defaultdict(float)
        for span in self.of("compute"):
            if span.kind == "stall":
                lost_us[span.wait] += span.duration_us
        return dict(sorted(lost_us.items()))

    @property
    def num_bytes(self) -> dict[str, int]:
        """What each copy stream moved."""
        return {name: sum(span.num_bytes for span in self.of(name)) for name in STREAMS[1:]}

    def facts(self) -> list[str]:
        """Return what people want to know of the step, one fact a text."""
        waited_us = sum(us for wait, us in self.stall_us.items() if wait != PIPELINE_WAIT)
        share = waited_us / self.duration_us if self.duration_us else 0.0
        facts = [
            f"step {format_us(self.duration_us)}",
            f"compute waits for copies {format_us(waited_us)} ({share:.1%})",
            *(f"{_WAITS.get(wait, wait)} {format_us(us)}" for wait, us in self.stall_us.items()),
        ]
        for stream, num_bytes in self.num_bytes.items():
            busy_us = sum(span.duration_us for span in self.of(stream))
            if num_bytes and busy_us:
                rate = f"{num_bytes / busy_us / 1e3:.3g} GB/s"
                facts.append(f"{stream.upper()} {format_bytes(num_bytes)} at {rate}")
        return facts


def write_traces(path: str | Path, traces: Sequence[StepTrace]) -> None:
    """Write the traces of ranks to one file of Chrome trace events; their clocks aren't aligned."""
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"one trace for each rank, got ranks {ranks}")
    events = [event for trace in traces for event in _events(trace)]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


_RANK, _SPAN, _COUNTER = TypeAdapter(StrictInt), TypeAdapter(Span), TypeAdapter(Counter)


def read_traces(path: str | Path) -> list[StepTrace]:
    """Read what `write_traces` wrote, in the order of ranks; `ConfigError` for any other file."""
    traces: dict[int, StepTrace] = {}
    # Larger files are no trace of a few steps.
    data = read_json(path, limit_bytes=1024**3)
    try:
        for event in data["traceEvents"]:
            rank, args = _RANK.validate_python(event["pid"]), event["args"]
            trace = traces.setdefault(rank, StepTrace(rank))
            if event["ph"] == "X":  # other events but these two only name things
                fields = {
                    "stream": dict(enumerate(STREAMS))[event["tid"]],
                    "kind": RENAMED.get(event["cat"], event["cat"]),
                    "label": args.get("group", ""),
                    "start_us": event["ts"],
                    "duration_us": event["dur"],
                    "num_bytes": args.get("bytes", 0),
                    "wait": args.get("wait", ""),
                }
                trace.spans.append(_SPAN.validate_python(fields))
            elif event["ph"] == "C":
                fields = {"name": event["name"], "time_us": event["ts"], "value": args["bytes"]}
                trace.counters.append(_COUNTER.validate_python(fields))
    except (AttributeError, KeyError, TypeError, ValidationError) as error:
        why = shorten(" ".join(repr(error).split()), 300)
        raise ConfigError(f"{path} is not a trace of this package: {why}") from error
    return [traces[rank] for rank in sorted(traces)]


def _events(trace: StepTrace) -> Iterable[dict[str, Any]]:
    """Yield Chrome trace events: names first, then spans, then counters."""
    pid = trace.rank

    def named(what: str, key: str, value: str | int, **place: int) -> dict[str, Any]:
        return {"ph": "M", "name": f"{what}_{key}", "pid": pid, **place, "args": {key: value}}

    yield named("process", "name", f"rank {pid}")
    yield named("process", "sort_index", pid)
    for tid, stream in enumerate(STREAMS):
        yield named("thread", "name", stream, tid=tid)
        yield named("thread", "sort_index", tid, tid=tid)
        for span in trace.of(stream):
            rate = round(span.num_bytes / span.duration_us / 1e3, 3) if span.duration_us else 0
            args = {"group": span.label, "bytes": span.num_bytes, "GB/s": rate, "wait": span.wait}
            args = {key: value for key, value in args.items() if value}
            name = f"{span.wait or span.kind} {span.label}".rstrip()
            place = {"pid": pid, "tid": tid, "ts": span.start_us, "dur": span.duration_us}
            yield {"ph": "X", "name": name, "cat": span.kind, **place, "args": args}
    for counter in sorted(trace.counters, key=lambda counter: counter.time_us):
        args = {"bytes": counter.value}
        yield {"ph": "C", "name": counter.name, "pid": pid, "ts": counter.time_us, "args": args}

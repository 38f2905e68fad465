"""Where the host's time of a layer group goes, by part of the engine.

Takes the same step as bench_host_overhead.py, again and again, and looks every millisecond of
processor time which function of the package runs. A function of no Python, such as an allocation,
counts where it was called. Bytecodes are counted besides, in one step: they don't depend on the
machine or on what else it does.

    python benchmarks/profile_host.py --output docs/benchmarks/host_profile.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import bench_host_overhead
import torch

import megatron_offload

PACKAGE = Path(megatron_offload.__file__).parent
PARTS = {
    "hooks and boundaries": "boundary hooks manager recording guard",
    "records": "chunk saved_tensor marks",
    "blocks and copies": "transfers copies group",
    "decisions and budgets": "core/step core/group core/budget core/window engine/step learning",
    "host and device memory": "host_pool",
    "streams and events": "base cuda simulated",
}
PART_OF = {name: part for part, names in PARTS.items() for name in names.split()}
INTERVAL_S = 1e-3


def part_of(frame):
    """Return the part of the innermost frame of the package; the program's own is one too."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return PART_OF.get(f"{path.parent.name}/{path.stem}") or PART_OF.get(
                path.stem, "others"
            )
        if path.name == "bench_host_overhead.py":
            is_device = isinstance(frame.f_locals.get("self"), bench_host_overhead.NoDevice)
            return "streams and events" if is_device else "the program"
        frame = frame.f_back
    return "the program"


def sample(run, seconds):
    """Return how often each part was seen, and the number of steps."""
    seen, num_steps = Counter(), 0
    signal.signal(signal.SIGPROF, lambda _, frame: seen.update([part_of(frame)]))
    signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
    start = time.process_time()
    while time.process_time() - start < seconds:
        run()
        num_steps += 1
    signal.setitimer(signal.ITIMER_PROF, 0)
    return seen, num_steps, time.process_time() - start


def count_bytecodes(run):
    """Return the bytecodes of one step, by part."""
    counts = Counter()

    def trace(frame, event, _):
        part = part_of(frame)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def note(_, event, __):
            counts[part] += event == "opcode"
            return note

        return note

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-groups", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=30.0, help="of processor time")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mode = bench_host_overhead.Package(arguments.device, 0)

    def run():
        mode.run(arguments.num_groups, 1)

    for _ in range(5):
        run()
    counts = count_bytecodes(run)
    seen, num_steps, total_s = sample(run, arguments.seconds)
    us = total_s * 1e6 / num_steps / arguments.num_groups
    rows = {
        part: {
            "us_per_group": round(us * num / seen.total(), 1),
            "bytecodes_per_group": round(counts[part] / arguments.num_groups),
        }
        for part, num in seen.most_common()
    }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": bench_host_overhead.machine_of(arguments.device),
        "torch": torch.__version__,
        "num_groups": arguments.num_groups,
        "us_per_group": round(us, 1),
        "parts": rows,
    }
    for part, row in rows.items():
        print(f"{part:24} {row['us_per_group']:8.1f} us {row['bytecodes_per_group']:8} bytecodes")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

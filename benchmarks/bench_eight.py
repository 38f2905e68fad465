"""What a link and host memory that all GPUs of a host share cost: copies, and two jobs.

    python3 benchmarks/bench_eight.py --output runs/eight

First the copies of 1, 2, 4 and all GPUs at once, each way and both, from and to memory pinned next
to each GPU and on the other side of the host, beside what the planner predicts. Then
`bench_peers.py` on all GPUs: dense layers with PP=4 VPP=2 and two replicas, and experts that are
spread over all. It ends within ten minutes on eight GPUs, with fewer than eight of them sooner:
PP is then at most the number of GPUs, and there are as many replicas as are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from megatron_offload.backends import create_backend
from megatron_offload.config import OffloadConfig
from megatron_offload.machine.bandwidth import BLOCK_BYTES, Link, median_rates
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.simulate import fair_rates

MODES = ("none", "megatron", "recompute", "ours-auto")
WAYS = {"out": ("d2h",), "in": ("h2d",), "both": ("d2h", "h2d")}
NODES = Path("/sys/devices/system/node")


def node_of(gpu):
    """Return the memory node that a GPU is attached to; -1 where the system doesn't say."""
    has = torch.cuda.get_device_properties(gpu)
    name = f"{has.pci_domain_id:04x}:{has.pci_bus_id:02x}:{has.pci_device_id:02x}.0"
    path = Path("/sys/bus/pci/devices", name, "numa_node")
    return int(path.read_text()) if path.exists() else -1


def processors():
    """Return by memory node the processors of it that this process may use."""
    allowed, found = os.sched_getaffinity(0), {}
    for folder in NODES.glob("node[0-9]*"):
        parts = (folder / "cpulist").read_text().strip().split(",")
        ends = [[*map(int, part.split("-"))] for part in parts if part]
        own = {number for one in ends for number in range(one[0], one[-1] + 1)} & allowed
        if own:
            found[int(folder.name[4:])] = own
    return found


@contextlib.contextmanager
def running_on(numbers):
    """Run on these processors, next to which new memory lies."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(num_gpus, nodes):
    """Return GB/s of GPUs that copy at once, by way: of each GPU, both directions of both.

    ``nodes`` has the processors next to which each one's memory is pinned.
    """
    links = []
    for gpu in range(num_gpus):
        with running_on(nodes[gpu]):
            links.append(Link(create_backend(OffloadConfig(backend="cuda"), gpu), BLOCK_BYTES))
    median_rates(links, "d2h", "h2d")  # those that were idle have to wake
    return {way: median_rates(links, *names) for way, names in WAYS.items()}


def predicted(machine, num_gpus):
    """Return what the planner takes each GPU to get, by way."""
    out, _, _, _ = fair_rates(machine, 1, num_gpus, 0, 0)
    _, back, _, _ = fair_rates(machine, 1, 0, num_gpus, 0)
    _, _, both_out, both_in = fair_rates(machine, 1, 0, 0, num_gpus)
    return {way: [x / 1e3 for x in xs] for way, xs in
            {"out": [out], "in": [back], "both": [both_out, both_in]}.items()}  # fmt: skip


def copies(num_gpus):
    """Return rows of what copies get, and print them beside what is predicted."""
    places, own = processors(), [node_of(gpu) for gpu in range(num_gpus)]
    everywhere = os.sched_getaffinity(0)
    rows = []
    for place in ("near", "far"):
        chosen = []
        for node in own:
            others = [numbers for other, numbers in places.items() if other != node]
            chosen.append(places.get(node, everywhere) if place == "near" else others)
        if place == "far":
            if not all(chosen):
                print("far: this process may use the processors of one memory node alone")
                continue
            chosen = [set().union(*numbers) for numbers in chosen]
        for number in [n for n in (1, 2, 4, 8) if n <= num_gpus]:
            found, machine = measure(number, chosen), Machine(gpus_per_node=number)
            wanted = predicted(machine, number)
            for way, rates in found.items():
                means = [sum(one) / number for one in zip(*rates, strict=True)]
                off = [100 * (a / b - 1) for a, b in zip(wanted[way], means, strict=True)]
                rows.append({"memory": place, "gpus": number, "way": way, "gbps": rates}
                            | {"predicted_gbps": wanted[way], "off_percent": off})  # fmt: skip
                texts = (" ".join(f"{x:6.1f}" for x in xs) for xs in (means, wanted[way], off))
                print("{:4} {} GPUs {:4}  GB/s each {}  predicted {}  off by {} %".format(
                    place, number, way, *texts), flush=True)  # fmt: skip
    return rows


def jobs(options):
    """Run both jobs in all modes; return how each `bench_peers.py` ended."""
    script, pp = Path(__file__).with_name("bench_peers.py"), min(4, options.gpus)
    dense = ["--shape", "dense8", "--pp", pp, "--dp", options.gpus // pp]
    dense += [] if pp > 1 else ["--vpp", 1]
    experts = ["--shape", "moe8", "--dp", options.gpus, "--ep", options.gpus]
    ends = {}
    for name, sizes in (("dense", dense), ("experts", experts)):
        words = [*sizes, "--modes", *options.modes, "--steps", 5, "--warmup", 4, "--timeout", 150]
        words += [*options.more, "--output", options.output / name]
        command = [sys.executable, script, *words]
        ends[name] = subprocess.run([str(word) for word in command]).returncode
    return ends


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, help="of them; all unless set")
    parser.add_argument("--modes", nargs="*", default=MODES, help="of bench_peers.py; none: copies")
    parser.add_argument("--output", type=Path, default=Path("runs/eight"))
    parser.add_argument("more", nargs="*", help="behind --: sizes for bench_peers.py")
    options = parser.parse_args()
    options.gpus = options.gpus or torch.cuda.device_count()
    options.output.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }
    if torch.cuda.is_available():
        report |= {"device": torch.cuda.get_device_name(), "copies": copies(options.gpus)}
    (options.output / "copies.json").write_text(json.dumps(report, indent=1) + "\n")
    ends = jobs(options) if options.modes else {}
    if any(ends.values()):
        sys.exit(f"ended with an error: {', '.join(name for name, code in ends.items() if code)}")


if __name__ == "__main__":
    main()

"""Memory against step time, as `bench_peers.py` has measured it, and as it is simulated.

    python benchmarks/compare_tradeoff.py [BENCH_PEERS.json PROFILES_FOLDER]

Simulated are plans for the memory targets of the measured modes, and for others between them, made
from profiles of that job (`bench_peers.py --profile` leaves some), with the node's bandwidths as
the measured run's no offload has found them; nothing is fitted. Prints a table, in which a measured
target has what it leaves, or lacks, and a simulated step how far it is off the measured one. Writes
docs/benchmarks/tradeoff.json and docs/images/tradeoff_h200.png.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import altair
from compare_simulation import FOLDER, ROOT, machine_of

from megatron_offload.files.strict_model import write_model
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.files import load_profile
from megatron_offload.planning.profiled_job import job_of
from megatron_offload.planning.schedule import make_schedule
from megatron_offload.report.console import console, plain_table
from megatron_offload.report.plots import tradeoff_chart
from megatron_offload.report.tables import TradeOff, TradeOffPoint

GIB = 2**30
MEMORY = "reserved memory"
NAMES = {"none": "no offload", "recompute": "full recompute", "ours-all": "all moved"}
NUM_TARGETS = 8
"""At which the simulated curve is looked at, besides those that were measured."""


def modes_of(data: dict) -> dict[str, list[dict]]:
    """Return the rows of each mode that has come through, by what to call it here."""
    modes: dict[str, list[dict]] = {}
    for row in data["rows"]:
        target = re.search(r"policy\.(?:target_bytes|memory_target)=([\d.]+)GiB", row["mode"])
        percent = re.search(r"policy\.most_slowdown_percent=([\d.]+)", row["mode"])
        kind = row["mode"].partition(":")[0]
        name = f"target {float(target[1]):g} GiB" if target else NAMES.get(kind, kind)
        if "auto" in row["mode"]:
            name = f"auto, {percent[1] if percent else 1} %"
        if "rank" in row:
            modes.setdefault(name, []).append(row)
    return modes


def gib(sizes) -> str:
    return " ".join(f"{size / GIB:.1f}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw memory against step time.")
    parser.add_argument("measured", type=Path, nargs="?", default=FOLDER / "planned_c.json")
    parser.add_argument("profiles", type=Path, nargs="?", default=FOLDER / "profiles_c")
    given = parser.parse_args()
    data = json.loads(given.measured.read_text())
    modes, sizes = modes_of(data), data["sizes"]
    kind = "interleaved" if sizes["vpp"] > 1 else "1f1b"
    schedule = make_schedule(kind, sizes["pp"], sizes["microbatches"], sizes["vpp"])
    paths = [given.profiles / f"profile_{rank}.json" for rank in range(sizes["pp"])]
    profiles = [load_profile(path) for path in paths]
    chooser = Chooser(profiles, job_of(profiles, schedule, machine_of(modes["no offload"])))
    columns = ["setting", "", "reserved, GiB by rank", "moved, GiB", "step time", ""]
    table, points = plain_table("", columns, 5), []

    def add(name: str, peaks: list[int], moved: list[int], percent: float, note: str, kind: str):
        points.append(
            TradeOffPoint(
                label=name, peak_bytes=max(peaks), step_time_percent=round(percent, 3), kind=kind
            )
        )
        table.add_row(name, kind, gib(peaks), gib(moved), f"{percent:+.2f} %", note)

    def add_measured(name: str, ranks: list[dict]) -> None:
        peaks, moved = ([r[key] for r in ranks] for key in ("peak_reserved_bytes", "d2h_bytes"))
        target = re.match(r"target ([\d.]+)", name)
        note = f"{max(peaks) / GIB - float(target[1]):+.2f} GiB" if target else ""
        add(name, peaks, moved, 100 * (ranks[0]["ratio"] - 1), note, "measured")

    def add_simulated(name: str, plan) -> None:
        ratio = plan.ranks[0].predicted_step_us / chooser.without.step_us
        note = f"{100 * (ratio / modes[name][0]['ratio'] - 1):+.1f} %" if name in modes else ""
        peaks = [rank.predicted_peak_bytes for rank in plan.ranks]
        moved = [rank.moved_bytes for rank in plan.ranks]
        add(name, peaks, moved, 100 * (ratio - 1), note, "predicted")

    lowest, highest = (x / GIB for x in (chooser.lowest_bytes, chooser.highest_bytes))
    targets = {
        round(lowest + (highest - lowest) * n / NUM_TARGETS, 1) for n in range(NUM_TARGETS + 1)
    }
    for name, ranks in modes.items():
        add_measured(name, ranks)
        if name.startswith("auto"):
            add_simulated(name, chooser.within(float(name.split()[1])))
        elif name.startswith("target"):
            targets.add(float(name.split()[1]))
    for target in sorted(targets):
        if target >= lowest:
            plan = chooser.under((int(target * GIB),) * sizes["pp"])
            add_simulated(f"target {target:g} GiB", plan)
    console().print(table)
    tradeoff = TradeOff(memory=MEMORY, points=tuple(points))
    write_model(ROOT / "docs" / "benchmarks" / "tradeoff.json", tradeoff)
    words = f"{sizes['layers']} layers, hidden {sizes['hidden']}, sequence {sizes['seq']}, "
    words += f"PP={sizes['pp']}, VPP={sizes['vpp']}, {sizes['microbatches']} microbatches, H200"
    title = altair.Title(f"GPT, {words}", anchor="start")
    chart = tradeoff_chart(tradeoff).properties(title=title)
    chart.save(ROOT / "docs" / "images" / "tradeoff_h200.png", scale_factor=1.5)


if __name__ == "__main__":
    main()

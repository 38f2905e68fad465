"""Memory against step time on four H200s, as measured by runs that plan, and as simulated.

    python benchmarks/compare_tradeoff.py

Measured is docs/benchmarks/h200/planned_c.json: `auto` and four memory targets, each beside no
offload. Simulated are plans for the same targets, made and simulated from the profiles of another
run of that job (docs/benchmarks/h200/profiles_c), with the node's bandwidths as the measured run's
no offload has found them; nothing is fitted. Writes docs/benchmarks/tradeoff.json and
docs/images/tradeoff_h200.png, and prints a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from compare_simulation import FOLDER, ROOT, machine_of

from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.profile_file import load_profile
from megatron_offload.planning.profiled_job import job_of
from megatron_offload.planning.schedule import make_schedule
from megatron_offload.report.console import console, plain_table
from megatron_offload.report.plots import plot_tradeoff
from megatron_offload.report.tradeoff import TradeOff, TradeOffPoint, write_tradeoff

GIB = 2**30
MEMORY = "reserved memory"
SCHEDULE = make_schedule("interleaved", 4, 8, 2)
TARGETS = tuple(range(22, 40, 2))
"""Where the simulated curve is looked at, in GiB."""


def measured(data: dict) -> Iterator[tuple[str, list[dict]]]:
    """Yield what to call each setting, and what its ranks have shown."""
    by_mode: dict[str, list[dict]] = {}
    for row in data["rows"]:
        by_mode.setdefault(row["mode"], []).append(row)
    for mode, ranks in by_mode.items():
        target = re.search(r"policy\.target_bytes=(\d+)GiB", mode)
        percent = re.search(r"policy\.most_slowdown_percent=([\d.]+)", mode)
        if target:
            yield f"target {target[1]} GiB", ranks
        else:
            yield f"auto, {percent[1]} %" if percent else "no offload", ranks


def plans(chooser: Chooser) -> Iterator[tuple[str, OffloadPlan]]:
    """Yield plans of the recorded step, and what to call them."""
    yield "auto, 0.8 %", chooser.within(0.8)
    for target in TARGETS:
        plan = chooser.under((target * GIB,) * len(chooser.without.ranks))
        yield ("no offload" if not plan.moved_bytes else f"target {target} GiB"), plan


def gib(sizes) -> str:
    return " ".join(f"{size / GIB:.1f}" for size in sizes)


def main() -> None:
    data = json.loads((FOLDER / "planned_c.json").read_text())
    none = next(run for run in data["runs"] if run["mode"] == "none")
    machine = machine_of(none["ranks"])
    columns = ["setting", "", "reserved, GiB of ranks 0 to 3", "moved, GiB", "step time"]
    table = plain_table("", columns, 5)
    points = []

    def add(label: str, peaks: list[int], moved: list[int], percent: float, **kind: bool) -> None:
        points.append(
            TradeOffPoint(
                label=label, peak_bytes=max(peaks), step_time_percent=round(percent, 3), **kind
            )
        )
        how = "simulated" if kind else "measured"
        table.add_row(label, how, gib(peaks), gib(moved), f"{percent:+.2f} %")

    for label, ranks in measured(data):
        percent = 100 * (max(rank["ratio"] for rank in ranks) - 1)
        peaks, moved = ([rank[n] for rank in ranks] for n in ("peak_reserved_bytes", "d2h_bytes"))
        add(label, peaks, moved, percent)
    profiles = [load_profile(FOLDER / "profiles_c" / f"profile_{rank}.json") for rank in range(4)]
    chooser = Chooser(profiles, job_of(profiles, SCHEDULE, machine))
    for label, plan in sorted(plans(chooser), key=lambda pair: pair[1].moved_bytes):
        percent = 100 * (plan.ranks[0].predicted_step_us / chooser.without.step_us - 1)
        peaks = [rank.predicted_peak_bytes for rank in plan.ranks]
        moved = [rank.moved_bytes for rank in plan.ranks]
        add(label, peaks, moved, percent, is_predicted=True)
    console().print(table)
    write_tradeoff(ROOT / "docs" / "benchmarks" / "tradeoff.json", MEMORY, points)
    tradeoff = TradeOff(memory=MEMORY, points=tuple(points))
    title = "GPT, 16 layers, hidden 8192, PP=4, VPP=2, 8 microbatches, four H200s"
    plot_tradeoff(tradeoff, ROOT / "docs" / "images" / "tradeoff_h200.png", title)


if __name__ == "__main__":
    main()

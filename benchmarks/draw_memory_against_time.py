"""Draw memory against step time, as `bench_peers.py` has measured it on one GPU and on two.

    python benchmarks/draw_memory_against_time.py

Reads files of docs/benchmarks, writes docs/images/memory_against_time.svg and two_gpus.svg. Each
file is one run of the script on one machine, whose times are against its own without offload; its
command and its date stand below. Of several ranks the one counts that reserves most.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import altair

ROOT = Path(__file__).parent.parent
GIB = 2**30
ONE_GPU = (["h200/made_again_a_15"], ["h200/made_again_b_8"])
BELOW = ("none", "ours-auto")
"""Modes whose names stand under their points."""
TWO_GPUS = ["h100/two_gpus", "h100/two_gpus_targets"]
PACKAGE, MEGATRON, NEITHER = "this package", "Megatron's own", "no offload"
# Okabe and Ito's colours; shapes and names tell them apart as well.
COLORS = {PACKAGE: "#0072b2", MEGATRON: "#d55e00", NEITHER: "#444444"}
SHAPES = {PACKAGE: "circle", MEGATRON: "square", NEITHER: "triangle-up"}
MODES = {
    "none": ("no offload", NEITHER),
    "megatron": ("Megatron's own offload", MEGATRON),
    "recompute": ("full recompute", MEGATRON),
    "recompute-selective": ("Megatron's selective recompute", MEGATRON),
    "ours-auto": ("this package, auto", PACKAGE),
    "ours-target": ("this package, five targets", PACKAGE),
}
"""What is drawn; settings by hand stand in the tables beside the files."""


def points_of(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what is drawn of one run, by mode."""
    most: dict[str, dict[str, Any]] = {}
    for row in data["rows"]:
        if "rank" in row:
            other = most.setdefault(row["mode"], row)
            most[row["mode"]] = max(row, other, key=lambda one: one["peak_reserved_bytes"])
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in most.items():
        mode = name.partition(":")[0]
        if mode in MODES:
            _, kind = MODES[mode]
            point = {"GiB": row["peak_reserved_bytes"] / GIB, "percent": 100 * row["ratio"]}
            found.setdefault(mode, []).append({**point, "kind": kind, "label": ""})
    for mode, many in found.items():
        many[len(many) // 3]["label"] = MODES[mode][0]
    return found


def panel(files: list[str]) -> altair.LayerChart:
    """Return the chart of runs of one shape; what several have is the first one's."""
    folder = ROOT / "docs" / "benchmarks"
    runs = [json.loads((folder / f"{name}.json").read_text()) for name in files]
    drawn: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        drawn = points_of(run) | drawn
    rows = [point for points in drawn.values() for point in points]
    data, sizes = runs[0], runs[0]["sizes"]
    points = altair.Chart({"values": rows}, width=400, height=300).encode(
        x=altair.X(
            "GiB:Q", title="reserved memory (GiB)", scale=altair.Scale(domain=[13, 38], nice=False)
        ),
        y=altair.Y(
            "percent:Q", title="step time (%)", scale=altair.Scale(domain=[96, 138], nice=False)
        ),
        color=altair.Color(
            "kind:N", scale=altair.Scale(domain=list(COLORS), range=list(COLORS.values()))
        ).legend(None),
    )
    marks = points.mark_point(size=110, filled=True, opacity=1).encode(
        shape=altair.Shape(
            "kind:N", scale=altair.Scale(domain=list(SHAPES), range=list(SHAPES.values()))
        ).legend(None)
    )
    is_below = f"indexof({json.dumps([MODES[mode][0] for mode in BELOW])}, datum.label) >= 0"
    names = [
        points.transform_filter(f"datum.label && !({is_below})").mark_text(dy=-14),
        points.transform_filter(is_below).mark_text(dy=16),
    ]
    title = f"{sizes['layers']} layers, hidden {sizes['hidden']}, {sizes['microbatches']} "
    title += f"microbatches of {sizes['mbs']} x {sizes['seq']}"
    if sizes["pp"] > 1:
        title += f", PP={sizes['pp']}, VPP={sizes['vpp']}"
    script = data["command"].partition(" --")[0].split()[-1]
    number = "one" if sizes["pp"] == 1 else f"{sizes['pp']} x"
    device = files[0].partition("/")[0].upper()
    below = [f"{number} {device}, {data['date'][:10]}, {script} --shape {data['shape']}"]
    below.append(f"100 % is no offload, {data['rows'][0]['step_ms']:.0f} ms; lower left is better")
    texts = [name.encode(text="label:N") for name in names]
    return altair.layer(marks, *texts).properties(
        title=altair.Title(title, subtitle=below, anchor="start")
    )


def main() -> None:
    for name, panels in (("memory_against_time", ONE_GPU), ("two_gpus", [TWO_GPUS])):
        chart = altair.hconcat(*map(panel, panels)).configure_view(stroke=None)
        chart = chart.configure(background="white", font="sans-serif")
        chart = chart.configure_axis(labelFontSize=12)
        chart.save(ROOT / "docs" / "images" / f"{name}.svg")


if __name__ == "__main__":
    main()

"""Draw memory against step time, as `bench_peers.py` has measured it on one H200.

    python benchmarks/draw_memory_against_time.py

Reads docs/benchmarks/h200/made_again_*.json, writes docs/images/memory_against_time.svg. Of what is
drawn each panel is one run of the script on one machine; its command and its date stand below it.
"""

from __future__ import annotations

import json
from pathlib import Path

import altair

ROOT = Path(__file__).parent.parent
GIB = 2**30
FILES = ("made_again_a_15", "made_again_b_8")
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
}
"""What is drawn; settings by hand stand in the tables beside the files."""


def panel(name: str) -> altair.LayerChart:
    """Return the chart of one file, whose first mode is no offload."""
    data = json.loads((ROOT / "docs" / "benchmarks" / "h200" / f"{name}.json").read_text())
    sizes, rows, drawn = data["sizes"], [], set()
    for row in data["rows"]:
        mode = row["mode"].partition(":")[0]
        if mode not in MODES or "rank" not in row:
            continue
        label, kind = MODES[mode]
        row = {"GiB": row["peak_reserved_bytes"] / GIB, "percent": 100 * row["ratio"]}
        rows.append({**row, "kind": kind, "label": "" if mode in drawn else label})
        drawn.add(mode)
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
    names = [
        points.transform_filter(altair.datum.label != MODES["none"][0]).mark_text(dy=-14),
        points.transform_filter(altair.datum.label == MODES["none"][0]).mark_text(dy=16),
    ]
    title = f"{sizes['layers']} layers, hidden {sizes['hidden']}, {sizes['microbatches']} "
    title += f"microbatches of {sizes['mbs']} x {sizes['seq']}"
    script = data["command"].partition(" --")[0].split()[-1]
    below = [f"one H200, {data['date'][:10]}, {script} --shape {data['shape']}"]
    below.append(f"100 % is no offload, {data['rows'][0]['step_ms']:.0f} ms; lower left is better")
    texts = [name.encode(text="label:N") for name in names]
    return altair.layer(marks, *texts).properties(
        title=altair.Title(title, subtitle=below, anchor="start")
    )


def main() -> None:
    chart = altair.hconcat(*map(panel, FILES)).configure_view(stroke=None)
    chart = chart.configure(background="white", font="sans-serif").configure_axis(labelFontSize=12)
    chart.save(ROOT / "docs" / "images" / "memory_against_time.svg")


if __name__ == "__main__":
    main()

"""Draw memory against step time, as `bench_peers.py` has measured it: all modes of a run.

    python benchmarks/draw_memory_against_time.py RUN.json [RUN.json ...] --output PICTURE.svg

Runs of one shape and size are one column, of which those before count where several have a mode;
times are against each run's own without offload. Of several ranks the one counts that reserves
most. Each column has allocated memory above reserved. A line joins this package's targets.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import altair

GIB = 2**30
WIDTH, HEIGHT, FONT = 480, 300, 12
# Okabe and Ito's colours; shapes and names tell them apart as well.
STYLES = {
    "this package": ("#0072b2", "circle"),
    "others": ("#d55e00", "square"),
    "no offload": ("#444444", "triangle-up"),
}
NAMES = {
    "none": "no offload",
    "megatron": "Megatron's offload",
    "trl": "TRL's offload",
    "recompute": "full recompute",
    "checkpoint": "checkpointing",
    "recompute-layers": "{} layers recomputed",
    "recompute-selective": "selective recompute",
    "selective": "selective {}",
    "compile": "compiled, {}",
}
"""What a mode is called, with what stands behind its colon; others by themselves."""
SIZES = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}


def name_of(mode: str) -> str:
    """Return a short name of a mode with its settings."""
    kind, _, rest = mode.partition(":")
    if kind == "ours-rows":
        return "rows: " + " + ".join(_row_in_short(row) for row in rest.split("}") if "site" in row)
    if kind in ("ours-auto", "ours-target"):
        said = re.search("(percent|memory_target|target_bytes)=([^,]*)", rest)
        return (
            "auto" if said is None else said[2] if "percent" not in said[1] else f"auto {said[2]} %"
        )
    return NAMES.get(kind, mode).format(rest).strip()


def _row_in_short(row: str) -> str:
    words = dict(part.strip(" ,{").partition(": ")[::2] for part in row.split(",") if ":" in part)
    said = f"{words.get('offload', '')} of " if words.get("offload", "").isdigit() else ""
    return f"{said}{'recomputed ' if 'recompute' in words else ''}{words['site']}"


def points_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is drawn of one run, by mode."""
    most: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        if "rank" in row and row["ratio"] is not None and row["peak_reserved_bytes"]:
            other = most.setdefault(row["mode"], row)
            most[row["mode"]] = max(row, other, key=lambda one: one["peak_reserved_bytes"])
    points = {}
    for mode, row in most.items():
        is_ours = mode.startswith("ours")
        kind = "this package" if is_ours else "no offload" if mode == "none" else "others"
        points[mode] = {name: row[key] / GIB for key, name in SIZES.items()}
        points[mode] |= {"percent": 100 * (row["ratio"] - 1), "kind": kind, "name": name_of(mode)}
        points[mode] |= {"is_target": mode.startswith("ours-target")}
    return points


def domain(values: list[float]) -> list[float]:
    """Return an axis with room around what is drawn."""
    room = (max(values) - min(values)) / 8 or 1.0
    return [min(values) - room, max(values) + room]


def placed(points: list[dict[str, Any]], x: list[float], y: list[float]) -> list[dict[str, Any]]:
    """Return names with their places in pixels: beside their marks, and on no other where they can.

    Each point has ``x`` and ``percent``; ``x`` and ``y`` are the axes.
    """
    taken, found = [], []
    for point in points:
        a = WIDTH * (point["x"] - x[0]) / (x[1] - x[0])
        b = HEIGHT * (y[1] - point["percent"]) / (y[1] - y[0])
        taken.append((a - 7, b - 7, a + 7, b + 7))

    def covered(box: tuple[float, float, float, float]) -> float:
        outside = (-box[0], box[2] - WIDTH, -box[1], box[3] - HEIGHT)
        return sum(
            max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
            * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
            for other in taken
        ) + sum(100 * max(0.0, far) for far in outside)

    for point, mark in zip(points, taken.copy(), strict=True):
        width, a, b = 0.56 * FONT * len(point["name"]), mark[0] + 7, mark[1] + 7
        boxes = [
            (left, top + far, left + width, top + far + FONT + 2)
            for by in range(4)
            for left, top, sign in (
                *((a + 10, b - 7, -1), (a + 10, b - 7, 1), (a - width / 2, b - 22, -1)),
                *((a - width / 2, b + 9, 1), (a - width - 10, b - 7, -1)),
            )
            for far in (sign * by * FONT,)
        ]
        taken.append(min(boxes, key=covered))  # of equals the first, which is the nearest
        found.append({"name": point["name"], "x": taken[-1][0], "y": taken[-1][1] + FONT / 2 + 1})
    return found


def panel(points: list[dict[str, Any]], size: str) -> altair.LayerChart:
    """Return the chart of one kind of memory."""
    rows = [{**point, "x": point[size]} for point in points]
    x, y = domain([row["x"] for row in rows]), domain([row["percent"] for row in rows])
    base = altair.Chart({"values": rows}, width=WIDTH, height=HEIGHT).encode(
        x=altair.X("x:Q", title=f"{size} (GiB)", scale=altair.Scale(domain=x, nice=False)),
        y=altair.Y(
            "percent:Q", title="added to a step (%)", scale=altair.Scale(domain=y, nice=False)
        ),
    )
    colors, shapes = zip(*STYLES.values(), strict=True)
    marks = base.mark_point(size=100, filled=True, opacity=1).encode(
        color=altair.Color("kind:N", scale=altair.Scale(domain=[*STYLES], range=colors)).legend(
            None
        ),
        shape=altair.Shape("kind:N", scale=altair.Scale(domain=[*STYLES], range=shapes)).legend(
            None
        ),
    )
    line = base.transform_filter("datum.is_target").mark_line(color="#0072b2", opacity=0.5)
    texts = altair.Chart({"values": placed(rows, x, y)}).mark_text(align="left", fontSize=FONT)
    texts = texts.encode(
        x=altair.X("x:Q", scale=altair.Scale(domain=[0, WIDTH]), axis=None),
        y=altair.Y("y:Q", scale=altair.Scale(domain=[HEIGHT, 0]), axis=None),
        text="name:N",
    )
    both = altair.layer(line, marks)
    return altair.layer(both, texts).resolve_scale(x="independent", y="independent")


def column(reports: list[dict[str, Any]]) -> altair.VConcatChart:
    """Return what is drawn of runs of one shape."""
    drawn: dict[str, dict[str, Any]] = {}
    for report in reports:
        drawn = points_of(report) | drawn
    if not drawn:
        raise ValueError("no mode's memory was measured beside no offload")
    first, sizes, points = reports[0], reports[0]["sizes"], [*drawn.values()]
    tokens = f"{sizes['mbs']} x {sizes.get('length', sizes['seq'])} tokens"
    if "model" in sizes and "length" not in sizes:
        tokens = f"{sizes['mbs']} x {sizes['seq'] // 4} to {sizes['seq']} tokens"
    title = (
        f"{sizes['layers']} layers, hidden {sizes['hidden']}, {sizes['microbatches']} x {tokens}"
    )
    if sizes["pp"] > 1:
        title += f", PP={sizes['pp']}, VPP={sizes['vpp']}"
    ran = next(run["ranks"] for run in first["runs"] if run["status"] == "ok")
    none_ms = next(row["step_ms"] for row in first["rows"] if row["mode"] == "none")
    below = [
        f"shape {first['shape']}, {len(ran)} x {ran[0]['device']}, {first['date'][:10]}",
        f"a step without offload takes {none_ms:.0f} ms; lower left is better",
        "circles: this package, a line joins its targets; squares: others",
    ]
    return altair.vconcat(*(panel(points, size) for size in SIZES.values())).properties(
        title=altair.Title(title, subtitle=below, anchor="start")
    )


def picture(paths: list[Path]) -> altair.HConcatChart:
    """Return the picture of files."""
    columns: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for report in (json.loads(path.read_text()) for path in paths):
        sizes = report["sizes"]
        columns.setdefault((report["shape"], json.dumps(sizes)), []).append(report)
    chart = altair.hconcat(*map(column, columns.values())).configure_view(stroke=None)
    chart = chart.configure(background="white", font="sans-serif", padding=10)
    return chart.configure_axis(labelFontSize=FONT, titleFontSize=FONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    picture(options.files).save(options.output)


if __name__ == "__main__":
    main()

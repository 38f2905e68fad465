"""Draw what `make quickstart` shows: the same losses, and less memory.

    python benchmarks/draw_quickstart.py [runs/quickstart]

Reads the steps that both runs have left; writes docs/images/quickstart.svg.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import altair

from megatron_offload.files.strict_model import read_model
from megatron_offload.observe.run_report import RunFacts
from megatron_offload.train.records import FOLDERS

ROOT = Path(__file__).parent.parent
# Okabe and Ito's blue beside a grey; lines differ in width and dashes as well.
COLORS = {"without offload": "#9aa3ad", "with offload": "#0072b2"}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "quickstart")
    steps, peaks = [], []
    for name, inside in zip(COLORS, FOLDERS, strict=True):
        lines = (folder / inside / "steps.jsonl").read_text().splitlines()
        for one in map(json.loads, lines):
            steps.append({"run": name, "step": one["step"], "loss": one["loss"]})
        for rank in read_model(RunFacts, folder / inside / "run.json").by_rank:
            size = rank.peak_live_activation_bytes / 2**20
            row = {"run": name, "rank": f"rank {rank.rank}", "MiB": size}
            peaks.append({**row, "text": f"{name}: {size:.1f} MiB"})
    scale = altair.Scale(domain=list(COLORS), range=list(COLORS.values()))
    color = altair.Color("run:N", scale=scale, title=None, legend=altair.Legend(orient="bottom"))
    losses = altair.Chart({"values": steps}, title="Loss: the same bits", width=420, height=260)
    losses = losses.encode(
        x=altair.X("step:Q"), y=altair.Y("loss:Q", scale=altair.Scale(zero=False)), color=color
    )
    lines = [
        losses.transform_filter(altair.datum.run == name).mark_line(**style)
        for name, style in zip(
            COLORS, ({"strokeWidth": 6}, {"strokeWidth": 2, "strokeDash": [5, 3]}), strict=True
        )
    ]
    most = 1.45 * max(row["MiB"] for row in peaks)
    bars = altair.Chart(
        {"values": peaks}, title="Peak saved activations on the device", width=420, height=260
    ).encode(
        x=altair.X("MiB:Q", scale=altair.Scale(domain=[0, most], nice=False)),
        y=altair.Y("rank:N", title=None),
        yOffset=altair.YOffset("run:N", sort=list(COLORS)),
    )
    texts = bars.mark_text(align="left", dx=5).encode(text="text:N")
    bars = bars.mark_bar().encode(color=color)
    chart = altair.hconcat(altair.layer(*lines), altair.layer(bars, texts), spacing=40)
    chart.properties(background="white").save(ROOT / "docs" / "images" / "quickstart.svg")


if __name__ == "__main__":
    main()

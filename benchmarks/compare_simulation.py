"""Hold the simulator against measured runs of H200s: docs/benchmarks/h200/shape_*.json.

python benchmarks/compare_simulation.py --output docs/benchmarks/simulation.json

The step is simulated from the model's sizes alone. Of each file one number is fitted, the part of
the peak FLOP that matrix products achieve, so that no offload takes the time that it took there;
the bandwidths of the node are those that the file's own run measured. Bytes are not fitted. Runs
whose groups shared a room in which they never moved are left out: there is none any more.
"""

from __future__ import annotations

import argparse
import json
import re
from datetime import UTC, datetime
from pathlib import Path

from megatron_offload.machine.profile import Machine
from megatron_offload.planning.description import (
    fit_achieved_share,
    job_from_model,
    load_description,
)
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.model import LAYER_GROUPS, ModelDescription
from megatron_offload.planning.replay import replay
from megatron_offload.planning.simulate import RELEASE, RELOAD, simulate, simulate_ranks

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "benchmarks" / "h200"
FILES = (
    *("shape_c", "shape_c_five", "shape_c_five_256"),
    *("shape_c_without_extra", "shape_c_shared_budget"),
    *("shape_a", "shape_a_save_on_cpu", "shape_b", "shape_d"),
)
"""Those of the present engine, or of settings that it has still."""
FIVE = ("qkv_linear", "core_attn", "attn_proj")
"""Of Megatron's five modules those that hold anything, TransformerEngine's norms being fused."""
GIB = 2**30
MODEL = load_description(ROOT / "configs" / "models" / "gpt_16x8192_pp4_vpp2.yaml").model
SIZES = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "vocabulary": "vocabulary",
    "sequence": "seq",
    "microbatch": "mbs",
    "num_microbatches": "microbatches",
    "pipeline_parallel": "pp",
    "virtual_stages": "vpp",
}
"""What the measured files call the sizes of the model."""


def described(sizes: dict) -> ModelDescription:
    """Return the model that was measured: the described one, in these sizes."""
    own = {name: sizes[measured] for name, measured in SIZES.items()}
    own |= {"kv_heads": sizes.get("groups"), "gated_mlp": sizes.get("gated", False)}
    own |= {"ffn": 4 * sizes["hidden"], "rotary": sizes.get("positions") == "rope"}
    return MODEL.model_copy(update=own)


def machine_of(ranks: list[dict]) -> Machine:
    """Return a machine with the node's bandwidths that a run has measured."""

    def total(name: str) -> float:
        return sum(rank["link_gbps"][name] for rank in ranks)

    return Machine(
        node_gbps=total("both_d2h") + total("both_h2d"),
        node_d2h_gbps=total("d2h"),
        node_h2d_gbps=total("h2d"),
        gpus_per_node=len(ranks),
    )


def marked(mode: str, model: ModelDescription, sizes: dict) -> ModelDescription:
    """Return the model with the groups that a mode of `bench_peers.py` marks."""
    if mode.startswith("ours-five"):
        smallest = sizes["min_elements"] * model.value_bytes
        return model.model_copy(update={"modules": FIVE, "min_tensor_bytes": smallest})
    return model.model_copy(update={"modules": LAYER_GROUPS})


def settings_of(rank: dict) -> RankSettings:
    """Return what a rank of a measured run was given."""
    return RankSettings(
        max_inflight_bytes=rank["max_inflight_bytes"],
        prefetch_bytes=rank["prefetch_bytes"],
    )


def gib(ranks: list, name: str) -> list[float]:
    values = (rank[name] if isinstance(rank, dict) else getattr(rank, name) for rank in ranks)
    return [round(value / GIB, 2) for value in values]


def off(predicted: list[float], measured: list[float]) -> float:
    """Return the error farthest from zero, in per cent."""
    errors = (100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True) if m)
    return round(max(errors, key=abs, default=0.0), 1)


def compare(file: str) -> list[dict]:
    data = json.loads((FOLDER / f"{file}.json").read_text())
    runs = [run for run in data["runs"] if run["status"] == "ok"]
    none = next(run for run in runs if run["mode"] == "none")
    machine = machine_of(none["ranks"])
    none_ms = max(rank["step_ms"] for rank in none["ranks"])
    model = described(data["sizes"])
    share = fit_achieved_share(model, none_ms * 1e3, machine)
    model = model.model_copy(update={"achieved_share": share})
    rows = []
    for run in runs:
        if run["mode"] != "none" and not re.match(
            r"ours(-five)?:(?!.*(resident|target))", run["mode"]
        ):
            continue
        job = job_from_model(marked(run["mode"], model, data["sizes"]), machine)
        settings: list[RankSettings | None] = [None] * job.schedule.num_ranks
        if run["mode"] != "none":
            settings = [settings_of(rank) for rank in run["ranks"]]
        programs = [replay(job, rank, one) for rank, one in enumerate(settings)]
        simulation = simulate_ranks(job, programs)
        rows.append(row_of(file, run, simulation, none_ms, model.achieved_share))
    return rows


def across_sizes() -> list[dict]:
    """Return steps of layers of all sizes, the share fitted to one of them and so to no other."""
    measured = {}
    data = json.loads((FOLDER / "layers.json").read_text())
    for name, shape in data["shapes"].items():
        measured[f"layers {name}"] = shape["sizes"], shape["step_ms"]
    for file in ("shape_a", "shape_a_save_on_cpu", "shape_b", "shape_c", "shape_d"):
        data = json.loads((FOLDER / f"{file}.json").read_text())
        none = next(run for run in data["runs"] if run["mode"] == "none")
        measured[file] = data["sizes"], max(rank["step_ms"] for rank in none["ranks"])
    shares = {
        name: fit_achieved_share(described(measured[name][0]), 1e3 * measured[name][1])
        for name in ("layers 8192", "layers 4096", "layers 2048")
    }
    rows = []
    for name, (sizes, step_ms) in measured.items():
        row: dict = {"name": name, "measured_ms": round(step_ms, 1), "off_percent": {}}
        for fitted, share in shares.items():
            model = described(sizes).model_copy(update={"achieved_share": share})
            step_us = simulate(job_from_model(model)).step_us
            row["off_percent"][fitted] = round(100 * (step_us / 1e3 / step_ms - 1), 1)
        rows.append(row)
    return rows


def row_of(file: str, run: dict, simulation, none_ms: float, share: float) -> dict:
    ranks, seen = simulation.ranks, run["ranks"]
    seen_ms = max(rank["step_ms"] for rank in seen)
    pairs = {
        "step_ms": ([simulation.step_us / 1e3], [seen_ms]),
        "end_ms": ([r.end_us / 1e3 for r in ranks], [r["step_ms"] for r in seen]),
        "allocated_gib": (gib(ranks, "peak_device_bytes"), gib(seen, "peak_allocated_bytes")),
        "reserved_gib": (gib(ranks, "peak_reserved_bytes"), gib(seen, "peak_reserved_bytes")),
        "d2h_gib": (gib(ranks, "offloaded_bytes"), gib(seen, "d2h_bytes")),
        "h2d_gib": (gib(ranks, "reloaded_bytes"), gib(seen, "h2d_bytes")),
    }
    if "in_use_bytes" in seen[0]:
        pairs["host_gib"] = (gib(ranks, "peak_host_bytes"), gib(seen, "in_use_bytes"))
    if "stall_us" in seen[0]:
        for cause in (RELEASE, RELOAD):
            pairs[f"stall_{cause}_ms"] = (
                [r.stall_us[cause] / 1e3 for r in ranks],
                [r["stall_us"].get(cause, 0.0) / 1e3 for r in seen],
            )
    row = {
        "file": f"{file}.json",
        "mode": run["mode"],
        "achieved_share": round(share, 4),
        "added_percent": {
            "predicted": round(100 * (simulation.step_us / 1e3 / none_ms - 1), 2),
            "measured": round(100 * (seen_ms / none_ms - 1), 2),
        },
    }
    for name, (predicted, measured) in pairs.items():
        row[name] = {
            "predicted": [round(value, 2) for value in predicted],
            "measured": [round(value, 2) for value in measured],
        }
        if not name.startswith("stall"):
            row[name]["worst_percent"] = off(predicted, measured)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the simulator against measured runs.")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [row for file in FILES for row in compare(file)]
    for row in rows:
        print(f"{row['file']}: {row['mode'][:30]}...{row['mode'][-60:]}")
        for name, values in row.items():
            if isinstance(values, dict):
                print(f"  {name}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
    across = across_sizes()
    for row in across:
        print(f"{row['name']}: {row['measured_ms']} ms, off by {row['off_percent']}")
    if args.output:
        head = {
            "command": "python benchmarks/compare_simulation.py --output FILE",
            "date": datetime.now(UTC).date().isoformat(),
        }
        lines = ",\n".join(json.dumps(row) for row in rows)
        sizes = ",\n".join(json.dumps(row) for row in across)
        text = f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n], "across_sizes": [\n{sizes}\n]}}\n'
        args.output.write_text(text)


if __name__ == "__main__":
    main()

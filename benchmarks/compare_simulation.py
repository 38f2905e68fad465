"""Hold the simulator against measured runs of H200s and H100s: files of docs/benchmarks.

python benchmarks/compare_simulation.py --output docs/benchmarks/simulation.json

The step is simulated from the model's sizes alone. Of each file one number is fitted, the part of
the peak FLOP that matrix products achieve, or what the host takes where that decides, so that no
offload takes the time that it took there; the bandwidths of the node are those that the file's own
run measured. Bytes are not fitted. Runs whose groups shared a room in which they never moved are
left out: there is none any more. Prints errors as the table of docs/simulation.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from megatron_offload.core.row_config import RowConfig
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.description import fit, job_from_model, load_description
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.job_rows import with_rows, with_units
from megatron_offload.planning.model import LAYER_GROUPS, VALUE_BYTES, ModelDescription
from megatron_offload.planning.replay import replay
from megatron_offload.planning.simulate import RELEASE, RELOAD, simulate, simulate_ranks

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
FILES = (
    *("h200/shape_c.json", "h200/shape_c_five.json", "h200/shape_c_five_256.json"),
    *("h100/four_gpus.json", "h200/shape_c_without_extra.json"),
    *("h200/shape_c_shared_budget.json", "h200/shape_c_two_gpus.json"),
    *("h100/two_gpus_targets.json", "h100/layer_inputs_two_gpus.json", "h200/shape_a.json"),
    *("h200/shape_a_save_on_cpu.json", "h200/made_again_a_15.json", "h200/a_again.json"),
    *("h200/shape_b.json", "h200/made_again_b_8.json", "h100/recompute_layers_b.json"),
    *("h200/layer_inputs.json", "h200/whole_model_4096.json", "h200/whole_model_8192.json"),
    *("h200/shape_d.json", "h100/small_joined.json", "h200/small_limits.json"),
    *("h200/two_gpus_experts.json", "h200/lora_found_rows_before.txt"),
)
"""Those of the present engine, or of settings that it has still."""
FIVE = ("qkv_linear", "core_attn", "attn_proj")
"""Of Megatron's five modules those that hold anything, TransformerEngine's norms being fused."""
WHAT = {
    "none": "no offload",
    "recompute": "full recompute",
    "recompute-selective": "norms and MLP recomputed by Megatron",
    "ours-recompute": "`norm` and `mlp_act` recomputed, the rest offloaded",
    "ours-all": "attention and MLP offloaded",
    "ours-five": "five modules offloaded",
    "ours:modules=core_attn,recompute=layer": "layers recomputed",
    "ours:modules=core_attn,recompute=mlp": "MLPs recomputed, cores offloaded",
}
"""What is simulated, by the beginning of modes of `bench_peers.py`."""
OFFLOADED = re.compile(r"ours:modules=mlp_fc1(?!.*(resident|target|recompute))")
"""The same as ``ours-all``, where its name was another."""
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


LORA = {"layers": 16, "hidden": 2048, "seq": 1900, "mbs": 4, "pp": 1, "positions": "rope"}
LORA |= {"vpp": 1, "microbatches": 1, "heads": 32, "groups": 8, "vocabulary": 128256, "gated": True}
"""The sizes of files of adapters without dropout."""


def described(data: dict) -> ModelDescription:
    """Return the model that a file measured: the described one, in these sizes."""
    sizes = data["sizes"]
    own = {name: sizes[measured] for name, measured in SIZES.items()}
    own |= {"kv_heads": sizes.get("groups"), "gated_mlp": sizes.get("gated", False)}
    own |= {"ffn": 4 * sizes["hidden"], "rotary": sizes.get("positions") == "rope"}
    if sizes.get("experts"):  # as in bench_peers_worker.py
        own |= {"experts": sizes["experts"], "experts_per_token": 4, "expert_ffn": 1408}
    if sizes == LORA:  # a Llama of transformers, with adapters of peft
        own |= {"lora_rank": 16, "tied_embeddings": True, "eager_kernels": True}
        own |= {"static_bytes_per_parameter": None}
    if sizes.get("full_recompute"):
        own["recompute"] = "full"
    if "H100" in str(data.get("machine", "")):
        own["memory_gbps"] = 3350.0
    own["deterministic"] = bool(data.get("deterministic"))
    own["expandable_segments"] = "expandable_segments:True" in str(data.get("environment"))
    return MODEL.model_copy(update=own)


def machine_of(ranks: list[dict]) -> Machine:
    """Return a machine with the node's bandwidths that a run has measured."""
    if "link_gbps" not in ranks[0]:
        return Machine()

    def total(name: str) -> float:
        return sum(rank["link_gbps"][name] for rank in ranks)

    node_gbps = total("both_d2h") + total("both_h2d")
    return Machine(
        node_gbps=node_gbps,
        node_d2h_share=total("both_d2h") / node_gbps,
        node_d2h_gbps=total("d2h"),
        node_h2d_gbps=total("h2d"),
        gpus_per_node=len(ranks),
    )


def what(mode: str) -> str | None:
    """Return what a mode does, by its key in `WHAT`; None for what isn't simulated."""
    if OFFLOADED.match(mode):
        return "ours-all"
    if mode in WHAT:
        return mode
    return "ours-five" if re.match(r"ours-five:(host_memory|max_inflight)", mode) else None


def job_of(kind: str, model: ModelDescription, sizes: dict, machine: Machine) -> Job:
    """Return the step with what a mode does."""
    changes: dict = {"modules": LAYER_GROUPS}
    if kind == "recompute":
        changes["recompute"] = "full"
    elif kind == "ours-five":
        changes = {"modules": FIVE, "min_tensor_bytes": sizes["min_elements"] * VALUE_BYTES}
    elif "core_attn" in kind:
        changes["modules"] = ("core_attn",)
    job = job_from_model(model.model_copy(update=changes), machine)
    if kind == "ours-recompute":
        return with_units(job, ("norm", "mlp_act"))
    rows = []
    if kind.endswith("recompute=layer"):
        rows = [RowConfig(site="layer", recompute=True)]
    elif kind == "recompute-selective" or kind.endswith("recompute=mlp"):
        rows = [RowConfig(site="mlp", recompute=True)]
    if "core_attn" in kind:
        rows.append(RowConfig(site="self_attention.core_attention", offload="all"))
    return with_rows(job, rows) if rows else job


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


def read(file: str) -> dict:
    """Return what was measured."""
    path = FOLDER / file
    data = json.loads(path.read_text()) if path.suffix == ".json" else read_lora(path.read_text())
    return data | {"machine": file.partition("/")[0].upper()}


def read_lora(text: str) -> dict:
    """Return what such a file has printed, as other files have it."""
    runs = []
    line = r"(?m)^(off|checkpoint): ([\d.]+) ms.*; ([\d.]+) / ([\d.]+) GiB"
    for mode, *numbers in re.findall(line, text):
        step_ms, allocated, reserved = map(float, numbers)
        sizes = {"peak_allocated_bytes": allocated * GIB, "peak_reserved_bytes": reserved * GIB}
        rank = {"step_ms": step_ms, "d2h_bytes": 0, "h2d_bytes": 0} | sizes
        name = "none" if mode == "off" else "recompute"
        runs.append({"mode": name, "status": "ok", "ranks": [rank]})
    return {"sizes": LORA, "runs": runs}


def compare(file: str) -> list[dict]:
    data = read(file)
    runs = [run for run in data["runs"] if run["status"] == "ok"]
    plain = [run for run in runs if run["mode"] == "none"]
    none_ms = slowest_ms(plain[0]["ranks"])
    machine = machine_of(plain[0]["ranks"])
    model = fit(described(data), none_ms * 1e3, machine)
    rows = []
    for run in runs:
        if (kind := what(run["mode"])) is None:
            continue
        job = job_of(kind, model, data["sizes"], machine)
        settings: list[RankSettings | None] = [None] * job.schedule.num_ranks
        if kind.startswith("ours"):
            settings = [settings_of(rank) for rank in run["ranks"]]
        programs = [replay(job, rank, one) for rank, one in enumerate(settings)]
        simulation = simulate_ranks(job, programs)
        row = row_of(file, run, simulation, none_ms, model)
        rows.append({"job": title(data), "what": WHAT[kind]} | row)
    return rows


def slowest_ms(ranks: list[dict]) -> float:
    return max(rank["step_ms"] for rank in ranks)


def title(data: dict) -> str:
    """Return a job's sizes in words."""
    sizes = data["sizes"]
    said = f"{sizes['layers']} x {sizes['hidden']}, {sizes['mbs']} x {sizes['seq']}"
    said += f", {sizes['experts']} experts" if sizes.get("experts") else ""
    said += f", PP={sizes['pp']} VPP={sizes['vpp']}" if sizes["pp"] > 1 else ""
    said += ", LoRA in transformers" if sizes == LORA else ""
    said += ", deterministic" if data.get("deterministic") else ""
    said += ", layers recomputed" if sizes.get("full_recompute") else ""
    return said + ("" if sizes.get("positions") == "rope" else ", not rotated")


def table(rows: Sequence[dict]) -> list[str]:
    """Return the errors of each job and what it does, as Markdown: the farthest of all its runs."""
    found = defaultdict(list)
    for row in rows:
        found[row["job"], row["what"]].append(row)
    lines = ["| job | what | runs | allocated | reserved | step |", "|---|---|---|---|---|---|"]
    for (job, done), alike in found.items():
        errors = []
        for name in ("allocated_gib", "reserved_gib", "step_ms"):
            worst = max((row[name]["worst_percent"] for row in alike), key=abs)
            errors.append(f"{worst:+.1f} %")
        if done == WHAT["none"]:
            errors[-1] = "fitted"
        lines.append("| " + " | ".join((job, done, str(len(alike)), *errors)) + " |")
    return lines


def across_sizes() -> list[dict]:
    """Return steps of layers of all sizes, the share fitted to one of them and so to no other."""
    measured = {}
    for name, shape in read("h200/layers.json")["shapes"].items():
        measured[f"layers {name}"] = described(shape), shape["step_ms"]
    for file in ("shape_a", "shape_a_save_on_cpu", "shape_b", "shape_c", "shape_d"):
        data = read(f"h200/{file}.json")
        none = next(run for run in data["runs"] if run["mode"] == "none")
        measured[file] = described(data), slowest_ms(none["ranks"])
    shares = {}
    for name in ("layers 8192", "layers 4096", "layers 2048"):
        model, step_ms = measured[name]
        shares[name] = fit(model, 1e3 * step_ms).achieved_share
    rows = []
    for name, (model, step_ms) in measured.items():
        row: dict = {"name": name, "measured_ms": round(step_ms, 1), "off_percent": {}}
        for fitted, share in shares.items():
            other = model.model_copy(update={"achieved_share": share})
            step_us = simulate(job_from_model(other)).step_us
            row["off_percent"][fitted] = round(100 * (step_us / 1e3 / step_ms - 1), 1)
        rows.append(row)
    return rows


def row_of(file: str, run: dict, simulation, none_ms: float, model: ModelDescription) -> dict:
    ranks, seen = simulation.ranks, run["ranks"]
    seen_ms = slowest_ms(seen)
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
        "file": file,
        "mode": run["mode"],
        "achieved_share": round(model.achieved_share, 4),
        "host_us_per_launch": round(model.host_us_per_launch, 2),
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
    print("\n".join(table(rows)))
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

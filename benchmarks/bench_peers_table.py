"""From the records of `bench_peers.py` to its rows and its table; plain numbers, no torch.

A record is one mode in one repetition, with one entry per rank. A row is one mode on one rank over
all repetitions: peaks are the highest, times and ratios the median. Times are of the slowest rank,
and a ratio is taken against ``none`` of the same repetition.

R is how much of what the host holds the device's peak frees: the drop of the peak against
``none`` over the most bytes that the host held in the measured steps, whenever that was.
"""

from __future__ import annotations

import statistics

GIB = 2**30

PEAKS = (
    *("peak_allocated_bytes", "peak_reserved_bytes"),
    *("overall_peak_allocated_bytes", "overall_peak_reserved_bytes"),
)
HELD = ("pinned_bytes", "torch_pinned_bytes", "held_bytes")
STEADY = (
    *("d2h_bytes", "h2d_bytes", "kept_bytes", "recomputed_bytes"),
    *("refused_recipe_bytes", "refused_bytes", "externally_referenced_bytes"),
    *("late_reloads", "cancelled_offloads", "num_groups", "max_inflight_bytes", "prefetch_bytes"),
    *("pinned_now_bytes", "in_use_bytes", "link_gbps", "gbps", "stall_us"),
)
"""What a row takes from the last repetition, where a mode tells it."""


def rows(runs):
    """Return one row per mode and rank, or one per mode that never came through."""
    done = [run for run in runs if run["status"] == "ok"]
    references = {run["repetition"]: run for run in done if run["mode"] == "none"}
    result = []
    for mode in dict.fromkeys(run["mode"] for run in runs):
        mine = [run for run in done if run["mode"] == mode]
        failures = [run for run in runs if run["mode"] == mode and run["status"] != "ok"]
        common = {
            "mode": mode,
            "failures": [f"{run['status']}: {run['error']}" for run in failures],
        }
        if not mine:
            result.append(common)
            continue
        common |= _times(mine, references)
        for rank in range(len(mine[0]["ranks"])):
            result.append(common | _rank_row(mine, references, rank))
    return result


def slowest_ms(run):
    return max(entry["step_ms"] for entry in run["ranks"])


def last_loss(run):
    """Return the last step's loss, which the last stage has."""
    return next((e["losses"][-1] for e in run["ranks"] if e["losses"][-1] is not None), None)


def _times(mine, references):
    ratios = [
        slowest_ms(run) / slowest_ms(references[run["repetition"]])
        for run in mine
        if run["repetition"] in references
    ]
    return {
        "step_ms": statistics.median(slowest_ms(run) for run in mine),
        "ratio": statistics.median(ratios) if ratios else None,
        "loss": last_loss(mine[-1]),
    }


def _rank_row(mine, references, rank):
    entries = [run["ranks"][rank] for run in mine]
    others = [run["ranks"][rank] for run in references.values()]
    row = {"rank": entries[0]["rank"]}
    row |= {key: _highest(entry.get(key) for entry in entries) for key in (*PEAKS, *HELD)}
    row |= {key: entries[-1][key] for key in STEADY if entries[-1].get(key) is not None}
    for name, key in (("allocated", PEAKS[0]), ("reserved", PEAKS[1])):
        without = _highest(other[key] for other in others)
        row[f"r_{name}"] = returned(without, row[key], row["held_bytes"])
    row["gradient_hash"] = entries[-1]["gradient_hashes"][-1]
    row["first_gradient_hash"] = entries[-1]["gradient_hashes"][0]
    pairs = [
        (run, references[run["repetition"]]) for run in mine if run["repetition"] in references
    ]
    row["bitwise"] = all(is_bitwise(run, other, rank) for run, other in pairs) if pairs else None
    return row


def is_bitwise(run, other, rank):
    """Whether a rank's losses and gradient hashes agree in every step, from the first on."""
    keys = ("losses", "gradient_hashes")
    return all(run["ranks"][rank][key] == other["ranks"][rank][key] for key in keys)


def returned(peak_without, peak_with, held_bytes):
    """Return R, the drop of a peak over the bytes off the device; None where one is unknown."""
    if peak_without is None or peak_with is None or not held_bytes:
        return None
    return (peak_without - peak_with) / held_bytes


def _highest(values):
    known = [value for value in values if value is not None]
    return max(known) if known else None


HEAD = (
    *("mode", "rank", "ms", "ratio", "alloc", "reserved", "ever", "pinned", "held"),
    *("moved", "back", "kept", "recomputed", "R alloc", "R res", "late", "early", "refused"),
    *("bitwise", "loss", "gradients"),
)
LINK_HEAD = (
    *("mode", "rank", "d2h", "h2d", "d2h of both", "h2d of both", "copied d2h", "copied h2d"),
    "waited, ms",
)


def table(report):
    """Return the report as text; sizes in GiB."""
    ran = [row for row in report["rows"] if "rank" in row]
    text = [
        f"{report['date']}  shape {report['shape']}  {_machine(report)}",
        report["command"],
        "",
        "Sizes in GiB, peaks after warm-up; 'ever' is reserved and 'pinned' page-locked from the "
        "first step on. R is the drop of the peak against none over the most bytes off the "
        "device.",
        "",
        *_aligned([HEAD, *(_cells_of(row, report["deterministic"]) for row in ran)]),
    ]
    linked = [_link_cells_of(row) for row in ran if row.get("link_gbps")]
    if linked:
        text += [
            "",
            "The link in GB/s, before the model; what the copies of an examined step got of it, and"
            " its waits.",
            "",
            *_aligned([LINK_HEAD, *linked]),
        ]
    turns = list(filter(None, map(_turns_of, report["runs"])))
    text += ["", *turns] if turns else []
    drawn = "model" in report["sizes"] and "length" not in report["sizes"]
    text += ["", *_step_by_step(report["runs"], report["warmup"])] if drawn else []
    said = list(filter(None, map(_plan_of, report["runs"])))
    text += ["", *said] if said else []
    failed = {row["mode"]: row["failures"] for row in report["rows"] if row["failures"]}
    text += [""] if failed else []
    text += [f"{mode}: {failure}" for mode, found in failed.items() for failure in found]
    return "\n".join(text) + "\n"


def _aligned(lines):
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _machine(report):
    for run in report["runs"]:
        if run["status"] == "ok":
            entry = run["ranks"][0]
            versions = ", ".join(f"{k} {v}" for k, v in entry["versions"].items())
            return f"{len(run['ranks'])} x {entry['device'] or 'CPU'}  {versions}"
    return "nothing ran"


def _cells_of(row, is_deterministic):
    ratio = row["ratio"]
    bitwise = {True: "yes", False: "NO", None: "-"}[row["bitwise"]]
    return (
        row["mode"],
        str(row["rank"]),
        f"{row['step_ms']:.1f}",
        "-" if ratio is None else f"{(ratio - 1) * 100:+.2f}%",
        *(_gib(row[key]) for key in (PEAKS[0], PEAKS[1], PEAKS[3])),
        *(_gib(row.get(key)) for key in ("pinned_bytes", "held_bytes", *STEADY[:4])),
        *("-" if row[key] is None else f"{row[key]:.3f}" for key in ("r_allocated", "r_reserved")),
        *(str(row.get(key, "-")) for key in ("late_reloads", "cancelled_offloads")),
        _gib(row.get("refused_bytes")),
        bitwise if is_deterministic else "-",  # two runs without offload differ too
        "-" if row["loss"] is None else f"{float.fromhex(row['loss']):.9g}",
        row["gradient_hash"],
    )


def _turns_of(run):
    """Say by how much rows made steps longer that were taken with them and without by turns."""
    ranks = [entry["turns_ms"] for entry in run.get("ranks", ()) if entry.get("turns_ms")]
    if not ranks:
        return None
    slowest = list(map(max, zip(*ranks, strict=True)))
    fours = [slowest[first : first + 4] for first in range(0, len(slowest), 4)]
    points = [100 * ((a + d) / (b + c) - 1) for a, b, c, d in fours]
    error = statistics.stdev(points) / len(points) ** 0.5 if len(points) > 1 else 0.0
    bare_ms = statistics.median(x for _, b, c, _ in fours for x in (b, c))
    return (
        f"{run['mode']}, {len(slowest)} steps by turns: {bare_ms:.1f} ms without rows, with them "
        f"{statistics.mean(points):+.2f} % (standard error {error:.2f})"
    )


def _step_by_step(runs, warmup):
    """Compare steps of lengths that were drawn: of each step the median over the rounds counts."""
    times = {}
    for run in runs:
        if run["status"] == "ok":
            times.setdefault(run["mode"], []).append(run["ranks"][0]["steps_ms"])
    medians = {
        mode: list(map(statistics.median, zip(*each, strict=True))) for mode, each in times.items()
    }
    none = medians.pop("none", None)
    for mode, on in medians.items() if none else ():
        ratios = [a / b for a, b in zip(on, none, strict=True)]
        behind = range(min(20, len(on) - 1), len(on))
        worst = max(behind, key=ratios.__getitem__)
        yield (
            f"{mode}, step by step: all {len(on)} {sum(on) / sum(none):.3f} times as long, the "
            f"measured {sum(on[warmup:]) / sum(none[warmup:]):.3f}; the slowest behind the 20th "
            f"{ratios[worst]:.2f} (step {worst}); single runs "
            + " ".join(f"{sum(one) / sum(none):.3f}" for one in times[mode])
        )


def _plan_of(run):
    """Say what a run has found, and how long it looked."""
    entry = next(iter(run.get("ranks", ())), {})
    if not entry.get("result"):
        return None
    steps = entry.get("planning_steps_ms", ())
    took = statistics.mean(steps) / entry["step_ms"] if steps else 0.0
    looked = f" by {len(steps)} steps of {took:.2f} times its own" if steps else ""
    return f"{run['mode']}, round {run['repetition']}, found{looked}: {entry['result']}"


def _gib(num_bytes):
    return "-" if num_bytes is None else f"{num_bytes / GIB:.3f}"


def _link_cells_of(row):
    link, copied, stalls = (row.get(key, {}) for key in ("link_gbps", "gbps", "stall_us"))
    numbers = [link[key] for key in ("d2h", "h2d", "both_d2h", "both_h2d")]
    numbers += [copied.get("d2h"), copied.get("h2d")]
    waits = " ".join(f"{why} {us / 1e3:.1f}" for why, us in stalls.items())
    cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
    return row["mode"], str(row["rank"]), *cells, waits or "-"

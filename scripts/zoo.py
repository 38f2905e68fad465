#!/usr/bin/env python3
"""Whether the package leaves every bit as it was in other people's models: one command, no GPU.

    python3 scripts/zoo.py --output zoo.json    # makes its environment in .zoo
    python3 scripts/zoo.py --here --only 'timm:*' 'transformers:llama*'

It builds small models with random weights: one of each type that transformers maps to a class and
of each module of timm, adapters of peft, and models of diffusers. Configurations are made small by
rules over their keys (scripts/zoo_models.yaml). Nothing is downloaded but packages.

Each model takes three steps with dropout and SGD: twice without the package, and then

    default    in OffloadActivations(), with nothing set: without a GPU nothing moves
    moved      with policy: modules and no smallest tensor; norms and activations are recomputed
    layer      likewise with recompute: [layer]; so mlp and attention
    rows       by rows: what layers save is offloaded, MLPs but the first are recomputed

Losses, gradients, parameters and buffers of each step are compared bit by bit. A mode that has
nothing to do in a model counts as equal; the last column says how many did something. A model whose
two runs without the package differ is not deterministic. One that can't be built here, or trained
without the package, is not buildable. Refused is what ends with an error of the package's own. Each
model has a process of its own with a time limit.

Ends with exit code 1 if a bit differs, or a model fails in any other way with the package alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torchvision", "transformers", "timm", "peft", "diffusers")
STATUSES = ("equal", "differs", "failed", "refused", "not deterministic", "not buildable")

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(ROOT))  # the package of this checkout


class Running:
    """A process that examines one model."""

    def __init__(self, family: str, name: str, limit_s: float, modes: list[str]) -> None:
        from zoo_models import examine

        self.row: dict[str, Any] = {"family": family, "name": name, "status": "not buildable"}
        self.row["reason"] = "the process ended"
        self._started, self._limit_s = time.monotonic(), limit_s
        self.connection, other = multiprocessing.Pipe(duplex=False)
        start = multiprocessing.get_context("fork").Process
        self._process = start(target=examine, args=(family, name, other, modes))
        self._process.start()
        other.close()

    def is_over(self) -> bool:
        """Take what was sent; return whether that was the last."""
        seconds = time.monotonic() - self._started
        self.row["seconds"] = round(seconds, 1)
        try:
            while self.connection.poll():
                self.row |= self.connection.recv()
        except EOFError:
            self._process.join()
            return True
        if seconds < self._limit_s:
            return False
        self.row["reason"] += f", after {self._limit_s:.0f} s"
        self._process.kill()
        self._process.join()
        return True


def run_all(
    todo: list[tuple[str, str]], jobs: int, limit_s: float, modes: list[str]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    running: list[Running] = []
    while todo or running:
        while todo and len(running) < jobs:
            running.append(Running(*todo.pop(0), limit_s, modes))
        wait([one.connection for one in running], timeout=1)
        for one in [one for one in running if one.is_over()]:
            running.remove(one)
            rows.append(one.row)
            line = "{family}:{name} {status} {reason}".format(**one.row)
            print(line if len(line) < 150 else f"{line[:147]}...", flush=True)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what became of the models by family, and of those that ran by mode."""
    from rich.console import Console
    from rich.table import Table
    from zoo_models import FAMILIES, MODES

    table = Table("", "models", *STATUSES, "did something")
    runs = [row["modes"] for row in rows if "modes" in row]
    groups = {family: [row for row in rows if row["family"] == family] for family in FAMILIES}
    groups |= {mode: [modes[mode] for modes in runs if mode in modes] for mode in MODES}
    for name, found in groups.items():
        counts = Counter(one["status"] for one in found)
        did = sum(one.get("did something", False) for one in found)
        cells = [len(found), *(counts[status] for status in STATUSES), did if name in MODES else ""]
        table.add_row(name, *map(str, cells), end_section=name == [*FAMILIES][-1])
    Console(width=max(120, Console().width)).print(table)


def environment(folder: Path) -> Path:
    """Return the interpreter of an environment that has all; it is made if it isn't there."""
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.exists():
        torch = importlib.metadata.version("torch").partition("+")[0]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        subprocess.run([*install, f"torch=={torch}", *PACKAGES, "-e", ROOT], check=True)
        mark.touch()
    return python


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", type=Path, default=ROOT / ".zoo", help="folder of its environment")
    parser.add_argument("--here", action="store_true", help="this interpreter has all packages")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--modes", nargs="+", help="some of those above")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a model may take")
    parser.add_argument("--output", type=Path, help="a JSON file")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if not options.here:
        words = [str(environment(options.env)), __file__, "--here", *sys.argv[1:]]
        return subprocess.run(words, check=False).returncode
    from zoo_models import FAMILIES, MODES, import_families

    started = time.monotonic()
    wanted = {one.partition(":")[0] for one in options.only}
    families = [x for x in FAMILIES if any(fnmatchcase(x, one) for one in wanted)]
    import_families(families)
    models = [(family, name) for family in families for name in FAMILIES[family][0]()]
    todo = [x for x in models if any(fnmatchcase(":".join(x), one) for one in options.only)]
    rows = run_all(todo, options.jobs, options.limit, options.modes or [*MODES])
    if options.output:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "versions": {name: importlib.metadata.version(name) for name in ("torch", *families)},
            "seconds": round(time.monotonic() - started, 1),
            "rows": rows,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(rows)
    return int(any(row["status"] in ("differs", "failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())

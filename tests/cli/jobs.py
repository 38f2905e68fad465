"""Small jobs for the tests of commands: a described model, and what the doctor found."""

from __future__ import annotations

import json

import yaml
from processes import run_python

from megatron_offload.cli.main import main
from megatron_offload.cli.source import SourceOptions, load_source
from megatron_offload.config import OffloadConfig

SMALL = """\
model:
  layers: 4
  hidden: 1024
  ffn: 4096
  heads: 8
  vocabulary: 1000
  sequence: 1024
  num_microbatches: 4
  pipeline_parallel: 2
  peak_tflops: 100.0
  achieved_share: 0.5
  host_us_per_launch: 0
  host_us_per_group: 0
  memory_gbps: 1000.0
machine:
  gpus_per_node: 2
"""

RATES = {
    "d2h_gbps": 50.0,
    "h2d_gbps": 54.0,
    "both_d2h_gbps": 45.0,
    "both_h2d_gbps": 44.0,
    "node_d2h_gbps": 20.0,
    "node_h2d_gbps": 30.0,
}


def load_model(path, **options):
    """Return what ``plan`` knows of a described model."""
    return load_source(SourceOptions(job=path, **options))


def measured(folder, num_gpus=8):
    """Write what the doctor would of a machine; return the file's path."""
    profile = {"version": 4, "measured_at": "2026-11-21T00:00:00Z", "gpus": [RATES] * num_gpus}
    path = folder / "doctor.json"
    path.write_text(json.dumps({"format": 1, "findings": [], "profile": profile}))
    return path


def run_without(words, *absent):
    """Run the command where some modules can't be imported; return its status and output."""
    program = (
        "import sys\n"
        "from megatron_offload.cli.main import main\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"status = main({[str(word) for word in words]!r})\n"
        f"print('imported:', *(n for n in ('torch', 'megatron.core') if sys.modules.get(n)))\n"
        "sys.exit(status)\n"
    )
    done = run_python("-c", program)
    return done.returncode, done.stdout, done.stderr


def plan(*words):
    """Return the status of the command ``plan``."""
    return main(["plan", *map(str, words)])


def rows_in(printed):
    """Return the rows that were printed to be pasted."""
    return OffloadConfig(**yaml.safe_load(printed.splitlines()[-1])).rows

"""The examples run, on a CPU and small."""

from __future__ import annotations

import functools
import json
import re
import shutil

import pytest
from processes import ROOT, run_python, torchrun

EXAMPLES = ROOT / "examples"
SMALL = "--layers 2 --hidden 64 --ffn 128 --heads 4 --kv-heads 2 --vocabulary 128 --sequence 128"
OFFLOADED = re.compile(r"^(activations|stage \d) +\d+ +[1-9][\d.]+ MiB", re.MULTILINE)


@pytest.mark.parametrize(
    "kind",
    [
        ["--lora", "4"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--optimizer-in-backward"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_long_context_has_the_same_losses_in_all_modes(kind, tmp_path):
    modes = ["none", "offload", "save_on_cpu", "checkpoint", "checkpoint+offload"]
    output = tmp_path / "found.json"
    words = [*SMALL.split(), "--steps", "2", *kind, "--output", output, "--modes", *modes]
    ran = run_python(EXAMPLES / "long_context.py", *words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(output.read_text())["modes"]
    assert list(found) == modes
    assert len({tuple(found[mode]["losses"]) for mode in modes}) == 1
    assert len(set(found["none"]["losses"])) == 2
    assert found["checkpoint+offload"]["pinned_bytes"] > 0


def test_without_a_gpu_the_longest_is_not_looked_for(tmp_path):
    words, env = ("--layers", "1"), {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    ran = run_python(EXAMPLES / "long_context.py", *words, cwd=tmp_path, env=env)
    assert ran.returncode == 2
    assert "give --sequence" in ran.stderr


@pytest.mark.parametrize("name", ["pipelining.py", "accelerate_fsdp2.py"])
def test_an_example_of_several_processes_says_what_starts_it(name, tmp_path):
    pytest.importorskip("accelerate", reason="no accelerate")
    ran = run_python(shutil.copy(EXAMPLES / name, tmp_path), cwd=tmp_path, env={"PATH": ""})
    assert ran.stderr.startswith("a launcher starts it: torchrun --nproc-per-node 2 ")


def test_the_notebooks_cells_run_in_order(capsys):
    notebook, scope = json.loads((EXAMPLES / "quickstart.ipynb").read_text()), {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec("".join(cell["source"]), scope)  # noqa: S102 - our own
    said = capsys.readouterr().out
    assert said.startswith("bitwise identical: yes\n")
    assert OFFLOADED.search(said)
    assert re.search(r"^offloaded +[1-9][\d.]+ MiB #+$", said, re.MULTILINE)


def lines_of(folder, name, ranks, *words):
    """Return the lines of losses that an example prints in a folder of its own, and the others."""
    start = run_python if ranks == 1 else functools.partial(torchrun, ranks)
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = start(shutil.copy(EXAMPLES / name, folder), "--steps", "4", *words, cwd=folder, **on_cpu)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    losses = [line for line in lines if line.startswith("step ")]
    return losses, [line for line in lines if line not in losses]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "needed"),
    [
        ("nanogpt.py", 1, "torch"),
        ("trainer.py", 1, "transformers"),
        ("trl_sft.py", 1, "trl"),
        ("accelerate_fsdp2.py", 2, "accelerate"),
        ("pipelining.py", 2, "torch"),
    ],
)
def test_an_example_prints_the_same_losses_without_offload_and_counts_its_groups(
    name, ranks, needed, tmp_path
):
    pytest.importorskip(needed, reason=f"no {needed}")
    losses, others = lines_of(tmp_path, name, ranks)
    without, _ = lines_of(tmp_path, name, ranks, "--no-offload")
    assert losses == without
    assert len(set(losses)) == 4
    assert OFFLOADED.search("\n".join(others))

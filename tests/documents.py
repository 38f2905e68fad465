"""What the documents tell a reader to run: their fenced blocks, as commands and as snippets.

Blocks of the languages `text` and `yaml` show something, and are not run.

`SMALLER` says how commands for GPUs are run on a CPU, `NOT_RUN` why the others are not, and
`tests/snippets.py` what a snippet presupposes.
`tests/test_documents.py` runs the rest.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain_runs import MOVING, ON_CPU, SMALL

from megatron_offload.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_PROGRAM = re.compile(
    r"^([A-Z_0-9]+=\S+ )*(make|megatron-offload|accelerate|torchrun|pip|pytest|(\S*/)?python3?) "
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_commands(self) -> bool:
        return not self.language and bool(_PROGRAM.match(self.text))

    def commands(self) -> list[str]:
        """Return the commands as one pastes them, less comments."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s\s)#.*", "", line) for line in joined.splitlines())
        return [" ".join(line.split()) for line in lines if line.strip()]


def blocks() -> Iterator[Block]:
    """Yield every fenced block of every page."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        inside: list[str] | None = None
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if not line.startswith("```"):
                if inside is not None:
                    inside.append(line)
            elif inside is None:
                inside, begin, language = [], number, line.removeprefix("```").strip()
            else:
                yield Block(name, begin, language, "\n".join(inside) + "\n")
                inside = None
        assert inside is None, f"{name}: a block isn't closed"


def examples() -> Iterator[tuple[str, str]]:
    """Yield each command's name and the example in its help."""
    for name in COMMANDS:
        about = importlib.import_module(f"megatron_offload.cli.{name}").__doc__ or ""
        example = about[about.index("example: ") + len("example: ") :]
        yield name, " ".join(example.replace("\\\n", " ").split())


# Commands

_BENCHMARK = "measures on GPUs, for minutes"
_SETTINGS = "tests/integrations/test_trainer_pages.py runs what it sets"

_PARSED = "its own parser takes its flags, in tests/test_documents.py"

NOT_RUN = {
    "pip install ": "changes the environment; tests/test_package.py installs what it builds",
    "make quickstart": "makes an environment; the command in which it ends is run in its place",
    "make test": "runs this test",
    "make format": "changes the sources",
    "make docs": "makes an environment; tests/test_site.py builds the site",
    ".venv/bin/python -m pytest ": "tests; takes minutes",
    "accelerate launch ": "starts one process where there is no GPU; the next line starts two",
    "torchrun --nproc-per-node 8 -m megatron_offload.run pretrain_gpt.py --cuda-graph-impl ": (
        "captures a CUDA graph, as tests/gpu/test_pretrain_on_gpus.py does; its flags are read in "
        "tests/run/test_launcher.py"
    ),
    "VERL_USE_EXTERNAL_MODULES=": (
        f"needs Ray and GPUs; verl's own configuration takes its overrides, and {_SETTINGS}"
    ),
    "NVTE_CPU_OFFLOAD_V1=1 torchrun ": (
        f"Megatron-Bridge asks for TransformerEngine, so for a GPU; {_SETTINGS}"
    ),
    "python3 benchmarks/bench_": f"{_BENCHMARK}; {_PARSED}",
    "python3 examples/long_context.py ": f"{_BENCHMARK}; {_PARSED}",
    "python3 scripts/check_bitwise.py --output ": f"trains 126 models; {_PARSED}",
    "python3 scripts/zoo.py ": f"trains hundreds of models; tests/test_scripts.py; {_PARSED}",
    "python3 scripts/soak.py ": f"takes many minutes; tests/test_scripts.py; {_PARSED}",
}
"""How commands begin that no test runs, and why."""

PRETRAIN = ("pretrain_gpt.py", "examples/megatron_pretrain.py")
"""Scripts of a Megatron-LM job; the example is run for both, as the wheel has only the library."""

_FOR_A_GPU = (
    "run.device=cpu parallel.pipeline=2 model.layers=4 model.hidden=64 model.heads=2 "
    "model.ffn=128 model.sequence_length=32 model.vocabulary=256 run.steps=2 "
    "offload.min_tensor_bytes=0 run.output=runs"
)
_JOB = f"{SMALL} {ON_CPU} {MOVING} --train-iters 20 --eval-interval 20"
_JOBS = {" ... ": " ", " ...": "", "torchrun ": "torchrun --standalone ", "-node 8 ": "-node 2 "}

SMALLER: dict[str, tuple[dict[str, str], str]] = {
    "megatron-offload run pretrain_gpt.py ... --num-experts": (
        _JOBS,
        f"{_JOB} --swiglu --disable-bias-linear --moe-shared-expert-intermediate-size 64",
    ),
    "megatron-offload run pretrain_gpt.py": (_JOBS, _JOB),
    "megatron-offload run --offload-policy auto --offload-report runs/job": (_JOBS, _JOB),
    "torchrun --nproc-per-node 8 ... -m megatron_offload.run": (_JOBS, _JOB),
    "torchrun --nproc-per-node 1 -m megatron_offload.run --offload-policy modules": (_JOBS, _JOB),
    "megatron-offload compare --config h200_x4": ({}, f"--set {_FOR_A_GPU}/compared"),
    "torchrun --nproc-per-node 4 tests/integrations/pipelining_worker.py": (
        {"torchrun ": "torchrun --standalone ", "-node 4": "-node 2"},
        "--device cpu --width 64 --rows 64 --layers 1",
    ),
    "PYTHONPATH=.venv/megatron-core-later .venv/bin/python benchmarks/bench_host_overhead.py": (
        {"PYTHONPATH=.venv/megatron-core-later .venv/bin/python": "python3"},
        "--num-runs 1",
    ),
}
"""How commands begin that are run small on a CPU: what is exchanged, and flags that then win."""


def made_small(command: str) -> str:
    """Return a command as it is run: with the sizes and devices that a test has."""
    for prefix, (exchanged, appended) in SMALLER.items():
        if command.startswith(prefix):
            for old, new in exchanged.items():
                command = command.replace(old, new)
            return f"{command} {appended}"
    return command


def wants_megatron(command: str) -> bool:
    """Whether a command is run where the later megatron-core is."""
    return any(script in command for script in (*PRETRAIN, "bench_host_overhead.py"))


EXAMPLES = (
    "python3 examples/nanogpt.py",
    "python3 examples/long_context.py --layers 2 ",
    "python3 examples/trl_sft.py ",
    "torchrun --nproc-per-node 2 examples/",
)
"""How commands begin that run an example on a CPU, in spite of the above."""

WANTED = {"examples/trl_sft.py": "trl"}
"""Packages that not every environment of the tests has, by the script that wants one."""


SLOW_PREFIXES = (
    *EXAMPLES,
    *SMALLER,
    "python3 scripts/check_bitwise.py ",
    *(f"megatron-offload {name}" for name in ("compare", "doctor", "plan", "train")),
)
"""Commands that take more than a second or two, as does what wants `QUICKSTART` run."""

QUICKSTART = "megatron-offload compare --config configs/quickstart.yaml"
"""What `make quickstart` ends in."""


def reason_not_to_run(command: str) -> str | None:
    """Return why a command isn't run; None where it is."""
    if command.startswith((*EXAMPLES, *SMALLER)):
        return None
    return next((why for prefix, why in NOT_RUN.items() if command.startswith(prefix)), None)


def is_slow(command: str) -> bool:
    """Whether a command runs in ``make test-all`` alone."""
    return command.startswith(SLOW_PREFIXES) or wants_run(command)


def wants_run(command: str) -> bool:
    """Whether a command is about the quickstart's run."""
    return "runs/quickstart" in command


LLAMA_CONFIG = """{"model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}"""
"""A small model's ``config.json``."""

"""Runs of Megatron-LM's own `pretrain`: flags and environment on a CPU, and what they print."""

from __future__ import annotations

import os
import random
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from processes import ROOT, later, run_python

EXAMPLE = ROOT / "examples" / "megatron_pretrain.py"

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-3 --min-lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 128 --mock-data "
    "--eval-interval 2 --eval-iters 1 --log-interval 1 --deterministic-mode "
    "--rerun-mode validate_results"
)
ON_CPU = (
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-rope-fusion"
)
"""In the place of TransformerEngine, NCCL and Apex."""

MOVING = "--offload-set min_tensor_bytes=0 --offload-set max_inflight_bytes=0"
"""Flags of the launcher under which so small a model moves all it may."""


def free_port() -> int:
    """Return a port below those that a system gives to whoever asks for any."""
    while True:
        port = random.randrange(10000, 30000)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port


def environment() -> dict[str, str]:
    """Return the environment of a job that runs where the later megatron-core is."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [ROOT / "tests" / "no_cuda", later(), ROOT, *filter(None, given)]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("NVTE_")},
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        # Its functions ask for CUDA by a name that stands for something else.
        "TORCHDYNAMO_DISABLE": "1",
    }


@dataclass(frozen=True)
class Printed:
    """What a job has printed: of each iteration the loss and the gradient norm, and evaluations."""

    text: str

    @property
    def iterations(self) -> dict[int, tuple[str, str]]:
        line = r" iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+) "
        return {int(number): (loss, norm) for number, loss, norm in re.findall(line, self.text)}

    @property
    def evaluations(self) -> list[tuple[str, str]]:
        return re.findall(r"loss at (iteration .*?) \| lm loss value: (\S+) ", self.text)

    @property
    def moved(self) -> dict[str, str]:
        """By name what the launcher says that a step moves."""
        (line,) = re.findall(r"^megatron-offload: a step of rank 0 offloads (.*)$", self.text, re.M)
        return dict(re.findall(r"(\w+) ([\d.]+ \w+)", line.partition(", recomputes ")[0]))


def pretrain(
    *words: str | Path,
    ranks: int = 1,
    launched: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Printed:
    """Run the example as its first lines say; with flags of the launcher through that.

    The environment is that of a CPU, unless there is another.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    launcher = ["megatron_offload.run", *(launched or "").split()]
    command = [*(torchrun if ranks > 1 else ()), *(launcher if launched is not None else ())]
    if launched is None and ranks > 1:
        command.pop()
    env = environment() if env is None else env
    done = run_python(*(["-m"] if command else ()), *command, EXAMPLE, *words, env=env, path=())
    assert done.returncode == 0, done.stderr[-6000:]
    return Printed(done.stdout + done.stderr)

"""``megatron-offload run``: what a job's script sees of it, and what Megatron's parser takes.

The wheel of 0.16.1 has no ``megatron.training``; `STAND_IN` does there what Megatron-LM's own
sources of that version do with the functions that are exchanged. ``MEGATRON_LM`` may name a
checkout of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from documents import blocks
from processes import ROOT, found_by, path_to, run_python
from torch import nn

from megatron_offload import OffloadConfig, PipelineOffloadManager
from megatron_offload.cli import main as cli
from megatron_offload.cli.report import read_report
from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import ConfigError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.run import launch as launching
from megatron_offload.run.flags import read_flags

PROGRAM = Path(__file__).with_name("launcher_program.py")
VERSIONS = ("0.16", "later")

STAND_IN = {
    "arguments.py": """
import argparse, os
from megatron.core.transformer.enums import CudaGraphScope

def add_megatron_arguments(parser):
    for name in ("num-layers", "hidden-size", "num-attention-heads"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--fine-grained-activation-offloading", action="store_true")
    parser.add_argument("--offload-modules", nargs="*", default=[])
    parser.add_argument("--cuda-graph-impl", default="none")
    parser.add_argument("--cuda-graph-scope", nargs="+", type=CudaGraphScope.__getitem__)
    parser.add_argument("--cuda-graph-warmup-steps", type=int, default=3)
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--recompute-method")
    parser.add_argument("--recompute-num-layers", type=int)
    return parser

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_args()

def validate_args(args, defaults={}):
    args.seen = os.environ.get("NVTE_CPU_OFFLOAD_V1")
    if args.fine_grained_activation_offloading:
        raise AssertionError("TransformerEngine is absent")
    return args
""",
    # Holds what it has imported, as the real one does.
    "initialize.py": "from megatron.training.arguments import parse_args, validate_args\n",
    "__init__.py": "from . import initialize\n",
}

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"]
REAL = (
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --lr 1e-4 --train-iters 1 "
    "--tokenizer-type NullTokenizer --vocab-size 64 --mock-data --no-gradient-accumulation-fusion"
)
OUR_NAMES = ["--offload-modules", "core_attn", "mlp_fc1", "decoder.layers.*.mlp"]


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """A function that starts the launcher with what is beside a version of megatron-core."""
    folder = tmp_path_factory.mktemp("launcher")
    later, older = folder / "later", folder / "0.16"
    later.mkdir()
    # The later one asks for Python 3.12, of which its parser needs this.
    (later / "sitecustomize.py").write_text(
        "import typing\nif not hasattr(typing, 'override'): typing.override = lambda method: method"
    )
    training = older / "megatron" / "training"
    training.mkdir(parents=True)
    for name, text in STAND_IN.items():
        (training / name).write_text(text)
    paths = {"0.16": os.environ.get("MEGATRON_LM", older), "later": later}

    def run(version, *words, **more):
        env = {name: x for name, x in os.environ.items() if not name.startswith("NVTE_")}
        path = (paths[version], *path_to(version))
        words = ("-m", "megatron_offload.run", *words)
        return run_python(*words, path=path, env=env, cwd=ROOT.parent, **more)

    return run


def job(version, *words):
    return (str(PROGRAM), *MODEL, *(REAL.split() if version == "later" else ()), *words)


BEFORE = ("--offload-policy", "auto", "--offload-recompute", "norm")
BEHIND = ("--offload-most-slowdown-percent", "3", *OUR_NAMES)


FULL = ("--recompute-granularity", "full", "--recompute-num-layers", "1", "--recompute-method")
EARLIER = "local --cuda-graph-scope full_iteration"
SPELLINGS = {"0.16": [EARLIER], "later": ["full_iteration", EARLIER]}
"""Of a graph of the whole step."""


def others(version):
    """Return the words of further jobs by name; one without a graph lies between those with one."""
    (command,) = next(
        block.commands() for block in blocks() if "--cuda-graph-impl full_iteration" in block.text
    )
    _, _, flags = command.removesuffix(" FLAGS").partition("pretrain_gpt.py ")
    if version == "0.16":  # whose patch has no others
        flags, _, _ = flags.partition(" --te-rng-tracker")
    found = {"help": ["--help"]}
    found["unknown"] = job(version, "--offload-modules", "core_attn", "mlp_fc3")[1:]
    for policy in ("auto", "modules"):
        for spelling in SPELLINGS[version]:
            graph = flags.replace("full_iteration", spelling).split()
            found[f"{spelling} {policy}"] = job(version, *graph, "--offload-policy", policy)[1:]
        found.setdefault("full", job(version, *FULL, "uniform")[1:])
    return found


@pytest.fixture(scope="module", params=VERSIONS)
def found(request, launch):
    """What the script finds where a version is asked for, with flags before it and behind."""
    version = request.param
    further = json.dumps(others(version))
    done = launch(version, *BEFORE, *job(version, *BEHIND), OTHERS=further)
    return {"asked": version, **found_by(done)}


def test_a_script_runs_as_python_runs_it_and_our_flags_count_before_it_and_behind(found):
    assert found["version"].startswith("0.16.") == (found["asked"] == "0.16")
    assert found["argv"] == [*job(found["asked"], *BEHIND)]
    names = [found[key] for key in ("name", "path", "beside")]
    assert names == ["__main__", str(PROGRAM.parent), "launcher_beside"]
    assert found["policy"] == {"kind": "auto", "most_slowdown_percent": 3.0}
    assert found["recompute"] == ["norm"]
    kinds = {type(value) for value in found["plain"].values()}
    assert kinds <= {str, float, list, type(None)}, "args are checkpointed"


def test_our_names_are_accepted_no_argument_or_variable_stays_changed_and_all_is_undone(found):
    assert found["modules"] == OUR_NAMES[1:]
    assert all(found[key] for key in ("on", "unchanged", "copied"))
    assert found["variable"] is None
    assert found["asked"] == "later" or found["seen"] == "1"
    assert found["installed"]
    assert found["restored"]


def test_the_scripts_own_help_lists_our_flags_and_what_others_name_is_known_or_refused(found):
    done = found["others"]["help"]
    assert done["error"] == "SystemExit(0)"
    group = done["said"].partition("activation offload (megatron-offload):\n")[2]
    for name in ("policy", "memory-target", "most-slowdown-percent", "recompute", "config", "set"):
        assert f"  --offload-{name} " in group
    assert "--num-layers" in done["said"]
    said = "unknown offload module 'mlp_fc3'; did you mean 'mlp_fc2'?"
    assert said in found["others"]["unknown"]["error"]
    # With full recompute the inputs of layers are marked.
    full = found["others"]["full"]
    assert full["modules"] == ["layer_input"]
    assert not full["replays"]


@pytest.mark.parametrize(("policy", "warmup"), [("auto", 32), ("modules", 3)])
def test_a_graph_of_the_whole_step_is_captured_when_the_plan_is_found(found, policy, warmup):
    for spelling in SPELLINGS[found["asked"]]:
        job = found["others"][f"{spelling} {policy}"]
        assert job["warmup"] == warmup
        assert job["replays"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "modules"),
    [
        ((), {"qkv_linear", "core_attn", "mlp_fc1", "mlp_fc2"}),
        ((*FULL, "block"), {"layer_input", "qkv_linear", "mlp_fc1"}),
    ],
    ids=["nothing is recomputed", "some layers are recomputed"],
)
def test_without_a_word_offload_is_on_for_attention_and_mlp(launch, words, modules):
    found = found_by(launch("0.16", *job("0.16", *words)))
    assert found["on"]
    assert found["policy"] is None
    assert modules <= set(found["modules"])


# Without a process of their own


@pytest.fixture
def not_prepared(monkeypatch):
    """Let a command run no more than its script."""
    monkeypatch.setattr(launching, "prepare", lambda *_: None)
    monkeypatch.setattr(PipelineOffloadManager, "instance", None)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.mark.usefixtures("not_prepared")
def test_exceptions_of_ours_in_the_script_are_no_errors_of_the_command(
    tmp_path, monkeypatch, capsys
):
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\nfrom megatron_offload.errors import ConfigError\n"
        "assert sys.argv == ['job.py', '-x']\n"
        "assert vars(sys.modules['__main__']) is globals()\n"
        "raise ConfigError(f'in the job {__file__}')\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"in the job {script}"):
        cli.main(["run", "job.py", "-x"])
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("not_prepared")
@pytest.mark.parametrize("chunk", ["", "PipelineOffloadManager().begin_chunk()"])
def test_a_module_ends_with_its_status_and_a_line_if_no_chunk_began(
    chunk, tmp_path, monkeypatch, capsys
):
    program = f"import sys\nfrom megatron_offload import PipelineOffloadManager\n{chunk}\n"
    (tmp_path / "a_job.py").write_text(f"{program}sys.exit((__name__, sys.argv[1:]))\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_error:
        cli.main(["run", "-m", "a_job", "--num-layers", "2"])
    assert exit_error.value.code == ("__main__", ["--num-layers", "2"])
    said = "megatron-offload: nothing was offloaded: a_job ran no forward of a Megatron model"
    assert capsys.readouterr().err.startswith(said) == (not chunk)


@pytest.mark.parametrize("words", [("-m", "no_module"), ("-m", "a.b"), ("-m", "a"), ("a",)])
def test_what_is_no_program_ends_as_with_python(words, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__init__.py").touch()
    ours = run_python("-m", "megatron_offload", "run", *words, cwd=tmp_path)
    expected = run_python(*words, cwd=tmp_path)
    assert (ours.stderr, ours.returncode) == (expected.stderr, expected.returncode)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--offload-policy", "autoo", __file__),
            "--offload-policy: there is no kind 'autoo'; did you mean 'auto'?",
        ),
        (("--ofload-policy", "auto", "x.py"), "--ofload-policy; did you mean '--offload-policy'"),
        (("/nowhere.py",), "can't open file '/nowhere.py': no such file or directory"),
        ((), "required: SCRIPT"),
        (
            ("--offload-recompute", "nrom", __file__),
            "recompute: unknown recompute kind 'nrom'; did you mean 'norm'?",
        ),
        (
            ("--offload-set", "modles=[x]", __file__),
            "--offload-set modles; did you mean 'modules'?",
        ),
        (("--offload-policy", "memory_target", __file__), ": --offload-memory-target is required"),
        (("--offload-config", "/nowhere.yaml", __file__), "/nowhere.yaml"),
        (("--offload-set", "fraction", __file__), "a setting is key=value"),
        (("--offload-report", __file__, __file__), "the report goes to a folder"),
    ],
)
def test_a_wrong_flag_is_one_line(words, expected, refused):
    assert expected in refused("run", *words)


def test_flags_win_over_the_file_whose_name_is_reported_with_what_is_wrong_in_it(tmp_path, refused):
    path = tmp_path / "offload.yaml"
    path.write_text("offload: {fraction: 0.5}")
    said = refused("run", "--offload-config", path, __file__)
    assert f"offload ({path}): unknown key 'offload'" in said
    path.write_text("policy: {kind: auto, most_slowdown_percent: 4}\nprefetch_bytes: 2MiB\n")
    from_file = read_flags({"offload_config": str(path)})
    assert from_file.policy.most_slowdown_percent == 4
    given = {"offload_memory_target": "20GiB,21GiB", "offload_set": ["prefetch_bytes=3MiB"]}
    config = read_flags({**given, "offload_config": str(path)})
    assert config.policy.targets(2) == (20 << 30, 21 << 30)
    assert config.prefetch_bytes == 3 << 20
    assert read_flags({"offload_recompute": "none"}).recompute == ()


@contextlib.contextmanager
def searching(report):
    """Yield a manager whose search reports to a folder, and what takes six of its steps."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    manager = PipelineOffloadManager(OffloadConfig(min_tensor_bytes=0))
    manager.tuner = launching.ReportedSearch(manager, report)

    def take_steps():
        for _ in range(6):
            with torch.no_grad(), manager.step():
                model(torch.randn(8, 64))  # an evaluation
            with manager.step():
                model(torch.randn(8, 64)).sum().backward()
            yield manager.last_step

    with offload_modules(model, ["*"], manager=manager):
        yield manager, model, take_steps
    manager.close()


def test_what_is_converged_is_said_once_and_one_step_is_reported(tmp_path, capsys):
    with searching(tmp_path / "report") as (manager, _, take_steps):
        search, (*_, stats) = manager.tuner, take_steps()
        assert manager.tuner is search
    said = capsys.readouterr().out
    assert said.count("megatron-offload: a step of rank 0 offloads *") == 1
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"config.yaml", "run.json", "trace_0.json"}
    (rank,) = read_report(tmp_path / "report").facts.by_rank
    assert f"\n{rank.groups[0].name} " in f"\n{stats}"
    assert cli.main(["trace", str(tmp_path / "report")]) == 0


def test_a_job_that_has_found_rows_says_them_once_and_keeps_to_them(tmp_path, capsys):
    rows = (RowConfig(site="layer", recompute=True),)
    with searching(tmp_path) as (manager, model, take_steps):
        manager.tuner.is_converged = True
        manager.follow_rows(rows, is_own=True)
        adopt_model(model, manager)
        assert all(step.by_name["layer"].recomputed_bytes for step in take_steps())
        assert manager.rows == rows
    assert (tmp_path / "trace_0.json").exists()
    assert capsys.readouterr().out.count("a step of rank 0 offloads nothing, recomputes ") == 1

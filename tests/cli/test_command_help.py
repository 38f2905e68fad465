"""Each command's help is enough to use it, and nothing is imported for another command."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys

import pytest
from jobs import run_without
from processes import run_python

from megatron_offload.cli.main import COMMANDS, main
from megatron_offload.files.strict_model import _sections_at

WRITES = {
    "run": ["--offload-report", "SCRIPT", "torchrun"],
    "train": ["run.output", "steps.jsonl"],
    "compare": ["compare.json", "report.html", "frontier.json"],
    "plan": ["frontier.json", "--memory-target", "--most-slowdown-percent"],
    "map": ["config.json", "--length"],
    "simulate": ["--trace", "perfetto"],
    "report": ["report.html", "frontier.json"],
    "doctor": ["--output", "plan --machine"],
    "trace": ["trace_<rank>.json", "trace.json", "perfetto"],
}


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as exit_error:
        main([*words, "--help"])
    assert exit_error.value.code == 0
    return capsys.readouterr().out


def test_the_list_of_commands_says_what_each_does(capsys, prints):
    text = help_of(capsys)
    for name, summary in COMMANDS.items():
        assert re.search(rf"^    {name} +{summary[:30]}", text, re.MULTILINE)
    assert "2 bad input" in text
    assert prints() == text, "without a command too"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_is_read_and_written_how_it_ends_and_an_example(name, capsys, monkeypatch):
    for module in ("simpy", "altair", "highspy"):
        monkeypatch.setitem(sys.modules, module, None)
    text = help_of(capsys, name)
    assert text.startswith(f"usage: megatron-offload {name} ")
    for line in ("reads    ", "prints   ", "writes   ", "exit status: 0 ", "example: "):
        assert re.search(rf"^{line}", text, re.MULTILINE), line
    assert "2 bad input" in text
    for word in WRITES[name]:
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    example, _, options = text.partition("example:")[2].partition("options:")
    for flag in re.findall(r"--[a-z][a-z-]+", example):
        assert f" {flag}" in options


def keys_of(model, prefix=""):
    """Yield every key that a section and those in it have, with its text."""
    for name, field in model.model_fields.items():
        is_list = "tuple" in str(field.annotation)
        inner = [] if is_list else list(_sections_at(field.annotation, ()))
        for section in inner:
            yield from keys_of(section, f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}", field.description or ""


@pytest.mark.parametrize("name", ["train", "compare", "plan", "simulate"])
def test_help_lists_every_key_with_its_text(name, capsys):
    text = " ".join(help_of(capsys, name).split())
    keys = dict(keys_of(importlib.import_module(f"megatron_offload.cli.{name}").Given.keys))
    assert len(keys) > 30
    for key, description in keys.items():
        assert f"--{key} " in text
        assert " ".join(description.split()[:4]) in text
    if name == "train":
        assert (
            "--activation-offload-fraction NUMBER Share of each chunk's groups that is offloaded"
            in text
        )
        assert "--offload.policy.kind {auto,memory_target,modules,ratio}" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("plann",), "no command 'plann'; did you mean 'plan'?"),
        (("--vversion",), "unrecognized arguments: --vversion"),
        (("report",), "required: FOLDER"),
        (("report", "/nowhere"), "there is no folder /nowhere"),
        (("trace", "/nowhere"), "there is no folder /nowhere"),
        (("trace", __file__), "test_command_help.py is no folder; give run.output"),
        (("report", "x", "--ouput", "y"), "arguments: --ouput y; did you mean '--output'?"),
        (
            ("plan", "--most-slowdown-percent", "x"),
            "megatron-offload: --most-slowdown-percent: input should be a valid number",
        ),
        (("train", "--config"), "argument --config: expected one argument"),
        (("train", "--offload.fracton", "1"), "did you mean '--offload.fraction'?"),
        (("train", "--offload.fraction", "2"), ": --offload.fraction: input should be less than"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, expected, refused):
    assert expected in refused(*words)


def test_a_shell_completes_commands_flags_and_names(tmp_path, prints, refused, monkeypatch):
    pytest.importorskip("shtab")
    (tmp_path / "words").write_text(prints("--print-completion", "bash"))

    def completed(*words):
        program = f"""source {tmp_path / "words"}; COMP_CWORD={len(words)}
            COMP_WORDS=(megatron-offload {shlex.join(words)}); _shtab_megatron_offload
            echo ${{COMPREPLY[@]}}"""
        done = subprocess.run(["/bin/bash", "-c", program], capture_output=True, text=True)
        return done.stdout.split()

    assert completed("pl") == ["plan"]
    assert completed("plan", "llama3_8") == ["llama3_8b"]
    assert completed("plan", "llama3_8b", "--memory-t") == ["--memory-target"]
    assert completed("plan", "--machine.gpu", "A100-8") == ["A100-80GB"]
    assert completed("simulate", "--model.optimizer", "") == ["adam", "sgd"]
    assert completed("run", "--offload-pol") == ["--offload-policy"]
    assert "did you mean 'bash'" in refused("--print-completion", "bsh")
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install shtab" in refused("--print-completion", "bash")


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("compare --set model.layrs=4", (2, "did you mean 'layers'")),
        ("plan MODEL --memory-target 1TiB", (0, "")),
        ("simulate MODEL --trace FOLDER/trace.json", (0, "")),
    ],
)
def test_bad_input_planning_and_simulating_need_no_torch(words, ends, model, tmp_path):
    words = words.replace("MODEL", str(model)).replace("FOLDER", str(tmp_path)).split()
    status, printed, error = run_without(words, "torch")
    assert status == ends[0], error
    assert ends[1] in error
    assert printed.endswith("imported:\n")


def test_the_version_needs_next_to_nothing():
    program = (
        "import sys, megatron_offload.cli.main as cli\ntry: cli.main(['--version'])\n"
        "finally: print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    )
    done = run_python("-c", program)
    assert done.stdout.endswith("\nset()\n")


@pytest.mark.parametrize(
    "module",
    [
        "argparse",
        "megatron_offload.cli.main",
        "megatron_offload.report.console",
        "megatron_offload.config",
    ],
)
def test_an_interrupt_while_it_starts_is_one_line(module):
    program = (
        "import sys\n"
        f"assert {module!r} not in sys.modules\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from megatron_offload.__main__ import main\n"
        "sys.exit(main(['plan', '--model', 'x']))\n"
    )
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (130, "megatron-offload: interrupted\n")


@pytest.mark.parametrize(("words", "status"), [((), 0), (("plan", "x"), 2)])
def test_an_interrupt_once_all_is_done_changes_nothing(words, status):
    program = (
        "import atexit, os, signal, sys\n"
        "from megatron_offload.__main__ import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.exit(main())\n"
    )
    done = run_python("-c", program, *words)
    assert done.returncode == status
    assert "Interrupt" not in done.stderr

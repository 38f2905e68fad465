"""Every command and snippet of the README, the guides and the help runs as it stands there."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import documents
import pretrain_runs
import pytest
import torch
from documents import QUICKSTART, ROOT
from snippets import PRELUDES, SLOW_SNIPPETS

from megatron_offload import OffloadConfig, PipelineOffloadManager
from megatron_offload.cli import main as cli
from megatron_offload.errors import is_installed
from megatron_offload.integrations import megatron_core, megatron_moe

BLOCKS = list(documents.blocks())
SNIPPETS = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [(b, command) for b in BLOCKS if b.is_commands for command in b.commands()]
LINKED = ("benchmarks", "configs", "docs", "examples", "scripts", "tests")


def keys_of(block):
    return [key for key in PRELUDES if key in block.text]


def scratch_folder(path):
    """Return a folder in which a page's paths lead where they lead in the repository's root."""
    for name in LINKED:
        (path / name).symlink_to(ROOT / name)
    (path / "pretrain_gpt.py").symlink_to(pretrain_runs.EXAMPLE)
    (path / "config.json").write_text(documents.LLAMA_CONFIG)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One folder for all pages, as a reader has who does one after the other."""
    return scratch_folder(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def quickstart_run(scratch):
    run(QUICKSTART, scratch)


def run(command, folder):
    """Run a command as a shell would in which the environment is active; return its output."""
    environment = {
        **os.environ,
        "MASTER_PORT": str(pretrain_runs.free_port()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    if documents.wants_megatron(command):
        environment = pretrain_runs.environment()
    done = subprocess.run(
        ["/bin/bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def cases(pairs):
    slow = (pytest.mark.slow, pytest.mark.timeout(600))
    for place, command in pairs:
        if documents.reason_not_to_run(command) is None:
            marks = slow if documents.is_slow(command) else ()
            yield pytest.param(command, id=f"{place}: {command}", marks=marks)


def run_case(command, folder, request, monkeypatch):
    for script, package in documents.WANTED.items():
        if script in command and not is_installed(package):
            pytest.skip(f"no {package}")
    if documents.wants_run(command):
        request.getfixturevalue("quickstart_run")
    if documents.is_slow(command):
        output = run(documents.made_small(command), folder)
        if any(script in command for script in documents.PRETRAIN):
            # Without a GPU "nothing", unless the command says what moves.
            line = "megatron-offload: a step of rank 0 offloads "
            assert line in output, "the line that docs/megatron.md speaks of"
        return
    # In this process, which has torch loaded already.
    program, *words = shlex.split(command)
    assert program == "megatron-offload"
    monkeypatch.chdir(folder)
    status = cli.main(words)
    assert status == 0, command


@pytest.mark.parametrize("command", [*cases((b.place, command) for b, command in COMMANDS)])
def test_a_page_s_command_runs(command, scratch, request, monkeypatch):
    run_case(command, scratch, request, monkeypatch)


@pytest.mark.parametrize("command", [*cases(documents.examples())])
def test_the_example_of_a_command_s_help_runs(command, tmp_path, request, monkeypatch):
    lies_there = documents.wants_run(command) or documents.wants_megatron(command)
    lies_there |= "config.json" in command
    folder = request.getfixturevalue("scratch") if lies_there else tmp_path
    run_case(command, folder, request, monkeypatch)


def test_make_quickstart_ends_in_the_command_that_is_run():
    rules = (ROOT / "Makefile").read_text().split("\nquickstart:")[1].split("\n\n")[0]
    assert rules.splitlines()[-1].strip() == f"$(BIN)/{QUICKSTART}"


def test_each_command_that_is_not_run_stands_on_a_page_still():
    commands = [command for _, command in COMMANDS]
    commands += [command for _, command in documents.examples()]
    for prefix in (*documents.NOT_RUN, *documents.SMALLER):
        assert any(command.startswith(prefix) for command in commands), prefix
    for script in documents.WANTED:
        assert any(script in command for command in commands), script


class ParsedError(Exception):
    """A script has taken its arguments."""


def scripts_of_pages():
    """Yield each command of a page that is a script of this repository's, and its words."""
    for block, command in COMMANDS:
        words = shlex.split(command)
        for index, word in enumerate(words):
            if word.endswith(".py") and word.startswith(("benchmarks/", "examples/", "scripts/")):
                is_megatron = word in documents.PRETRAIN
                if not is_megatron and documents.reason_not_to_run(command) is not None:
                    yield pytest.param(words[index:], id=f"{block.place}: {command}")


@pytest.mark.parametrize("words", [*scripts_of_pages()])
def test_a_script_that_is_not_run_takes_its_page_s_arguments(words, monkeypatch):
    script = ROOT / words[0]
    words = [word.removesuffix(":...") for word in words]  # of whatever settings
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    names = runpy.run_path(str(script))
    if "parse_arguments" in names:
        names["parse_arguments"]()
        return
    parse = argparse.ArgumentParser.parse_args

    def take(parser):
        parse(parser)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", take)
    with pytest.raises(ParsedError):
        names["main"]()


def test_commands_that_are_not_run_parse(monkeypatch):
    for block, command in COMMANDS:
        program, *words = shlex.split(command)
        if program == "megatron-offload":
            assert cli.read_command(words), block.place


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_block_is_run_or_said_to_be_none(block):
    if block.language == "python":
        assert len(keys_of(block)) == 1, f"{block.place} needs one entry in snippets.PRELUDES"
    else:
        assert block.is_commands or block.language in ("text", "yaml"), block.place


def test_each_entry_is_of_one_block_still():
    for key in PRELUDES:
        assert sum(key in block.text for block in SNIPPETS) == 1, key
    assert set(SLOW_SNIPPETS) <= set(PRELUDES)


def snippet_cases():
    for block in SNIPPETS:
        marks = [pytest.mark.slow] if set(keys_of(block)) & set(SLOW_SNIPPETS) else []
        yield pytest.param(block, id=block.place, marks=marks)


@pytest.mark.parametrize("block", [*snippet_cases()])
def test_a_page_s_snippet_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(scratch_folder(tmp_path))
    for name in ("compile", "cuda"):  # put back whatever becomes of them
        monkeypatch.setattr(torch, name, getattr(torch, name))
    before, after = PRELUDES[keys_of(block)[0]]
    manager = PipelineOffloadManager(OffloadConfig())  # that of other tests stays as it is
    monkeypatch.setattr(PipelineOffloadManager, "instance", manager)
    with ExitStack() as stack:
        for undo in (megatron_core.uninstall, megatron_moe.uninstall):
            stack.callback(undo)
        stack.callback(manager.close)
        names = {"__name__": "snippet"}
        for part, text in (("before", before), (block.place, block.text), ("after", after)):
            exec(compile(text, part, "exec"), names)  # noqa: S102 - our own pages


def headings(page):
    """Return a page's headings as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link:
            assert target.exists(), link
            assert not heading or heading in headings(target), link


TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.stem)
def test_tests_that_a_page_names_are_there(page):
    for path in re.findall(r"`(tests/[\w/.]+)", page.read_text()):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert any(f"def {name}(" in text for text in TESTS.values()), name


def test_the_states_of_the_design_are_drawn_from_the_table():
    for path, text in runpy.run_path(str(ROOT / "scripts" / "draw_states.py"))["files"]().items():
        assert path.read_text() == text, f"{path}: python scripts/draw_states.py"

"""What people read is whole: in a pipe, in a narrow terminal, in ASCII, with hostile names."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.text import Text

from megatron_offload.fine_grained_activation_offload import print_offload_summary_table
from megatron_offload.report.console import console, plain_table, printable

HOSTILE = "[/x]\x1b[31m:bell:\x07\u202e"
SHOWN = r"[/x]\x1b[31m:bell:\x07\u202e"
NAMES = [f"a_group_of_many_{index}" for index in range(9)]


def wide_table():
    table = plain_table("A title", ["rank", *NAMES], 1)
    table.add_row("0", *["1234.50"] * len(NAMES))
    return table


def written(tty=False, encoding="utf-8", **options):
    """Return a console that writes into memory, and what was written."""

    class File(io.TextIOWrapper):
        def isatty(self):
            return tty

    file = File(io.BytesIO(), encoding=encoding, write_through=True, newline="\n")
    stdout, sys.stdout = sys.stdout, file
    try:
        out = console(**options)
    finally:
        sys.stdout = stdout
    out.file = file
    return out, lambda: file.buffer.getvalue().decode(encoding)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def test_the_summary_of_many_groups_is_whole_in_a_pipe(capfd):
    print_offload_summary_table(dict.fromkeys(NAMES, 307 << 20))
    text = capfd.readouterr().out
    assert text.isascii()
    assert "\x1b" not in text
    assert text.count("307.00 MiB") == 2 * len(NAMES)
    assert text.count("2.70 GiB") == 2
    assert all(name in text for name in NAMES)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_table_in_a_pipe_is_ascii_and_as_wide_as_its_content(encoding):
    out, text = written(encoding=encoding)
    out.print(wide_table())
    lines = text().splitlines()
    assert text().isascii()
    assert lines[0].strip() == "A title"
    assert {len(line) for line in lines[1:]} == {sum(len(name) + 3 for name in NAMES) + 8}
    out.print(plain_table("", ["short"]))
    assert len(text().splitlines()[-1]) == len("| short |")


@pytest.mark.parametrize("columns", [10, 80, 400])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_cuts_nothing_off(columns, encoding, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    out, text = written(tty=True, encoding=encoding)
    out.print(wide_table())
    assert text().count("1234.50") == len(NAMES)
    assert all(name in text() for name in NAMES)
    assert ("┃" in text()) == (encoding == "utf-8")


def test_sentences_fold_in_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out, text = written(tty=True)
    table = plain_table("", ["what"], 1)
    table.add_row("many short words " * 8)
    out.print(table)
    lines = re.sub(r"\x1b\[\d+m", "", text()).splitlines()
    assert {len(line) for line in lines if line.strip()} == {40}


@pytest.mark.parametrize(("columns", "width"), [(20, 46), (55, 55), (99, 71)])
def test_words_of_a_table_are_whole_in_a_narrow_terminal(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    out, text = written(tty=True)
    cells = "recompute attention of every layer", "expandable_segments", "98.2 GiB"
    out.print(plain_table("", ["what is done", "", "reserved"], 1, [cells]))
    lines = re.sub(r"\x1b\[\d+m", "", text()).splitlines()
    assert {*" ".join(cells).split(), "reserved"} <= {*" ".join(lines).split()}
    assert {len(line) for line in lines if line.strip()} == {width}


@pytest.mark.parametrize("tty", [False, True])
def test_text_is_printed_as_it_is(tty):
    out, text = written(tty=tty)
    table = plain_table(HOSTILE, [HOSTILE], 1)
    table.add_row(HOSTILE)
    out.print(table)
    out.print(f"path: {HOSTILE}")
    assert text().count(SHOWN) == 4
    assert "\x07" not in text()
    assert "\x1b[31m:" not in text()


def test_what_an_encoding_lacks_is_written_out():
    out, text = written(encoding="ascii")
    out.print("naïve \udc80")
    assert text() == "na\\xefve \\udc80\n"
    assert printable("naïve\ttab\n") == "naïve\ttab\n"
    for tty in (False, True):
        out, text = written(tty=tty)
        out.print("/a/path" * 40)
        assert text() == "/a/path" * 40 + "\n", "long lines are not broken"


def test_the_package_s_own_words_have_colours_in_a_terminal():
    out, text = written(tty=True)
    out.print(Text("yes", "green"))
    assert text() == "\x1b[32myes\x1b[0m\n"

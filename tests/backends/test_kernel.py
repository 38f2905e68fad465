"""Small files of the kernel: read within bounds, or unknown."""

from __future__ import annotations

import os

import pytest

from megatron_offload.backends.host_limit import (
    read_field,
    read_int,
    read_kernel_text,
    read_members,
)


def test_what_is_no_text_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path, *(tmp_path / name for name in ("absent", "pipe", "bytes"))):
        assert read_kernel_text(path) == ""
        assert read_int(path) is None
        assert read_field(path, "x") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("7\n", 7), ("0", 0), *((text, None) for text in ("-1", "max", "", "²", "1 2"))],
)
def test_a_number_is_plain_or_unknown(tmp_path, text, number):
    (tmp_path / "file").write_text(text)
    assert read_int(tmp_path / "file") == number


def test_a_field_is_found_by_its_whole_name(tmp_path):
    (tmp_path / "file").write_text("SwapTotalled: 3 kB\nSwapTotal: 5 kB\nSwapFree:\n")
    assert read_field(tmp_path / "file", "SwapTotal:") == 5
    assert read_field(tmp_path / "file", "SwapFree:") is None


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("5", {5}),
        *((text, set()) for text in ("", "a", "1-", "-1", "1,,2")),
    ],
)
def test_a_list_is_read_whole_or_has_no_members(text, members):
    assert read_members(text) == members

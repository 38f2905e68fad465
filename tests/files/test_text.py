"""Files from strangers end in one clear error; files of ours survive a failed write."""

from __future__ import annotations

import os

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files import text as files


def test_text_round_trips(tmp_path):
    path = tmp_path / "a"
    files.replace_text(path, "héllo")
    assert files.read_text(path) == "héllo"
    plain = tmp_path / "plain"
    plain.touch()
    assert os.stat(path).st_mode == os.stat(plain).st_mode
    plain.unlink()
    files.replace_text(path, "again")
    assert files.read_text(path) == "again"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.replace_text(path, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        files.replace_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_can_not_be_read_says_why(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").write_bytes(b"x" * 101)
    for path, words in [
        (tmp_path / "absent", "No such file"),
        (tmp_path, "directory|not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path / "bytes", "utf-8"),
        (tmp_path / "large", "more than 100 bytes"),
        ("nul\0byte", "null"),
    ]:
        with pytest.raises(ConfigError, match=words):
            files.read_text(path, limit_bytes=100)


PLAIN = r"a\.json is not plain JSON: "
TWICE = "key 'a' is given twice"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, PLAIN) for text in ("", '{"a": 1', "[NaN]", "[" * 300 + "]" * 300)),
        *((text, PLAIN) for text in ("[" * 200_000, "1" * 10_000)),
        *((text, TWICE) for text in ('{"a": 1, "a": 2}', '[{"b": {"a": 1, "c": 0, "a": 1}}]')),
    ],
)
def test_bad_json_says_so(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        files.read_json(path)
    assert len(str(error.value)) < 300


def test_good_json_round_trips(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, null, "x", 5e-324]}')
    assert files.read_json(path) == {"a": [1, 2.5, None, "x", 5e-324]}

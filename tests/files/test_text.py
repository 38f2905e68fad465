"""Files from strangers end in one clear error; files of ours survive a failed write."""

from __future__ import annotations

import os
import time

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files import text as files


def test_text_comes_back(tmp_path):
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not plain JSON"),
        ('{"a": 1', "not plain JSON"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[NaN]", "NaN"),
        ('{"a": 1e999}', "1e999 is more than a number can be"),
        ("[-1e999]", "-1e999 is more than a number can be"),
        ("[" * 40 + "]" * 40, "deeper than 32"),
        ("[" * 200_000 + "]" * 200_000, "nested too deep|deeper than 32"),
        ("1" * 10_000, "not plain JSON"),
    ],
)
def test_bad_json_says_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        files.read_json(path)


def test_good_json_comes_back(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" * 32 + "]" * 32)
    files.read_json(path)
    path.write_text('{"a": [1, 2.5, null, "x"]}')
    assert files.read_json(path) == {"a": [1, 2.5, None, "x"]}


def test_nan_is_read_only_where_it_is_expected():
    assert files.parse_json("[NaN, -Infinity]", "text", allow_nan=True)[1] == float("-inf")
    with pytest.raises(ConfigError, match="text is not plain JSON: NaN is no number"):
        files.parse_json("[NaN]", "text")


def test_a_number_out_of_range_is_no_infinity_where_infinity_is_expected():
    with pytest.raises(ConfigError, match="1e999 is more than a number can be"):
        files.parse_json("[Infinity, 1e999]", "text", allow_nan=True)


def test_a_key_given_twice_is_found_in_time_that_grows_with_the_text():
    def seconds(number):
        keys = ",".join(f'"key {index}": 1' for index in range(number))
        text = f'{{{keys}, "key {number - 1}": 1}}'
        start = time.process_time()
        with pytest.raises(ConfigError, match=f"'key {number - 1}' is given twice"):
            files.parse_json(text, "text")
        return time.process_time() - start

    # Each key beside each other would take a minute here.
    assert seconds(30_000) < 5


def test_a_long_key_is_told_in_short():
    key = "x" * 100_000
    with pytest.raises(ConfigError) as error:
        files.parse_json(f'{{"{key}": 1, "{key}": 1}}', "text")
    assert len(str(error.value)) < 200


def test_a_link_is_followed_only_where_it_may_be(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with files.open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"
    with pytest.raises(ConfigError, match="can't read"):
        files.open_regular(tmp_path / "link", follow_link=False)

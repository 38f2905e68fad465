"""Errors name the nearest key wherever it stands: in lists, in options, in unions by kind.

And files from strangers end in one clear error; files of ours survive a failed write.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from megatron_offload.errors import ConfigError
from megatron_offload.files import text as files
from megatron_offload.files.strict_model import Bytes, StrictModel, validate


class Leaf(StrictModel):
    size_bytes: Bytes = 0


class One(StrictModel):
    kind: Literal["one"]
    colour: str = ""


class Two(StrictModel):
    kind: Literal["two"]
    weight: int = 0
    leaf: Leaf = Leaf()


class Checked(StrictModel):
    weight: int = 0

    @model_validator(mode="after")
    def check(self) -> Checked:
        return self


class Root(StrictModel):
    checked: Checked | None = None
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, int] = (0, 0)
    either: Annotated[One | Two, Field(discriminator="kind")] | None = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "^it must hold a mapping"),
        ({"leavs": 1}, "unknown key 'leavs'; did you mean 'leaves'"),
        (
            {"colour": "red"},
            "mean 'either.colour', in Python either={'kind': 'one', 'colour'",
        ),
        ({"leaf": {"size_byte": 1}}, "'leaf.size_byte'; did you mean 'size_bytes'"),
        ({"leaves": [{}, {"size_byte": 1}]}, "'leaves.1.size_byte'; did you mean 'size_bytes'"),
        ({"either": {"kind": "one", "color": 1}}, "'either.color' of kind 'one'; did .* 'colour'"),
        ({"either": {"kind": "two", "wieght": 1}}, "'either.wieght' of kind 'two'; .* 'weight'"),
        (
            {"either": {"kind": "two", "leaf": {"size": 1}}},
            "'either.leaf.size'; did you mean 'size_bytes'",
        ),
        ({"either": {"kind": "on"}}, "'either': there is no kind 'on'; did you mean 'one'"),
        ({"either": {"weight": 3}}, "'either' needs a kind, one of one, two"),
        ({"either": {"kind": "two", "two": 3}}, "'either.two' of kind 'two'; valid names are kind"),
        ({"leaf": {"size_bytes": "3Gi"}}, "'leaf.size_bytes': there is no unit 'Gi'.* 'GiB'"),
        *(
            ({"leaf": {"size_bytes": size}}, "'leaf.size_bytes': a size is .* such as '64MiB'")
            for size in ("lots", "1,5GiB", "1.5.2GiB", "2,000,000", "1GiB/2", "26GiB,30GiB", "-1")
        ),
        ({"pair": [1]}, "'pair.1' is required"),
        ({"either": {"kind": "two", "weight": False}}, "'either.weight': a number is wanted"),
        ({"checked": {"weight": True}}, "'checked.weight': a number is wanted"),
    ],
)
def test_the_nearest_key_is_named(data, message):
    with pytest.raises(ConfigError, match=message):
        validate(Root, data, "it")


def test_what_is_right_passes():
    data = {"leaves": [{"size_bytes": "1KiB"}], "either": {"kind": "two", "weight": 3}}
    read = validate(Root, data, "it")
    assert read.leaves[0].size_bytes == 1024
    assert read.either == Two(kind="two", weight=3)


def test_python_gets_the_same_words_by_the_same_error():
    for data in ({"leaf": {"size_byte": 1}}, {"leavs": 1}, {"either": {"kind": "on"}}):
        with pytest.raises(ConfigError) as told:
            validate(Root, data, "Root")
        with pytest.raises(ConfigError) as built:
            Root(**data)
        assert str(built.value) == str(told.value)
    assert isinstance(Root(leaf={"size_bytes": 1}).leaf, Leaf)


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

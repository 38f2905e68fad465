"""Errors name the nearest key wherever it stands: in lists, in options, in unions by kind."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from megatron_offload.errors import ConfigError
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


class Root(StrictModel):
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, int] = (0, 0)
    either: Annotated[One | Two, Field(discriminator="kind")] | None = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "^it must hold a mapping"),
        ({"leavs": 1}, "unknown key 'leavs'; did you mean 'leaves'"),
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

"""Profiles as files: exact, and closed to anything that isn't one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from problems import fields_of, random_profile

from megatron_offload.errors import ConfigError
from megatron_offload.planning.files import (
    load_profile,
    parse_profile,
    save_profile,
    to_json,
)


def example():
    """A profile in which no list is empty."""
    profiles = (random_profile(random.Random(seed)) for seed in range(100))
    return next(
        profile
        for profile in profiles
        if len(profile.backward_order) > 1
        and profile.backward_at_bytes
        and profile.times
        and profile.peak_allocated_bytes
    )


def test_what_is_read_is_what_was_written(tmp_path):
    for seed in range(300):
        profile = random_profile(random.Random(seed))
        again = parse_profile(to_json(profile), "it")
        assert fields_of(again) == fields_of(profile), seed
    save_profile(profile, tmp_path / "p.json")
    assert fields_of(load_profile(tmp_path / "p.json")) == fields_of(profile)


def test_a_profile_that_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "p.json"
    save_profile(example(), path)
    before = path.read_text()
    with pytest.raises(ConfigError, match="is not plain JSON"):
        save_profile(replace(example(), step_us=float("nan")), path)
    assert path.read_text() == before


def changed(change):
    data = json.loads(to_json(example()))
    change(data)
    return json.dumps(data)


def set_at(*path, to):
    def change(data):
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_at("groups", 0, "nmae", to="x"), r"unknown key 'groups.0.nmae'; did you mean 'name'"),
        (set_at("run", "pp_sise", to=2), "unknown key 'run.pp_sise'; did you mean 'pp_size'"),
        (set_at("version", to=1), "'version'"),
        (set_at("format", to="plan"), "'format'"),
        (lambda data: data.pop("groups"), "'groups' is required"),
        (set_at("groups", 0, "num_bytes", to=-1), "'groups.0.num_bytes'"),
        (set_at("groups", 0, "num_bytes", to=2**63), "'groups.0.num_bytes'"),
        (set_at("groups", 0, "num_bytes", to=10**400), "'groups.0.num_bytes'"),
        (set_at("groups", 0, "num_bytes", to="5"), "'groups.0.num_bytes'"),
        (set_at("groups", 0, "num_bytes", to=True), "'groups.0.num_bytes'"),
        (set_at("groups", 0, "num_bytes", to=5.0), "'groups.0.num_bytes'"),
        (set_at("groups", 0, "name", to="x" * 1000), "'groups.0.name'"),
        (set_at("groups", to={}), "'groups'"),
        (set_at("step_us", to=None), "'step_us'"),
        (set_at("step_us", to=-1.0), "'step_us'"),
        (set_at("run", "versions", to=[["torch", 2]]), "'run.versions.0.1'"),
        (set_at("run", "pp_rank", to=9), "pipeline rank 9 of"),
        (lambda data: data["groups"].append(data["groups"][-1]), "two have the same"),
        (lambda data: data["backward_order"].append(data["backward_order"][-1]), "comes twice"),
        (set_at("backward_order", 0, "order", to=99), "has no group 99"),
        (lambda data: data["backward_at_bytes"].pop(), "'backward_at_bytes' holds"),
        (set_at("backward_at_bytes", 0, to=2**63 - 1), "'backward_at_bytes' are not in the order"),
        (set_at("groups", 0, "committed_at_bytes", to=2**63 - 1), "'groups' are not in the order"),
        (lambda data: data["times"].pop(), "'times' holds"),
        (set_at("peak_reserved_bytes", to=0), "are more than 'peak_reserved_bytes'"),
    ],
)
def test_what_no_step_can_have_shown_is_refused(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_profile(changed(change), "it")
    assert all(line.startswith("it") for line in str(caught.value).splitlines())


def test_times_that_run_backwards_are_refused():
    def swap(data):
        place = data["backward_order"][0]
        index = next(index for index, group in enumerate(data["groups"]) if group["key"] == place)
        data["times"][index]["done_us"] = 0.0

    with pytest.raises(ConfigError, match="run backwards"):
        parse_profile(changed(swap), "it")


@pytest.mark.parametrize("text", ["", "[]", '{"step_us": NaN}', "[" * 100_000])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ConfigError, match="it"):
        parse_profile(text, "it")

"""Bandwidths that a plan rests on: the slowest machine's, and as a file read strictly."""

from __future__ import annotations

import json

import pytest

from megatron_offload.core.machine import CopyRates, MachineConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import read_model, write_model
from megatron_offload.planning.bandwidths import (
    DEFAULTS,
    Bandwidths,
    measured_machine,
    slowest_link,
)


def machine(*gpus):
    """Return a machine whose GPUs have the given rates, in the order of `CopyRates`."""
    return [CopyRates(**dict(zip(CopyRates.model_fields, rates, strict=True))) for rates in gpus]


def test_of_one_machine_the_slowest_gpu_counts_and_the_sum_of_all():
    found = measured_machine(machine((50, 54, 45, 44, 20, 30), (49, 55, 46, 47, 21, 29)))
    assert found == MachineConfig(
        d2h_gbps=49,
        h2d_gbps=54,
        both_gbps=44,
        node_gbps=100,
        node_d2h_gbps=None,
        node_h2d_gbps=None,
        gpus_per_node=2,
    )


def test_of_what_copies_got_the_slowest_rank_counts_each_way_and_silent_ones_do_not():
    found = slowest_link([(2.0, 5.0), (0.0, 0.0), (3.0, 1.0)]).machine
    assert (found.d2h_gbps, found.h2d_gbps, found.both_gbps, found.node_gbps) == (2, 1, 1, 3)
    assert (found.node_d2h_gbps, found.node_h2d_gbps, found.gpus_per_node) == (None, None, 1)
    assert slowest_link([(0.0, 0.0)]).origin == DEFAULTS


# As a file.

SAVED = Bandwidths(machine=MachineConfig(d2h_gbps=12.5), gpus_per_rank=2, origin="a guess")


def test_what_is_read_is_what_was_written(tmp_path):
    write_model(tmp_path / "b.json", SAVED)
    assert read_model(Bandwidths, tmp_path / "b.json") == SAVED


def without(*names):
    def change(data):
        section = data
        for name in names[:-1]:
            section = section[name]
        del section[names[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("machine"), "'machine' is required"),
        (without("origin"), "'origin' is required"),
        (lambda d: d.update(version=2), "'version'"),
        (lambda d: d.update(format="megatron_offload plan"), "'format'"),
        (lambda d: d.update(orgin=""), "did you mean 'origin'"),
        (lambda d: d["machine"].update(d2h_gps=1), "did you mean 'd2h_gbps'"),
        (lambda d: d.update(gpus_per_rank=True), "gpus_per_rank"),
        (lambda d: d.update(origin="x" * 5001), "at most 5000"),
    ],
)
def test_anything_else_is_refused(tmp_path, change, message):
    path = tmp_path / "b.json"
    write_model(path, SAVED)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_model(Bandwidths, path)


@pytest.mark.parametrize("text", ["", "[]"])
def test_what_is_no_file_of_bandwidths_is_named(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"b\.json"):
        read_model(Bandwidths, path)

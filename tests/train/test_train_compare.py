"""Two processes train and compare: what is equal is called equal, and a lost bit is not."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import RankStep, RunReport, StepRecord, compare_reports

CONFIG = """
model: {layers: 4, hidden: 32, heads: 2, sequence_length: 32, dropout: 0.1, tied_embeddings: true}
parallel: {pipeline: 2, virtual: 2}
data: {micro_batch_size: 1, microbatches: 4}
run: {steps: 3, device: cpu, hash_gradients: every, eval_interval: 2}
offload:
  modules: [qkv_linear, core_attn, attn_proj, mlp_act, mlp_fc2]
  min_tensor_bytes: 0
  max_inflight_bytes: 64KiB
  prefetch_bytes: 128KiB
  host_memory_bytes: 64MiB
  host_slab_bytes: 1MiB
"""

ONE_RANK = ("parallel.pipeline=1", "parallel.virtual=1")


def command(tmp_path, *words, program=("-m", "megatron_offload.cli.main")):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    output = f"run.output={tmp_path / 'out'}"
    done = subprocess.run(
        [sys.executable, *program, *words, "--config", str(file), "--set", output],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def lines(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_compare_finds_every_step_equal_and_memory_lower(compared):
    folder, out = compared
    assert "bitwise identical: yes" in out
    without, offloaded = (lines(folder / f"{x}_offload") for x in ("without", "with"))
    for a, b in zip(without, offloaded, strict=True):
        assert float.fromhex(a["loss_hex"]) == a["loss"] == b["loss"]
        assert a["grad_norm_hex"] == b["grad_norm_hex"]
        assert [x["gradients"] for x in a["ranks"]] == [x["gradients"] for x in b["ranks"]]
        assert a["offloaded_bytes"] == 0 < b["offloaded_bytes"]
        for plain, moved in zip(a["ranks"], b["ranks"], strict=True):
            assert moved["peak_live_activation_bytes"] < plain["peak_live_activation_bytes"]
    assert json.loads((folder / "compare.json").read_text())["identical"] is True


@pytest.mark.slow
def test_a_lost_bit_in_a_reload_makes_compare_say_no(tmp_path):
    driver = str(Path(__file__).with_name("flipped_byte.py"))
    status, out, err = command(
        tmp_path,
        "compare",
        "--set",
        "offload.simulated.copy_timing=eager",
        "run.eval_interval=0",
        *ONE_RANK,
        program=(driver,),
    )
    assert status == 1, out + err
    assert "bitwise identical: no" in out
    report = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert report["identical"] is False
    assert report["losses_equal"][0], "the first forward had nothing to reload"


@pytest.mark.slow
def test_train_takes_megatrons_flags_and_data_parallel_ranks(tmp_path):
    words = ["--fine-grained-activation-offloading", "--offload-modules", "mlp_act", "layer"]
    words += ["--set", "parallel.ranks=2", "parallel.pipeline=1", "parallel.virtual=1"]
    words += ["model.recompute=selective", "data.microbatches=2", "run.eval_interval=0"]
    status, out, err = command(tmp_path, "train", *words)
    assert status == 0, out + err
    steps = lines(tmp_path / "out")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        ranks = step["ranks"]
        assert [rank["dp_rank"] for rank in ranks] == [0, 1]
        assert ranks[0]["gradients"] == ranks[1]["gradients"], "reduced over both"
        assert ranks[0]["loss"] != ranks[1]["loss"]
        assert step["tokens"] == 2 * 2 * 32
        assert {group["name"] for group in ranks[0]["groups"]} == {"mlp_act", "layer"}


def report(loss=1.0, grad_norm=2.0, gradients="g", parameters="p", evaluation=3.0):
    ranks = [
        RankStep(0, 0, 0, None, grad_norm, 0.1, gradients="same"),
        RankStep(1, 1, 0, loss, grad_norm, 0.1, gradients=gradients),
    ]
    return RunReport([StepRecord.merge(1, 0.1, 64, ranks)], {1: evaluation}, ("q", parameters))


def test_equal_reports_are_identical():
    assert compare_reports(TrainConfig(), report(), report()).identical


@pytest.mark.parametrize(
    "other",
    [
        {"loss": math.nextafter(1.0, 2.0)},
        {"grad_norm": math.nextafter(2.0, 1.0)},
        {"gradients": "h"},
        {"parameters": "r"},
        {"evaluation": 3.5},
        {"loss": math.nan},
    ],
)
def test_the_smallest_difference_anywhere_counts(other):
    assert not compare_reports(TrainConfig(), report(), report(**other)).identical


def test_no_digest_is_no_proof():
    assert not compare_reports(TrainConfig(), *[report(gradients=None)] * 2).identical


def test_the_loss_is_averaged_over_data_parallel_ranks_in_their_order():
    ranks = [RankStep(index, 0, index, value, 1.0, 0.1) for index, value in enumerate([0.1, 0.2])]
    record = StepRecord.merge(1, 0.1, 8, ranks)
    assert record.loss == (0.1 + 0.2) / 2
    assert isinstance(record, StepRecord)
    assert json.loads(record.to_json())["loss_hex"] == record.loss.hex()


def test_peaks_are_the_largest_of_all_steps():
    first, second = report(), report()
    high = replace(first.steps[0].ranks[1], peak_host_bytes=9)
    first.steps[0] = replace(first.steps[0], ranks=(first.steps[0].ranks[0], high))
    both = RunReport([*first.steps, *second.steps])
    assert [rank["peak_host_bytes"] for rank in both.peaks()] == [0, 9]


@pytest.mark.slow
def test_fused_attention_offloads_the_same_bits_and_measuring_can_be_left_out(tmp_path):
    words = ["--set", "model.attention=scaled_dot_product", "model.query_groups=1"]
    words += ["run.measure_live_bytes=false", *ONE_RANK]
    status, out, err = command(tmp_path, "compare", *words)
    assert status == 0, out + err
    assert "bitwise identical: yes" in out
    assert "Device memory per rank" not in out

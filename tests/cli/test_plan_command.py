"""The command ``plan``: it prints rows of a job, and says of them what simulating says."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import yaml
from jobs import RATES, load_model, measured, plan, rows_in

from megatron_offload.core.units import format_bytes
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import UNLIMITED
from megatron_offload.planning.job_choice import JobChoice
from megatron_offload.planning.job_rows import with_rows
from megatron_offload.planning.simulate import simulate

pytest.importorskip("simpy")


def peak_of(step):
    return max(rank.peak_reserved_bytes for rank in step.ranks)


def step_of(source, rows):
    return simulate(with_rows(source.job, rows), UNLIMITED)


def test_rows_of_a_model_are_printed_and_its_plans_kept_for_another_choice(model, tmp_path, prints):
    output = tmp_path / "new" / "plans.json"
    printed = prints("plan", model, "--most-slowdown-percent", "5%", "--output", output)
    rows = rows_in(printed)
    assert rows
    source = load_model(model)
    choice = JobChoice(source.job)
    step = step_of(source, rows)
    change = 100 * (step.step_us / choice.without.step_us - 1)
    assert f"{step.step_us / 1e3:.1f} ms with the rows ({change:+.2f} %)" in printed
    assert change <= 5
    assert peak_of(step) < peak_of(choice.without)
    assert all(format_bytes(rank.peak_reserved_bytes) in printed for rank in step.ranks)
    assert "PREDICTED" in printed
    assert "predicted by simulation, not measured" in printed
    assert re.search(r"host memory: up to \d+\.\d MiB pinned on a node of 2 GPUs", printed)
    assert f"plans: {output}" in printed
    assert rows_in(prints("plan", "--from", output)) == rows
    prints("report", output)
    page = output.with_suffix(".html").read_text()
    assert re.findall('<h2 id="(.*?)"', page) == ["fit", "plan"]
    assert 'class="missing"' not in page
    limit = "chosen by simulation for at most 5 % of the step's time, with 0.8 of the bandwidth"
    assert limit in html.unescape(page)
    assert limit in printed.splitlines()[1]
    assert "reserved of 139.0 GiB" in prints("plan", "--from", output).splitlines()[0]
    assert rows_in(prints("plan", "--from", output, "--memory-target", "1TiB")) == ()


@pytest.mark.parametrize("limit", [("--most-slowdown-percent", 8), ("--memory-target", "320MiB")])
def test_a_file_of_plans_gives_for_the_same_limit_the_same_plan(limit, model, tmp_path, prints):
    words = ("plan", model, "--set", "machine.both_gbps=4")
    printed = prints(*words, *limit, "--output", tmp_path / "plans.json")
    again = prints("plan", "--from", tmp_path / "plans.json", *limit)
    assert rows_in(again) == rows_in(printed) != ()
    percent = re.search(r"at \S+ % of the step's time", printed)[0]
    assert percent in again.splitlines()[0]
    assert "planned anew, the job may get others" in again


def test_a_limit_of_time_shows_what_a_slower_link_costs(model, prints):
    words = ("plan", model, "--most-slowdown-percent", 8, "--set", "machine.both_gbps=4")
    *others, chosen = json.loads(prints(*words, "--json"))["alternatives"]
    assert chosen["slow_link_percent"] <= 8
    assert any(one["slow_link_percent"] > one["takes_longer_percent"] for one in others)
    assert prints(*words).count(" slower link |") == 2


def test_without_output_a_model_leaves_nothing(model, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert plan(model, "--memory-target", "1TiB") == 0
    assert sorted(tmp_path.iterdir()) == before
    printed = capsys.readouterr().out
    assert "--output FILE keeps the plans" in printed
    assert rows_in(printed) == ()


def test_a_memory_target_is_kept_by_what_is_printed(model, prints):
    source = load_model(model)
    choice = JobChoice(source.job)
    target = peak_of(choice.without) * 7 // 8
    rows = rows_in(prints("plan", model, "--memory-target", target, 1 << 40))
    first, second = step_of(source, rows).ranks
    assert first.peak_reserved_bytes <= target < choice.without.ranks[0].peak_reserved_bytes
    assert second.offloaded_bytes == 0
    assert plan(model, "--memory-target", *["1TiB"] * 3) == 2


def test_what_may_be_recomputed_is_said_by_a_key(model, prints, refused):
    words = (model, "--most-slowdown-percent", 20, "--set", "machine.both_gbps=1")
    for given, found in (("[]", set()), ("[norm, mlp]", {"norm", "mlp"})):
        rows = rows_in(prints("plan", *words, f"offload.recompute={given}"))
        again = {row.site for row in rows if row.recompute}
        assert again <= found
        assert bool(again) == bool(found)
    assert "no kind 'nrm'; did you mean 'norm'" in refused(
        "plan", *words, "offload.recompute=[nrm]"
    )


def test_a_job_is_planned_for_its_gpu_whatever_that_takes_or_doesnt_fit(model, prints, capsys):
    def on(size):
        machine = f"machine.device_bytes={size}", "machine.both_gbps=2"
        return "plan", model, "--set", *machine

    quick = re.search(r"(\S+) MiB with the rows at (\S+) %", prints(*on("1GiB")))
    usual_mib, usual_percent = map(float, quick.groups())
    tight = on(f"{int(usual_mib) - 1}MiB")
    first, *_ = prints(*tight).splitlines()
    said = r"barely fits with the rows at (\S+) % of .*: (\S+) MiB reserved of .* without"
    percent, mib = map(float, re.fullmatch(said, first).groups())
    assert percent > max(3, usual_percent)
    assert mib <= int(usual_mib) - 1
    assert prints(*tight, "--memory-target", "1GiB").startswith(first), "what the GPU has counts"
    given = [*tight, "--most-slowdown-percent"]
    assert prints(*given, percent + 0.01).startswith(first)
    assert plan(*given[1:], 3) == 1
    first, helps, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("does not fit with the rows")
    flags = helps.removeprefix("to fit: leave out --most-slowdown-percent, or ").split(" or ")
    assert all(flag.startswith("--model.") for flag in flags)
    assert plan(*on("4MiB")[1:], "--memory-target", "1GiB") == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("does not fit 4.0 MiB (machine.device_bytes): pipeline rank")
    assert re.fullmatch(r"to fit: \S+ MiB are weights, .* no offload frees", second)


def test_a_config_of_transformers_is_no_description(tmp_path, refused):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    for words in ((path,), ("--from", path)):
        assert refused("plan", *words).endswith("of transformers: give it behind --hf\n")


def test_what_else_can_be_done_stands_beside_the_plan_and_in_json(model, prints, capsys):
    lines = prints("plan", model).splitlines()
    table = [line.strip("|").split("|")[1:] for line in lines if " yes | " in line]
    found = {row[0].strip(): [cell.strip() for cell in row[2:]] for row in table}
    said = json.loads(prints("plan", model, "--json"))
    others = {other.pop("what"): other for other in said["alternatives"]}
    assert found.keys() == others.keys()
    assert {"nothing", "offload everything", "recompute 1 of 2 layers, offload others"} < {*others}
    for what, (reserved, host, percent, _) in found.items():
        assert reserved == format_bytes(others[what]["reserved_bytes"])
        assert host == format_bytes(others[what]["node_host_bytes"])
        assert percent == f"{others[what]['takes_longer_percent']:+.1f} %"
    least = others["recompute all layers"]
    assert least["reserved_bytes"] < others["nothing"]["reserved_bytes"]
    assert least["takes_longer_percent"] > 20
    assert [len(said["rows"]) > 0, said["fits"], len(said["ranks"])] == [True, True, 2]
    words = ("--json", "--set", "machine.device_bytes=4MiB")
    assert plan(model, *words) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["fits"], said["alternatives"][0]["fits"]) == (False, False)
    assert said["target_bytes"] == 4 << 20 < said["reserved_bytes"]
    assert (len(said["misfits"]), len(said["ranks"])) == (1, 2)


def test_the_picture_and_its_page_are_drawn_whether_or_not_it_fits(
    model, tmp_path, prints, capsys, refused, monkeypatch
):
    for size, status, last in (("1GiB", 0, "the chosen rows"), ("4MiB", 1, "offload others")):
        for name in ("plan.svg", "plan.html"):
            words = ("--set", f"machine.device_bytes={size}", "--picture", tmp_path / name)
            assert plan(model, *words) == status
            first, *_ = capsys.readouterr().out.splitlines()
            drawn = (tmp_path / name).read_text()
            assert last in drawn
            assert first in html.unescape(drawn)
        assert ('id="plan"' in drawn) == (status == 0)
        assert 'id="fit"' in drawn
    prints("plan", model, "--output", tmp_path / "plans.json")
    prints("report", tmp_path / "plans.json", "--output", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")
    wrong = refused("plan", model, "--picture", tmp_path / "plan.jpg")
    assert "name a picture, .svg, .png or .pdf, or a page, .html" in wrong
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
    assert "plan.svg: disk full; " in refused("plan", model, "--picture", tmp_path / "plan.svg")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("model.layers=32", "machine.device_bytes=700MiB"), r"share them, by at least (.*) \(4 G"),
        (("model.sequence=8192", "machine.device_bytes=700MiB"), r"to fit: (--model.sequence \d+)"),
    ],
)
def test_what_is_advised_fits(keys, expected, model, prints, capsys):
    words = (model, "--set", *keys)
    assert plan(*words) == 1
    flags = re.search(expected, capsys.readouterr().out.splitlines()[1])[1]
    assert "fits" in prints("plan", *words, *flags.split(" or ")[0].split()).splitlines()[0]


def test_a_target_is_named_and_one_that_can_be_kept_is_advised(model, prints, capsys):
    printed = prints("plan", model, "--memory-target", "320MiB")
    assert "reserved of 320.0 MiB (--memory-target)" in printed
    fits = dict(re.findall(r"\| (\w[^|]*?) +\| +(yes|no) \|", printed))
    assert (fits["nothing"], fits["recompute all layers"]) == ("no", "yes")
    assert plan(model, "--memory-target", "60MiB") == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("does not fit 60.0 MiB (--memory-target): ")
    target = re.match(r"to fit: --memory-target (\d+)MiB", second)[1]
    assert plan(model, "--memory-target", f"{target}MiB") == 0


def test_a_reader_that_goes_changes_no_status(model):
    program = (
        f"{sys.executable} -m megatron_offload plan {model} | head -1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["/bin/bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fits")


def test_a_description_is_made_of_other_programs_files_to_be_edited(tmp_path, prints, refused):
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512}
    config |= {"intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--hf", tmp_path / "config.json", "--model.sequence", "1024")
    (tmp_path / "job.yaml").write_text(prints("plan", *words, "--print"))
    assert prints("simulate", *words, "--json") == prints(
        "simulate", tmp_path / "job.yaml", "--json"
    )
    assert (
        prints("plan", "--hf", tmp_path, *words[2:], "--print")
        == (tmp_path / "job.yaml").read_text()
    )
    assert load_model(tmp_path / "job.yaml").described.machine.gpu == "H100-80GB"
    as_json = json.loads(prints("plan", *words, "--print", "--json"))
    assert as_json == yaml.safe_load((tmp_path / "job.yaml").read_text())
    text = "--num-layers 2 --hidden-size 512 --num-attention-heads 4 --vocab-size 1000"
    said = prints("plan", "--megatron", f"{text} --seq-length 1024 --swiglu", "--print")
    assert yaml.safe_load(said)["model"].items() >= {"gated_mlp": True, "ffn": 1344}.items()
    assert "--megatron: --seq-length (--model.s" in refused("plan", "--megatron", text)
    (tmp_path / "job.sh").write_text(f"torchrun {text} --seq-length 64 --global-batch-size 6")
    said = prints("plan", "--megatron", tmp_path / "job.sh", "--model.data_parallel", 3, "--print")
    assert yaml.safe_load(said)["model"]["num_microbatches"] == 2
    assert "no script 'jobs.sh', and no argument" in refused("plan", "--megatron", "jobs.sh")
    assert "give one described job" in refused("plan", *words, "--megatron", text)
    assert "--megatron can't be read: ValueError" in refused("plan", "--megatron", "--a 'b")
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    assert "config.json: model_type 'lama' can't be" in refused("plan", *words)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": None}))
    assert "config.json: num_hidden_layers (--model.layers) is req" in refused("plan", *words)


def test_a_target_out_of_reach_is_status_1_and_says_by_how_much(model, tmp_path, capsys):
    output = tmp_path / "plan.json"
    output.write_text("old")
    assert plan(model, "--memory-target", "1MiB", "--output", output) == 1
    printed = capsys.readouterr().out
    found = re.search(
        r"can't be brought under 1.00 MiB: .* it still takes (\S+) MiB, (\S+) MiB more", printed
    )
    least_mib, missing_mib = map(float, found.groups())
    assert least_mib == pytest.approx(1 + missing_mib, abs=0.02)
    assert output.read_text() == "old"
    assert printed.endswith(f"plans: none, so that {output} is not written\n")


def test_bandwidths_come_from_the_doctor_s_file_and_keys_win(tmp_path, model):
    machine = load_model(model, machine=measured(tmp_path)).job.machine
    rates = RATES["d2h_gbps"], RATES["h2d_gbps"], RATES["both_h2d_gbps"]
    assert (machine.d2h_gbps, machine.h2d_gbps, machine.both_gbps) == rates
    assert (machine.node_gbps, machine.node_d2h_gbps) == (8 * 50.0, None)
    assert machine.gpus_per_node == 8
    words = ["model.tensor_parallel=4"]
    shared = load_model(model, machine=measured(tmp_path), set=words)
    assert (shared.job.ranks_per_node, shared.job.gpus_per_rank) == (2, 4)
    words = ["machine.both_gbps=8", "offload.prefetch_bytes=3MiB"]
    source = load_model(model, set=words)
    assert source.job.machine.both_gbps == 8.0
    assert source.job.machine.d2h_gbps == Machine().d2h_gbps
    assert source.described.offload.prefetch_bytes == 3 * 2**20


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "give one described job, NAME, a FILE"),
        (("MODEL", "--from", "EMPTY"), "beside a run's folder there are .*, not a job"),
        (("--from", "/nowhere"), "/nowhere doesn't exist: where rows are found"),
        (("--from", "EMPTY"), "holds no frontier.json"),
        (("/nowhere.yaml",), "can't read /nowhere.yaml"),
        (("MODEL", "--set", "model.layrs=3"), "did you mean 'layers'"),
        (
            ("MODEL", "--most-slowdown-percent", "1", "--memory-target", "1GiB"),
            "give either --memory-target",
        ),
        (("MODEL", "--memory-target", "much"), ": --memory-target: a size"),
        (("MODEL", "--memory-target", "22"), "22 is 22 bytes; write 22GiB or 22MiB"),
        (
            ("MODEL", "--model.recompute", "selective"),
            "'full', 'norm', 'mlp_act' or 'moe_act' ",
        ),
        (("MODEL", "--memory-target", "-5GiB"), "memory-target: a size is 0 or more bytes"),
        (("MODEL", "--memory-target", "0GiB"), "size of memory is above 0, such as"),
        (("MODEL", "--most-slowdown-percent", "-1"), ": --most-slowdown-percent: "),
        (("MODEL", "--machine", "UNMEASURED"), "GPUs; where there are some, run: "),
        (("MODEL", "--output", "/proc/version/plan.json"), "can't write /proc/version"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, model, refused, words, expected):
    (tmp_path / "empty").mkdir()
    (tmp_path / "unmeasured.json").write_text('{"format": 1, "findings": [], "profile": null}')
    places = {
        "MODEL": model,
        "EMPTY": tmp_path / "empty",
        "UNMEASURED": tmp_path / "unmeasured.json",
    }
    error = refused("plan", *(places.get(word, word) for word in words))
    assert re.search(expected, error)
    assert error.startswith("megatron-offload")

"""The pure parts of benchmarks/bench_peers.py: arguments, order, rows, R, table, and what fails.

And benchmarks/measure_layers.py on a CPU: what it writes is what predictions are held against.
"""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import os

import bench_peers
import bench_peers_options
import bench_peers_worker
from bench_peers_modes import MODES
from bench_peers_table import HEAD, STEADY, returned, rows, table
from processes import ROOT, run_python

from megatron_offload.backends import cuda
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import SimulatedConfig

GIB = 2**30


def parse(*arguments):
    return bench_peers.parse_arguments([*arguments, "--output", "out"])


def entry(rank, step_ms=100.0, allocated=30, reserved=32, held=0, **more):
    """Return what a rank has measured; sizes in GiB."""
    sizes = {"allocated": allocated * GIB, "reserved": reserved * GIB}
    return {
        "rank": rank,
        "step_ms": step_ms,
        "losses": [None, None] if rank == 0 else [(1.5).hex(), (1.25).hex()],
        "gradient_hashes": ["aa", "bb"],
        "held_bytes": held * GIB,
        "device": "a device",
        "versions": {"torch": "2"},
        **{f"{ever}peak_{x}_bytes": sizes[x] for x in sizes for ever in ("", "overall_")},
        **more,
    }


def record(mode, *ranks, repetition=0, status="ok", error=None):
    run = {"mode": mode, "repetition": repetition, "status": status, "error": error}
    return run | {"ranks": list(ranks)}


def report_of(runs):
    about = {"date": "today", "command": "this", "shape": "c", "sizes": {}}
    return about | {
        "deterministic": True,
        "runs": runs,
        "rows": rows(runs),
    }


def test_flags_replace_sizes():
    options = parse("--shape", "bitwise", "--vpp", "4", "--dtype", "fp32", "--min-elements", "7")
    assert [options.sizes[key] for key in ("vpp", "dtype", "min_elements")] == [4, "fp32", 7]
    assert bench_peers_options.SHAPES["bitwise"]["vpp"] == 2
    assert parse("--shape", "a", "--full-recompute").sizes["full_recompute"]
    without = parse("--shape", "a")
    assert (options.deterministic, without.deterministic) == (True, False)
    assert not without.sizes["full_recompute"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--shape", "c", "--modes", "nonsense"], "unknown mode 'nonsense'"),
        (["--shape", "c", "--modes", "megatron:fraction=1"], "takes no fraction=1"),
        (["--shape", "c", "--modes", "recompute-layers:x"], "takes no layers=x"),
        (["--shape", "c", "--modes", "recompute-layers:3"], "a stage has 2 layers"),
        (["--shape", "c", "--modes", "ours-all:fraction"], "key=value"),
        (["--shape", "c", "--modes", "none", "none"], "listed twice"),
        (["--shape", "c", "--layers", "17"], "don't divide"),
        (["--shape", "c", "--microbatches", "6"], "divisible by PP"),
        (["--shape", "a", "--vpp", "2"], "VPP above 1"),
        (["--shape", "moe8", "--ep", "3"], "multiples of EP"),
        (["--shape", "a", "--hidden", "1000", "--heads", "7"], "no multiple"),
        (["--shape", "a", "--steps", "0"], "--steps"),
        (["--shape", "a", "--modes", "checkpoint"], "no mode of a model of Megatron"),
        (["--shape", "lora", "--modes", "megatron"], "no mode of a model of transformers"),
        (["--shape", "lora", "--modes", "none", "--pp", "2"], "one GPU"),
        (["--shape", "a", "--length", "7"], "--length is for lora"),
        (["--shape", "lora", "--modes", "compile:2"], "takes no compile=2"),
    ],
)
def test_wrong_arguments_end_before_anything_starts(arguments, reason, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert reason in capsys.readouterr().err


def test_a_mode_carries_its_settings():
    read, by_modules = bench_peers_options.read_mode, "policy.kind=modules"
    spec = read("ours-all:max_inflight_bytes=1GiB,fraction=0.5")
    assert (spec["kind"], spec["modules"]) == ("ours-all", [*bench_peers_options.ALL])
    assert spec["options"][-2:] == ["max_inflight_bytes=1GiB", "fraction=0.5"]
    options = ["prefetch_bytes=3GiB|2GiB|1GiB", "fraction=0.5"]
    for rank, size in ((0, "3GiB"), (1, "2GiB"), (3, "1GiB")):
        found = bench_peers_options.options_of_rank(options, rank)
        assert found == [f"prefetch_bytes={size}", "fraction=0.5"]
    spec = read("ours-rows:{site: mlp, offload: 1}, {site: norm, recompute: true}")
    assert spec["options"] == ["rows=[{site: mlp, offload: 1}, {site: norm, recompute: true}]"]
    assert bench_peers_options.named_modules(spec) == {}
    mode = MODES["recompute-layers"](read("recompute-layers:3"))
    assert mode.transformer_options()["recompute_num_layers"] == 3
    assert read("ours-five")["modules"] == [*bench_peers_options.FIVE]
    assert read("ours-all")["modules"] == [*bench_peers_options.ALL]
    spec = read("ours-auto:policy.most_slowdown_percent=8")
    assert spec["options"] == ["policy.kind=auto", "policy.most_slowdown_percent=8"]
    spec = read("ours-recompute:recompute=norm+mlp_act")
    assert spec["options"] == [by_modules, "recompute=[norm, mlp_act]"]
    assert read("ours:recompute=")["options"] == [by_modules, "recompute=[]"]
    assert read("selective:core_attn,layernorm")["modules"] == ["core_attn", "layernorm"]
    spec = read("ours-auto:compile=0.5", model="llama")
    assert (spec["arguments"], spec["modules"]) == ({"compile": 0.5}, [])
    spec = read("ours-whole:max_fwd_stash_size=3,prefetch_bytes=1GiB")
    assert spec["arguments"] == {"max_fwd_stash_size": 3}
    assert spec["options"] == ["prefetch_bytes=1GiB"]
    spec = read("ours:modules=mlp_fc1+mlp_act,fraction=0.5")
    assert spec["modules"] == ["mlp_fc1", "mlp_act"]
    assert spec["options"] == [by_modules, "fraction=0.5"]


def test_wrong_settings_of_this_package_end_before_anything_starts():
    options = parse("--shape", "c", "--modes", "none", "ours-all:fracton=0.5")
    with pytest.raises(SystemExit, match="fraction"):
        bench_peers.check_settings(options)
    options = parse("--shape", "c", "--modes", "megatron:modules=core_attn+mlp_act")
    with pytest.raises(SystemExit, match="mlp_act"):
        bench_peers.check_settings(options)
    bench_peers.check_settings(parse("--shape", "c", "--modes", "ours-all:fraction=0.5"))


def test_environment_of_the_modes(monkeypatch):
    for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    options = parse("--shape", "bitwise", "--modes", "none", "megatron")
    none, megatron = (bench_peers.worker_environment(options, spec) for spec in options.specs)
    assert (none["NVTE_CPU_OFFLOAD_V1"], megatron["NVTE_CPU_OFFLOAD_V1"]) == ("0", "1")
    names = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_NVLS_ENABLE", "WORLD_SIZE")
    assert [none[name] for name in names] == ["0", "0", "4"]
    assert none["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    options = parse("--shape", "c", "--modes", "none")
    timed = bench_peers.worker_environment(options, options.specs[0])
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO" not in timed


def test_r_is_the_drop_of_the_peak_over_what_the_host_holds():
    assert (returned(30, 26, 4), returned(30, 31, 4)) == (1.0, -0.25)
    for unknown in ((None, 26, 4), (30, None, 4), (30, 26, 0), (30, 26, None)):
        assert returned(*unknown) is None


def test_rows_compare_with_none_of_the_same_repetition():
    runs = [
        record("none", entry(0, 100.0), entry(1, 90.0)),
        record("ours-five", entry(0, 105.0, 28, 31, 2), entry(1, 110.0)),
        record("ours-five", entry(0, 240.0, 27, 30, 2), entry(1), repetition=1),
        record("none", entry(0, 200.0), entry(1, 190.0), repetition=1),
        record("te", entry(0), entry(1, gradient_hashes=["xx", "bb"])),
    ]
    none0, _, ours0, ours1, *others = rows(runs)
    assert (none0["ratio"], none0["r_allocated"]) == (1.0, None)
    assert ours0["ratio"] == pytest.approx((1.1 + 1.2) / 2)
    assert ours0["step_ms"] == pytest.approx((110 + 240) / 2)
    assert ours0["peak_allocated_bytes"] == 28 * GIB
    assert (ours0["r_allocated"], ours0["r_reserved"]) == (1.0, 0.5)
    assert ours0["loss"] == ours1["loss"] == (1.25).hex()
    assert (ours1["rank"], ours0["bitwise"]) == (1, True)
    assert [row["bitwise"] for row in others] == [True, False], "one step differs"


LINK = {"link_gbps": {"d2h": 50.0, "h2d": 60.0, "both_d2h": 40.0, "both_h2d": 30.0}}


def test_the_table_shows_every_column_the_link_where_it_was_measured_and_failures():
    examined = {**LINK, "gbps": {"d2h": 45.0, "h2d": None}, "stall_us": {"W2": 1500.0}}
    counters = dict.fromkeys(STEADY[:-3], 3)
    runs = [
        record("none", entry(0, **LINK)),
        record("ours-five", entry(0, 101.0, held=1, **counters, **examined)),
        record("trl", status="failed", error="rank 0: not installed"),
        record("te", status="timed out", error="after 120 s"),
    ]
    assert [row["mode"] for row in rows(runs)] == ["none", "ours-five", "trl", "te"]
    lines = [" ".join(line.split()) for line in table(report_of(runs)).splitlines()]
    head = next(line for line in lines if line.startswith("mode"))
    assert all(name in head for name in HEAD)
    ours = next(line for line in lines if line.startswith("ours-five"))
    assert "+1.00%" in ours
    assert " yes " in ours
    assert "none 0 50.00 60.00 40.00 30.00 - - -" in lines
    assert "ours-five 0 50.00 60.00 40.00 30.00 45.00 - W2 1.5" in lines
    assert lines[-2:] == ["trl: failed: rank 0: not installed", "te: timed out: after 120 s"]
    assert "GB/s" not in table(report_of([record("none", entry(0))]))


def test_files_are_complete_after_every_mode(tmp_path):
    bench_peers.save(report_of([record("none", entry(0))]), tmp_path)
    assert json.loads((tmp_path / "bench_peers.json").read_text())["rows"][0]["mode"] == "none"
    assert {path.name for path in tmp_path.iterdir()} == {"bench_peers.json", "bench_peers.txt"}


def test_the_traces_of_a_mode_take_the_place_of_older_ones(tmp_path):
    folder = tmp_path / "traces" / "0_ours.0"
    folder.mkdir(parents=True)
    (folder / "trace_7.json").write_text("of more ranks")
    new = tmp_path / "trace_0.json"
    new.write_text("new")
    bench_peers.keep([new], folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"trace_0.json": "new"}


CRASH = "import os, sys, time\nif os.environ['RANK'] == '0': time.sleep(60)\nsys.exit('boom')"


@pytest.mark.parametrize(
    ("script", "limit", "found"),
    [
        (CRASH, "60", ("failed", "rank 1: boom")),
        ("import time; time.sleep(60)", "0.5", ("timed out", "after 0.5 s")),
    ],
)
def test_a_crash_or_a_hang_is_a_record(tmp_path, monkeypatch, script, limit, found):
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    monkeypatch.setattr(bench_peers, "WORKERS", {None: worker})
    monkeypatch.setattr(bench_peers, "GRACE_S", 0.2)
    options = parse(*["--shape", "tiny", "--device", "cpu", "--modes", "none", "--timeout"], limit)
    options.output = tmp_path / "out"
    (run,) = bench_peers.ModeRun(options, [(options.specs[0], 0)]).finish()
    assert (run["status"], run["error"]) == found
    assert run["seconds"] < 30


def test_a_mode_waits_until_it_is_let_go(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    words = "import pathlib; pathlib.Path(__file__).with_suffix('.{}').touch()"
    worker.write_text("\n".join((words.format("here"), "assert input()", words.format("gone"))))
    ranks = bench_peers.Ranks([sys.executable, str(worker)], {}, [tmp_path / "0.log"])
    while not worker.with_suffix(".here").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    assert not worker.with_suffix(".gone").exists()
    assert ranks.run(20) == ("ok", None)
    assert worker.with_suffix(".gone").exists()


def test_the_end_of_a_process_that_is_done_is_not_waited_for(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    ranks = bench_peers.Ranks(command, {}, [tmp_path / "0.log"])
    assert ranks.run(50, is_done=lambda: True) == ("ok", None)
    (process,) = ranks._processes
    assert process.poll() is None
    process.kill()
    process.wait()


def test_other_modes_steps_of_warm_up_do_not_count_as_held():
    mode = MODES["trl"]({})
    mode.count(100)
    mode.begin_measured()
    mode.count(70)
    assert mode.held_bytes == 70

    mode = MODES["save_on_cpu"]({"device": "cpu"})

    def step(num_values):
        x = torch.ones(num_values, requires_grad=True)
        with mode.forward_context():
            y = x.exp().sum()
        y.backward()
        mode.end_step()

    step(100)
    mode.begin_measured()
    step(70)
    assert (mode.held_bytes, mode.now_bytes) == (70 * 4, 0)


def test_the_whole_model_s_settings_reach_it():
    text = "ours-whole:max_fwd_stash_size=3,prefetch_bytes=2GiB|1GiB"
    mode = MODES["ours-whole"]({**bench_peers_options.read_mode(text), "rank": 1})
    mode.prepare()
    mode.attach([torch.nn.Linear(2, 2)], 1)
    assert mode.context.max_fwd_stash_size == 3
    assert mode.manager.config.prefetch_bytes == 2**30


def test_the_link_is_measured_each_way_alone_and_both_ways_at_once(monkeypatch):
    device = SimulatedConfig(d2h_gbps=20, h2d_gbps=10, check_hazards=False)
    monkeypatch.setattr(cuda, "CudaBackend", lambda: SimulatedBackend(device))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(bench_peers_worker, "BLOCK_BYTES", 4096)
    found = bench_peers_worker.measure_link()
    # The simulated link is as quick both ways at once as alone.
    expected = {"d2h": 20, "h2d": 10, "both_d2h": 20, "both_h2d": 10}
    assert found == pytest.approx(expected)


SCRIPT = ROOT / "benchmarks" / "measure_layers.py"
# Of a torchrun around the tests the script must see nothing.
OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.slow
def test_steps_of_every_shape_are_timed_and_what_comes_too_late_is_said(tmp_path):
    pytest.importorskip("megatron.core")
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    command = (SCRIPT, "--device", "cpu", "--warmup", "1", "--steps", "2")
    for limit, output in (("600", tmp_path / "a.json"), ("0", tmp_path / "b.json")):
        words = ("--shapes", "gated", "2048", "--limit", limit, "--output", output)
        done = run_python(*command, *words, env=environment)
        assert done.returncode == 0, done.stderr
    shapes = json.loads((tmp_path / "a.json").read_text())["shapes"]
    assert list(shapes) == ["gated", "2048"]
    for shape in shapes.values():
        assert len(shape["steps_ms"]) == 3
        assert 0 < shape["host_ms"] <= shape["step_ms"]
    late = json.loads((tmp_path / "b.json").read_text())["shapes"]
    assert [shape["error"] for shape in late.values()] == ["no time left"] * 2


@pytest.mark.parametrize("length", [("--length", "24"), ()])
def test_lora_s_modes_give_the_bits_of_no_offload_on_a_cpu(tmp_path, length):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    modes = ["none", "ours-rows:{site: mlp, offload: 1}"]
    if length:
        modes += ["checkpoint", "selective", "recompute-layers:1"]
        modes += ["ours-target:policy.memory_target=1GiB"]
    script = ROOT / "benchmarks" / "bench_peers.py"
    words = ["--shape", "lora-tiny", "--device", "cpu", "--deterministic", "--steps", "2", *length]
    words += ["--rounds", "2", "--output", tmp_path, "--modes", *modes]
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    done = run_python(script, *words, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "bench_peers.json").read_text())
    assert [run["status"] for run in report["runs"]] == ["ok"] * 2 * len(modes)
    assert all(row["bitwise"] for row in report["rows"])
    assert report["rows"][1]["d2h_bytes"] > 0
    assert ("step by step: all 6 " in done.stdout) == (not length)


def test_what_has_no_time_left_and_what_fails_are_rows_and_the_rest_runs(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(SHARED)
    monkeypatch.setattr(bench_peers, "WORKERS", {"llama": worker})
    monkeypatch.setattr(bench_peers, "GRACE_S", 0.2)
    modes = ["none", "checkpoint", "compile"]
    words = ["--shape", "lora-tiny", "--length", "8", "--device", "cpu", "--rounds", "2", "--modes"]
    options = parse(*words, *modes)
    options.output = tmp_path / "out"
    (todo,) = bench_peers.in_turns(options)
    found = [(run["mode"], run["status"]) for run in bench_peers.ModeRun(options, todo).finish()]
    failed = ("checkpoint", "failed")
    assert found == [("none", "ok"), failed, ("compile", "ok"), ("none", "ok"), ("compile", "ok")]
    assert not list(bench_peers.ModeRun(options, todo, ends_at=0.0).finish())


SHARED = """
import json, pathlib, sys
spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
for mode in spec["modes"]:
    input()
    assert mode["kind"] != "checkpoint"
    folder = pathlib.Path(spec["results"])
    (folder / "rank0.json").write_text("{}")
    (folder / "done0").touch()
"""


def test_a_picture_has_each_mode_s_memory_and_a_line_through_targets(tmp_path):
    draw = pytest.importorskip("draw_memory_against_time")
    runs = [record("none", entry(0)), record("checkpoint", entry(0, 130.0, 14, 16))]
    for size in (18, 22):
        runs.append(record(f"ours-target:policy.memory_target={size}GiB", entry(0, 110.0, size)))
    sizes = bench_peers_options.SHAPES["lora"] | {"length": 1900}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report_of(runs) | {"sizes": sizes}))
    svg = tmp_path / "picture.svg"
    draw.picture([path]).save(svg)
    text = svg.read_text()
    names = "no offload", "checkpointing", "18GiB", "22GiB", "reserved (GiB)", "x 1900 tokens"
    assert not [name for name in names if name not in text]
    assert len(draw.points_of(json.loads(path.read_text()))) == 4

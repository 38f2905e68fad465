"""The map of a model: which sites save what, how that grows and who shares it; what may rerun."""

from __future__ import annotations

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from layered_job import GradientCheckpointingLayer, LayeredJob, LayeredNet
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from megatron_offload import map_model
from megatron_offload.cli.main import main
from megatron_offload.errors import ConfigError
from megatron_offload.model_map import mapping
from megatron_offload.model_map.mapping import Growth, ModelMap

ROWS, WIDTH = 6, 8
SIZE = ROWS * WIDTH * 4


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.SiLU()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn = nn.Identity()
        self.table = nn.Buffer(torch.ones(WIDTH)) if index else None

    is_checkpointed = False

    def __call__(self, *given):
        if self.is_checkpointed:
            return checkpoint(super().__call__, *given, use_reentrant=False)
        return super().__call__(*given)

    def forward(self, x, cache=None):
        y = self.norm(x)
        return x + self.act(self.one(y)) * self.other(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(3)))
        self.head, self.caches = nn.Linear(WIDTH, 1), {}

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x, self.caches.get(number))
        return self.head(x)


def test_a_map_counts_memory_once_and_names_all_who_save_it():
    net = Net()
    seen = map_model(net, torch.randn(ROWS, WIDTH, requires_grad=True))
    sites = {site.site: site for site in seen.sites}
    statistics = 2 * ROWS * 4
    found = {name: (site.num_tensors, site.num_bytes) for name, site in sites.items()}
    assert found == {
        "norm": (3, SIZE + statistics),
        "one": (1, SIZE),
        "other": (0, 0),
        "act": (1, SIZE),
        "layer": (2, 2 * SIZE),
        "head": (1, SIZE),
    }
    assert sites["one"].others == ("other",)
    assert sites["norm"].others == sites["act"].others == ()
    assert sites["act"].layers == (0, 1, 2)
    assert sites["head"].layers == ()
    assert seen.num_bytes == 3 * (5 * SIZE + statistics) + SIZE
    line = next(line for line in str(seen).splitlines() if " one " in line)
    assert line.split() == ["0-2", "one", "Linear", f"{SIZE}", "B", "1", "row", "other"]
    assert all(not module._forward_hooks for module in net.modules())


def test_a_map_counts_the_bytes_that_a_tensor_has_in_memory():
    def saved(forward, rows):
        net = nn.Identity()
        net.forward = forward
        (site,) = map_model(net, torch.randn(rows, WIDTH, requires_grad=True)).sites
        return site.num_tensors, site.num_bytes

    index = torch.zeros(ROWS, 1, dtype=torch.int64)
    assert saved(lambda x: x.gather(0, (index + 0).expand(-1, WIDTH)), ROWS) == (2, SIZE + ROWS * 8)
    parts = saved(lambda x: sum(part.sin() for part in x.clone().unbind()[1:]), ROWS)
    assert parts == (1, SIZE - WIDTH * 4)


def test_a_model_whose_weights_have_no_shape_yet_is_mapped():
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.SiLU())
    assert map_model(model, torch.randn(ROWS, WIDTH)).num_bytes == 2 * SIZE


def test_a_map_of_a_forward_that_saves_nothing_is_refused():
    net = Net()
    with torch.no_grad(), pytest.raises(ConfigError, match="saved nothing: is grad on"):
        map_model(net, torch.randn(ROWS, WIDTH))
    with pytest.raises(RuntimeError):
        map_model(net, torch.randn(ROWS, WIDTH + 1))
    with pytest.raises(ConfigError, match="given as a list"):
        map_model([net])
    assert all(not module._forward_hooks for module in net.modules())


class Attention(nn.Module):
    """Saves its scores, and a table of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        table = torch.ones(100, requires_grad=True).exp()
        return self.norm((x @ x.mT).softmax(-1) @ x) + table.square().sum()


def test_memory_grows_by_tokens_where_that_is_a_line_and_else_is_said_not_to():
    net = nn.Sequential(nn.Sequential(Attention(), Attention()), nn.Linear(WIDTH, 1))
    rows = 12, 6, 3
    first, *others = (map_model(net, torch.randn(2, n, WIDTH, requires_grad=True)) for n in rows)
    assert [one.tokens for one in (first, *others)] == [2 * n for n in rows]
    assert first.growth is first.sites[0].growth is None
    assert "per token" not in str(first)
    seen = first.fit(*others)
    growths = {site.site: site.growth for site in seen.sites}
    assert growths["norm"] == (WIDTH * 4 + 2 * 4, 0)
    assert growths["1"] == (WIDTH * 4, 0)
    assert math.isnan(growths["layer"].bytes_per_token)
    assert str(growths["layer"]) == "not linear"
    assert math.isnan(seen.growth.bytes_per_token)
    assert " 40 B " in next(x for x in str(seen).splitlines() if " norm " in x)
    assert str(seen).endswith("per token not linear")
    unlike = first.fit(*(ModelMap({}, tokens) for tokens in (6.0, 12.0)))
    assert math.isnan(unlike.sites[-1].growth.bytes_per_token), "nothing of it was saved there"
    with pytest.raises(ConfigError, match="maps of three lengths"):
        first.fit(others[0], others[0])


def test_what_does_not_grow_is_apart_from_what_does():
    net = Net()
    net.head = nn.Linear(WIDTH, WIDTH)
    table = torch.ones(100, requires_grad=True).exp()
    net.head.register_forward_hook(lambda *given: given[-1] + table.square().sum())
    maps = [map_model(net, torch.randn(n, WIDTH, requires_grad=True)) for n in (64, 32, 16)]
    seen = maps[0].fit(*maps[1:])
    assert seen.growth.fixed_bytes == 400
    assert seen.growth.bytes_per_token * 64 + 400 == seen.num_bytes
    assert str(Growth(1024.0, 400)) == "1.0 KiB + 400 B"
    assert str(Growth(1024.0, -400)) == "1.0 KiB - 400 B"
    assert str(Growth(1024.0, 40)) == "1.0 KiB", "a twentieth is shown of no number"


def test_forwards_are_timed_on_a_device_that_has_a_clock(monkeypatch):
    job = LayeredJob(num_layers=2)
    batch = torch.ones(3, 32)
    assert all(site.us == 0 for site in map_model(job.net, batch).sites)
    monkeypatch.setattr(mapping, "current_device", lambda _: 0)
    monkeypatch.setattr(mapping, "create_backend", lambda _: job.backend)
    slow = SimpleNamespace(backend=job.backend, us_per_row=20 * job.us_per_row, note=job.note)
    job.net.layers[1].mlp.job = (slow,)
    seen = map_model(job.net, batch)
    assert {site.site: site.us for site in seen.sites if site.us} == {"mlp": 315.0, "layer": 315.0}
    assert "  315.0 µs  " in str(seen)
    first = job.net.layers[0]
    first._compiled_call_impl = first._call_impl  # hooks would be in its graph
    seen = map_model(job.net, batch)
    assert [site.us for site in seen.sites if site.site == "layer"] == [0, 600]
    first._compiled_call_impl = None
    with FakeTensorMode():
        fake = LayeredNet(job, GradientCheckpointingLayer, 2)
        assert "forward" not in str(map_model(fake, torch.ones(3, 32)))
    monkeypatch.setattr(job.backend, "owns", lambda x: x.dim() < 2)
    assert "forward" not in str(map_model(job.net, batch)), "some of it is on another device"


def test_what_may_run_again_is_said_with_the_reason():
    net = Net()
    net.layers.extend(map(Layer, range(3)))
    net.layers[0]._compiled_call_impl = net.layers[0]._call_impl  # as of module.compile()
    net.layers[1].act.register_forward_hook(lambda *_: None)
    net.layers[2].forward = net.layers[2].forward
    net.caches[3] = set()
    net.layers[4].is_checkpointed = True
    seen = map_model(net, torch.randn(ROWS, WIDTH, requires_grad=True))
    layers = [site for site in seen.sites if site.site == "layer"]
    assert [site.recompute for site in layers] == [*["none"] * 5, "row"]
    assert [site.refusal for site in layers] == [
        "it is compiled",
        "a part of it has hooks",
        "its forward was replaced",
        "it is given a set, which may change (use_cache=False?)",
        "it runs without grad, or in a checkpoint",
        "no library lets class Layer run again",
    ]
    lines = str(seen).splitlines()
    assert [x.split()[:2] for x in lines if "none (2)" in x] == [["1", "layer"]]
    assert "(2) a part of it has hooks" in lines


def test_the_command_maps_a_config_far_too_large_for_this_machine(tmp_path, refused, prints):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    large = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    large |= {"num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 128256}
    path.write_text(json.dumps({"model_type": "llama", **large}))
    lines = prints("map", tmp_path, "--batch", "1", "--length", "8192").splitlines()
    assert max(map(len, lines)) <= 130
    cells = {line.split()[1]: re.split("  +", line) for line in lines}
    names = [line.split()[1] for line in lines]
    assert names[names.index("self_attn") + 1] == "self_attn", "of layer 0 and of the others"
    assert len(cells["lm_head"]) == 6, "no row names it"
    per_token = [f"{53248 * 2 / 1024:.1f} KiB", "1", "row"]
    assert cells["mlp.act_fn"] == ["0-15", "mlp.act_fn", "SiLUActivation", "832.0 MiB", *per_token]
    assert [cells[name][6] for name in ("layer", "self_attn", "mlp")] == ["search"] * 3
    # Queries, output, keys and values of 8 heads of 128, and a sum for each head; no mask.
    kib = (2 * 16384 * 2 + 2 * 8 * 128 * 2 + 128 * 4) / 1024
    assert cells["self_attn"][4:] == [f"{kib} KiB", "5", "search", "other layers, .o_proj"]
    path.write_text('{"model_type": "lama"}')
    assert "did you mean 'llama'" in refused("map", path)


def test_the_command_says_in_a_line_what_it_cannot_map(tmp_path, refused, caplog):
    pytest.importorskip("transformers")
    texts = {
        '{"model_type": "t5"}': "takes any model",
        '{"model_type": "bert"}': "it has 512 positions, and not 4096",
        '{"model_type": "llama", "hidden_size": "x"}': "expected int, got str (value: 'x')",
        "{}": "says no model_type",
    }
    for text, said in texts.items():
        (path := tmp_path / "config.json").write_text(text)
        assert said in (error := refused("map", path, "--length", 4096))
        assert len(error) < 500
    assert not caplog.records


def test_the_command_says_where_memory_grows_by_more_than_tokens(tmp_path, prints):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    eager = {"attn_implementation": "eager", "n_layer": 2}
    path.write_text(json.dumps({"model_type": "gpt2", **eager}))
    lines = [line.split() for line in prints("map", path, "--length", "128").splitlines()]
    assert [line[1] for line in lines if "linear" in line[:-2]] == ["attn"]
    assert "per token" not in prints("map", path, "--length", "3")


def test_the_command_says_what_is_missing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["map", str(path)]) == 1
    assert "run: pip install transformers" in capsys.readouterr().err

"""The map of a model says which sites save what, and who shares it."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from megatron_offload import map_model
from megatron_offload.cli.main import main
from megatron_offload.errors import ConfigError

ROWS, WIDTH = 6, 8
SIZE = ROWS * WIDTH * 4


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.SiLU()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Buffer(torch.ones(WIDTH)) if index else None

    def forward(self, x):
        y = self.norm(x)
        return x + self.act(self.one(y)) * self.other(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(3)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
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
    assert line.split() == ["0-2", "one", "Linear", f"{SIZE}", "B", "1", "other"]
    assert all(not module._forward_hooks for module in net.modules())


class Picks(nn.Module):
    def forward(self, x):
        index = torch.zeros(ROWS, 1, dtype=torch.int64, device=x.device).expand(-1, WIDTH)
        return x.gather(0, index)


def test_a_map_counts_the_bytes_that_a_tensor_has_in_memory():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (site,) = map_model(Picks(), x).sites
    assert (site.num_tensors, site.num_bytes) == (2, SIZE + ROWS * 8)
    whole = torch.randn(4, SIZE, requires_grad=True)
    (site,) = map_model(Parts(), whole).sites
    assert (site.num_tensors, site.num_bytes) == (1, 3 * SIZE * 4)


class Parts(nn.Module):
    def forward(self, x):
        y = x.clone()
        return y[1].sin() + y[3].cos() + y[2].sin()


def test_a_map_of_a_forward_that_saves_nothing_is_refused():
    net = Net()
    with torch.no_grad(), pytest.raises(ConfigError, match="saved nothing: is grad on"):
        map_model(net, torch.randn(ROWS, WIDTH))
    with pytest.raises(RuntimeError):
        map_model(net, torch.randn(ROWS, WIDTH + 1))
    assert all(not module._forward_hooks for module in net.modules())


def test_the_command_maps_a_config_that_is_far_too_large_for_this_machine(tmp_path, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    large = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    large |= {"num_key_value_heads": 8, "num_hidden_layers": 126, "vocab_size": 128256}
    path.write_text(json.dumps({"model_type": "llama", **large}))
    assert main(["map", str(path), "--batch", "1", "--length", "8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    act = next(line.split() for line in lines if " mlp.act_fn " in line)
    assert act == ["0-125", "mlp.act_fn", "SiLUActivation", "832.0", "MiB", "1"]  # 8192 x 53248 x 2
    path.write_text('{"model_type": "lama"}')
    assert main(["map", str(path)]) == 2
    assert "did you mean 'llama'" in capsys.readouterr().err


def test_the_command_says_what_is_missing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["map", str(path)]) == 1
    assert "transformers is needed" in capsys.readouterr().err

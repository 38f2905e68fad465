"""What the pages of trainers over megatron-core tell a user to write moves what they say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from documents import ROOT, blocks
from processes import found_by, path_to, run_python

PROGRAM = Path(__file__).parent / "plugged_in_program.py"
MODULES = ["attn_proj", "core_attn", "mlp_fc1"]
PLUG_IN = "import megatron_offload.auto"
SMALL = "max_inflight_bytes=0 prefetch_bytes=0"  # as is right for two layers of 32


def block_of(page, beginning):
    (block,) = [b for b in blocks() if b.page == f"docs/{page}.md" and beginning in b.text]
    return block


def words_of(page, beginning):
    (command,) = block_of(page, beginning).commands()
    return shlex.split(command)


def of_bridge():
    lines = block_of("megatron_bridge", "cfg.model").text.splitlines()
    model = SimpleNamespace()
    text = "\n".join(line for line in lines if line.startswith("cfg."))
    exec(text, {"cfg": SimpleNamespace(model=model)})  # noqa: S102 - our own page
    (imported,) = [line for line in lines if line.startswith("import ")]
    return imported, vars(model)


def of_bridges_command():
    words = words_of("megatron_bridge", "torchrun")
    pairs = (word.removeprefix("model.").split("=", 1) for word in words if "model." in word)
    assert "megatron_offload.run" in words
    return PLUG_IN, {key: yaml.safe_load(value) for key, value in pairs}


def of_verl():
    first, *words = words_of("verl", "VERL_USE_EXTERNAL_MODULES")
    begin = "+actor_rollout_ref.actor.megatron.override_transformer_config."
    pairs = (word.removeprefix(begin).split("=", 1) for word in words if word.startswith(begin))
    settings = {key: yaml.safe_load(value) for key, value in pairs}
    return f"import {first.partition('=')[2]}", settings


def of_ms_swift():
    words = words_of("ms_swift", "megatron sft")
    settings = json.loads(words[words.index("--megatron_extra_kwargs") + 1])
    file = words[words.index("--external_plugins") + 1]
    text = (ROOT / "docs" / "ms_swift.md").read_text()
    (line,) = re.findall(rf"`{file}` is one line, `(.*?)`", text)
    return line, settings


def of_nemo_rl():
    text = block_of("nemo_rl", "megatron_cfg").text
    settings = yaml.safe_load(text)["policy"]["megatron_cfg"]
    assert settings.pop("env_vars") == {"NVTE_CPU_OFFLOAD_V1": "1"}
    return PLUG_IN, settings


READ = {
    "Megatron-Bridge": of_bridge,
    "Megatron-Bridge's command": of_bridges_command,
    "verl": of_verl,
    "ms-swift": of_ms_swift,
    "NeMo-RL": of_nemo_rl,
}


@pytest.mark.parametrize("trainer", READ)
def test_a_page_s_lines_are_read(trainer):
    imported, settings = READ[trainer]()
    assert imported == PLUG_IN
    assert settings.pop("fine_grained_activation_offloading") is True
    assert {name: sorted(names) for name, names in settings.items()} == {"offload_modules": MODULES}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.16", "later"])
def test_these_lines_move_what_they_name_and_are_bitwise_identical(version):
    settings = {"MEGATRON_OFFLOAD_SET": f"policy.kind=modules {SMALL}"}
    found = found_by(run_python(PROGRAM, *MODULES, path=path_to(version), **settings))
    assert found["version"].startswith("0.16") == (version == "0.16")
    for one in found["jobs"]:
        assert one["equal"]
        assert one["moved"] == MODULES
        assert not any(one["left"].values())
        (line,) = [x for x in one["said"].splitlines() if x.startswith("megatron-offload: ")]
        assert "a step of rank 0 offloads " in line
        assert all(name in one["said"] for name in one["moved"])

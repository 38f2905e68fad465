"""What a user gets who installs the wheel: names, version, licence, types, configurations."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ROOT, run_python

import megatron_offload
from megatron_offload.cli import main as cli
from megatron_offload.cli.train import read_config
from megatron_offload.config import find_config, load_yaml
from megatron_offload.errors import did_you_mean
from megatron_offload.files.strict_model import validate
from megatron_offload.planning.description import load_description
from megatron_offload.train.config import TrainConfig

RUN_CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yaml"))

WITHOUT_MEGATRON = """
import sys
sys.modules.update(dict.fromkeys(("megatron", "transformer_engine")))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What a wheel holds that is built from the source distribution, as a release is."""
    pytest.importorskip("hatchling", reason="the extra 'dev' brings it")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*command, "sdist"], check=True, cwd=ROOT, capture_output=True)
    (path,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(path, folder, filter="data")
    source = folder / path.name.removesuffix(".tar.gz")
    subprocess.run([*command, "wheel"], check=True, cwd=source, capture_output=True)
    (path,) = folder.glob("*.whl")
    shutil.unpack_archive(path, folder / "installed", "zip")
    return folder / "installed"


def test_wheel_and_source_hold_what_a_user_has_of_them_and_ask_for_no_more(wheel):
    (folder,) = wheel.glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert metadata["Version"] == megatron_offload.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (folder / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (wheel / "megatron_offload" / "py.typed").is_file()
    for path in (ROOT / "configs").rglob("*.yaml"):
        inside = wheel / "megatron_offload" / path.relative_to(ROOT)
        assert inside.read_text() == path.read_text()
    assert {path.name for path in wheel.iterdir()} == {"megatron_offload", folder.name}
    # The source has examples, pages, and what the image copies.
    (source,) = (path for path in wheel.parent.glob("megatron_offload-*") if path.is_dir())
    copied = re.findall(r"^COPY (.*) \S+$", (source / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert {"examples", "megatron_offload"} <= {*names}
    names += [x.relative_to(ROOT) for x in [*ROOT.glob("examples/*.*"), *ROOT.glob("docs/**/*.md")]]
    assert [name for name in names if not (source / name).exists()] == []
    # A plain PyTorch user installs no Megatron.
    needed = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    # Offload that finds by its own steps what moves simulates them, by simpy.
    known = "torch numpy pydantic pydantic-settings pyyaml rich simpy"
    assert names <= {*known.split()}


def test_an_installed_package_finds_its_configurations_from_any_folder(wheel, tmp_path):
    program = "from megatron_offload.config import find_config as f; print(f('quickstart'))"
    result = run_python("-c", program, path=[wheel], cwd=tmp_path)
    assert result.stdout.strip() == str(wheel / "megatron_offload/configs/quickstart.yaml")


@pytest.mark.slow
def test_the_quickstart_runs_from_an_installed_wheel_in_an_empty_folder(wheel, tmp_path):
    words = ["compare", "--config", "quickstart", "--set", "run.steps=6"]
    result = run_python("-m", "megatron_offload", *words, path=[wheel], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "bitwise identical: yes" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_version_that_is_cited_is_this_one():
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {megatron_offload.__version__}\n" in cited
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert newest.startswith(f"{megatron_offload.__version__} (")


@pytest.mark.parametrize("name", RUN_CONFIGS)
def test_a_configuration_is_found_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = find_config(name)
    assert path.samefile(ROOT / "configs" / f"{name}.yaml")
    config = validate(TrainConfig, load_yaml(path), name)
    assert read_config(cli.read_command(["train", "--config", name])[1]) == config


@pytest.mark.parametrize("name", MODELS)
def test_a_described_job_is_found_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = find_config(name, kind="models")
    assert path.samefile(ROOT / "configs" / "models" / f"{name}.yaml")
    described = load_description(path)
    assert described.job().schedule.num_ranks == described.model.pipeline_parallel


def test_a_file_of_ones_own_wins_over_a_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert find_config("quickstart").is_file()
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("run: {steps: 1}\n")
    assert find_config("quickstart") == Path("quickstart")
    assert find_config("here/quickstart") == Path("here/quickstart")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["train", "--config", "quickstrat"], RUN_CONFIGS),
        (["simulate", "lama3"], MODELS),
        (["plan", "lama3"], MODELS),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_exist(words, names, refused):
    error = refused(*words)
    assert "no configuration of that name" in error
    assert all(name in error for name in names)


def test_the_package_runs_as_a_module(tmp_path):
    result = run_python("-m", "megatron_offload", "--version", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"megatron-offload {megatron_offload.__version__}\n"


def test_training_says_in_one_line_what_to_install_where_megatron_is_missing(tmp_path):
    program = (
        f"{WITHOUT_MEGATRON}from megatron_offload.cli.main import main\n"
        "sys.exit(main(['train', '--config', 'quickstart']))\n"
    )
    result = run_python("-c", program, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "training needs megatron-core; run: pip install megatron-core" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_module_but_the_trainers_own_imports_quietly_without_megatron():
    program = f"""{WITHOUT_MEGATRON}
import importlib, pkgutil, warnings
import megatron_offload
print(megatron_offload.PipelineOffloadManager.get_instance().backend.name)
warnings.simplefilter("ignore")
warnings.simplefilter("error", ImportWarning)
for found in pkgutil.walk_packages(megatron_offload.__path__, "megatron_offload."):
    by_hand = ("megatron_offload.auto", "megatron_offload.integrations.lightning")
    if not found.name.startswith("megatron_offload.train.") and not found.name.endswith("__"):
        found.name in by_hand or importlib.import_module(found.name)
import megatron_offload.cli.main, megatron_offload.train.launch, megatron_offload.train.config
"""
    result = run_python("-W", "error", "-c", program)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() in ("simulated", "cuda")


# Names that were meant are found, however many there are.


def test_the_nearest_name_is_found_among_few_and_among_many_and_long_ones_take_no_longer():
    few = [f"name_{index:03}" for index in range(400)] + ["zebra"]
    assert did_you_mean("zebro", few) == "; did you mean 'zebra'?"
    assert did_you_mean("name_399_", few) == "; did you mean 'name_399'?"
    many = [f"decoder.layers.{index}.mlp" for index in range(20_000)]
    assert (
        did_you_mean("decoder.layers.777.mlpp", many) == "; did you mean 'decoder.layers.777.mlp'?"
    )
    names = [f"{index:05}" + "ab" * 90 for index in range(5_000)]
    start = time.process_time()
    text = did_you_mean("zz" * 95, names)
    # Each of them compared with all of its letters takes a minute.
    assert time.process_time() - start < 5
    assert text.endswith(" and 4950 more")
    assert len(text) < 50 * 210
    start = time.process_time()
    did_you_mean("x" * 100_000, ["x" * 100_000 + "y"] * 10)
    assert time.process_time() - start < 1

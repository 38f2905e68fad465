"""What many tests share: where helpers lie, what a GPU test needs, and the two tiers.

Plain ``pytest`` runs everything. ``pytest --quick`` (``make test``) leaves out what is marked
``slow`` and the repetitions that rarely find anything new: of random seeds it runs the first tenth,
of copy timings the two that differ most (but for a wait that is taken out, which every timing has
to name), and of a test that is marked ``sampled`` the first case, or so many of each parameter.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)

QUICK_TIMINGS = ("late", "random")
LEAST_SEEDS = 3


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out slow tests and repetitions")
    parser.addoption("--fuzz", type=int, help="random programs of each kind; 300, quick 30")
    parser.addoption("--every-line", type=int, help="interrupt a step at each n-th of its lines")
    parser.addoption("--fuzz-first-seed", type=int, default=0, help="seed of the first of them")


def pytest_configure(config):
    options = config.option
    if options.fuzz is None:
        options.fuzz = 30 if options.quick else 300
    if options.every_line is None:
        options.every_line = 1511 if options.quick else 151


def pytest_generate_tests(metafunc):
    if "fuzz_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--fuzz-first-seed")
        seeds = range(first, first + metafunc.config.getoption("--fuzz"))
        metafunc.parametrize("fuzz_seed", seeds)


def pytest_collection_modifyitems(config, items):
    for mark, needed in (("gpu", 1), ("two_gpus", 2)):
        if torch.cuda.device_count() < needed:
            skip = pytest.mark.skip(reason=f"needs {needed} CUDA devices, and torch sees fewer")
            for item in items:
                if mark in item.keywords:
                    item.add_marker(skip)
    if config.getoption("--quick"):
        leave_out = [item for item in items if not is_quick(item)]
        if leave_out:
            config.hook.pytest_deselected(items=leave_out)
            items[:] = [item for item in items if is_quick(item)]


def is_quick(item) -> bool:
    """Whether a test belongs to the quick tier."""
    if "slow" in item.keywords:
        return False
    if not hasattr(item, "callspec"):
        return True
    given, places = item.callspec.params, item.callspec.indices
    sampled = item.get_closest_marker("sampled")
    if sampled:
        return max(places.values()) < (sampled.args or (1,))[0]
    if given.get("timing", "late") not in QUICK_TIMINGS and "wait" not in given:
        return False
    return "seed" not in given or places["seed"] < num_quick_seeds(item)


def num_quick_seeds(item) -> int:
    """How many of a test's seeds the quick tier runs."""
    marks = item.iter_markers("parametrize")
    seeds = next(mark.args[1] for mark in marks if mark.args[0] == "seed")
    return max(LEAST_SEEDS, len(seeds) // 10)


@pytest.fixture(autouse=True)
def everything_moves(request, monkeypatch):
    """Let doors move everything where a test says nothing of a policy.

    By default they plan, and without a GPU nothing moves then: tests of that are `by_default`.
    """
    from megatron_offload.config import OffloadConfig
    from megatron_offload.observe import verdicts

    verdicts._plans.clear()
    if not request.node.get_closest_marker("by_default"):
        planned = OffloadConfig.tuned_policy.fget
        chosen = property(lambda config: config.policy and planned(config))
        monkeypatch.setattr(OffloadConfig, "tuned_policy", chosen)
        monkeypatch.setattr(OffloadConfig, "without_offload", lambda config: config)


@pytest.fixture(autouse=True)
def nothing_is_left_to_the_next():
    """Forget tags and groups of operations, which are the process's."""
    yield
    if ratio := sys.modules.get("megatron_offload.frontends.ratio"):
        for tag in list(ratio.CPUOffload._tags):
            ratio.CPUOffload.forget(tag)
    if operations := sys.modules.get("megatron_offload.integrations.transformer_engine"):
        operations.reset_operation_groups()


@pytest.fixture
def refused(capsys):
    """Run a command line that is refused; return the one line that says why."""
    from megatron_offload.cli.main import main

    def refused(*words):
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, "one line"
        return error

    return refused


@pytest.fixture
def prints(capsys):
    """Run a command line that succeeds; return what it prints."""
    from megatron_offload.cli.main import main

    def prints(*words):
        capsys.readouterr()
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return prints


@pytest.fixture
def one_rank(tmp_path):
    """Let this process be the only one of a group."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser without a window, which keeps what it says and what it asks for.

    Needs selenium, Chromium, its driver (Debian: ``apt-get install chromium chromium-driver``).
    """
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("no chromium and chromedriver on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    quiet = ("background-networking", "component-update", "sync", "gpu", "quic")
    for word in ("headless", "hide-scrollbars", "no-first-run", *(f"disable-{x}" for x in quiet)):
        options.add_argument(f"--{word}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    if os.geteuid() == 0:  # Chromium's sandbox refuses to run as root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Collect what a file's tests make, and not what is there before, each time."""
    gc.collect()
    gc.freeze()

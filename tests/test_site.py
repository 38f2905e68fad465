"""The site: its menu has every page, its reference every key, and a dead link fails its build."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html import unescape
from importlib.util import find_spec

import pytest
import yaml
from documents import ROOT

import megatron_offload
from megatron_offload.cli import main as cli

SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))

needs_mkdocs = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="the extra `docs` isn't installed",
)


def entries(menu):
    for entry in menu:
        for one in entry.values() if isinstance(entry, dict) else [entry]:
            yield from entries(one) if isinstance(one, list) else [one]


def build(folder, into):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", into],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_menu_names_every_page_once():
    menu = list(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(menu) == len(set(menu))
    assert set(menu) == pages | set(SITE["REFERENCE"]) | set(SITE["PAGES"].values())


def test_the_reference_says_what_a_key_is():
    page = SITE["configuration"]()
    assert "`offload.host_slab_bytes` { #offload.host_slab_bytes }\n:   size, ≥ 4,096; " in page
    assert "; default `256MiB`" in page
    assert (
        "`offload.policy.ratio` { #offload.policy.ratio.ratio }\n:   number, ≥ 0, ≤ 1; required"
        in page
    )
    assert "`1f1b` or `interleaved`; unset by default" in SITE["description"]()


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.timeout(300)
def test_the_site_builds_and_has_every_command_key_and_name(site):
    pages = {
        name: (site / "reference" / name / "index.html").read_text()
        for name in ("commands", "python")
    }
    for command in cli.COMMANDS:
        assert f'id="{command}"' in pages["commands"]
    for name, home in megatron_offload._HOMES.items():
        assert f'id="megatron_offload.{home}.{name}"' in pages["python"]


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.timeout(300)
def test_a_page_of_the_site_fetches_nothing(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for tag in re.findall(r"<(?:link|script|img|iframe)\b[^>]*>", text):
            assert "//" not in unescape(tag), f"{page}: {tag}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text()), sheet


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.timeout(300)
def test_dead_links_and_pages_in_no_menu_fail_the_build(tmp_path):
    for path in ROOT.iterdir():
        if path.name not in ("docs", "site"):
            (tmp_path / path.name).symlink_to(path)
    docs = tmp_path / "docs"
    docs.mkdir()
    for path in (ROOT / "docs").iterdir():
        if path.name != "ratio.md":
            (docs / path.name).symlink_to(path)
    (docs / "ratio.md").write_text("# Share\n[a](nowhere.md) [b](moe.md#nothing) [c](../none.md)\n")
    (docs / "orphan.md").write_text("# Orphan\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    for wrong in ("nowhere.md", "#nothing", "../none.md", "orphan.md"):
        assert wrong in done.stderr, wrong

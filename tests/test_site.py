"""The site: its menu has every page, and its reference every key."""

from __future__ import annotations

import json
import re
import runpy
import threading
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest
import yaml
from processes import ROOT, run_python

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
    words = ("-m", "mkdocs", "build", "--strict", "--site-dir", into)
    return run_python(*words, cwd=folder, NO_MKDOCS_2_WARNING="1")


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


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def address(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.timeout(300)
def test_pages_fit_a_phone_say_no_error_and_are_searched_without_a_network(browser, site, address):
    from selenium.webdriver.support.wait import WebDriverWait

    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for page in sorted(site.rglob("index.html")):
        browser.get(f"{address}{page.relative_to(site).as_posix()}")
        wide = "return [document.scrollingElement.scrollWidth, innerWidth]"
        assert browser.execute_script(wide) == [390, 390], page
    browser.get(f"{address}index.html?q=host_slab_bytes")
    found = "return [...document.querySelectorAll('.md-search-result a')].map(link => link.href)"
    links = WebDriverWait(browser, 20).until(lambda browser: browser.execute_script(found))
    assert any("reference/configuration/" in link for link in links), links
    assert browser.get_log("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [one["params"] for one in asked if one["method"] == "Network.requestWillBeSent"]
    urls = [one["request"]["url"] for one in sent]
    assert [url for url in urls if url.startswith(("http", "ws")) and address not in url] == []

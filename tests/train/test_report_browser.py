"""A browser opens the page of a real run: no errors, nothing wider than the screen, all there.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``) and selenium.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from megatron_offload.report.report import render_report

sys.path.insert(0, str(Path(__file__).parent.parent / "report"))
from reports import bare_report, gpu_report

pytest.importorskip("altair")
pytest.importorskip("jinja2")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
waits = pytest.importorskip("selenium.webdriver.support.wait")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium and chromedriver on the PATH"),
]

SECTIONS = ["memory", "groups", "timeline", "tradeoff", "bits", "setup"]
WIDTHS = {390: 844, 1440: 900}

CONTRAST = """
const seen = [];
const channel = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
const luminance = color => {
  const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
  return .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
};
const behind = element => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (color !== 'rgba(0, 0, 0, 0)') return color;
  }
  throw new Error('the page has no colour of its own');
};
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || !element.getClientRects().length) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(behind(element))];
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (ratio < 4.5) seen.push([element.outerHTML.slice(0, 90), ratio]);
}
return seen;
"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run"):
        options.add_argument(word)
    if os.geteuid() == 0:  # Chromium's sandbox refuses to run as root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module", params=["real", "whole", "bare"])
def page(request, tmp_path_factory):
    """The page of a real run, one with every part and hostile names, and one with none."""
    if request.param == "real":
        return request.getfixturevalue("compared")[0] / "report.html"
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_report({"whole": gpu_report, "bare": bare_report}[request.param]()))
    return path


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    return request.param


def look(browser, page, width, scheme):
    size = {"width": width, "height": WIDTHS[width], "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())
    undrawn = "return document.querySelectorAll('.chart:not(:has(canvas))').length"
    wait = waits.WebDriverWait(browser, 20)
    wait.until(lambda browser: browser.execute_script(undrawn) == 0)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_the_screen_without_errors(browser, page, width, scheme):
    look(browser, page, width, scheme)
    assert browser.get_log("browser") == []
    inner, scroll = browser.execute_script(
        "return [innerWidth, document.scrollingElement.scrollWidth]"
    )
    assert inner == width
    assert scroll <= inner
    found = browser.execute_script(
        "return [...document.querySelectorAll('main section')].map(section => "
        "[section.querySelector('h2').id, section.offsetHeight > 40])"
    )
    assert found == [[name, True] for name in SECTIONS]
    charts = browser.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => c.scrollWidth <= c.clientWidth)"
    )
    assert all(charts)


def test_all_text_can_be_read_in_both_colour_schemes(browser, page, scheme):
    look(browser, page, 1440, scheme)
    assert browser.execute_script(CONTRAST) == []


def test_a_span_says_what_it_is(browser, page):
    look(browser, page, 1440, "light")
    for canvas in browser.find_elements("css selector", ".timeline canvas")[:1]:
        size = canvas.size
        actions = webdriver.ActionChains(browser).scroll_to_element(canvas)
        actions.move_to_element_with_offset(canvas, 0, 40 - size["height"] // 2).perform()
        tip = browser.find_element("css selector", ".vg-tooltip")
        assert "forward" in tip.text or "backward" in tip.text or "compute" in tip.text
        assert "<script>" not in tip.get_attribute("innerHTML")

"""A browser opens pages of real and simulated runs: no errors, nothing wider than the screen, all
there; wheels zoom, what is pointed at says what it is, links lead to their sections.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megatron_offload.report.report import render_report

sys.path.insert(0, str(Path(__file__).parent.parent / "report"))
from reports import bare_report, gpu_report, many_ranks

pytest.importorskip("altair")
pytest.importorskip("jinja2")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
waits = pytest.importorskip("selenium.webdriver.support.wait")
ScrollOrigin = pytest.importorskip("selenium.webdriver.common.actions.wheel_input").ScrollOrigin

pytestmark = pytest.mark.slow

SECTIONS = ["memory", "groups", "plan", "timeline", "bits", "setup"]
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
def many(tmp_path_factory):
    """The page of a simulation of 64 ranks."""
    path = tmp_path_factory.mktemp("many") / "report.html"
    path.write_text(render_report(many_ranks()))
    return path


@pytest.fixture(scope="module", params=["real", "whole", "bare", "many"])
def page(request, tmp_path_factory):
    """The page of a real run, one with every part and hostile names, one with none, 64 ranks."""
    if request.param == "real":
        return request.getfixturevalue("compared")[0] / "report.html"
    if request.param == "many":
        return request.getfixturevalue("many")
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
    wait_for_charts(browser)


def wait_for_charts(browser):
    undrawn = (
        "return [...document.querySelectorAll('.chart')].filter("
        "chart => chart.clientWidth && !chart.querySelector('canvas')).length"
    )
    waits.WebDriverWait(browser, 20).until(lambda browser: not browser.execute_script(undrawn))


def charts(browser):
    """Return the charts that are to be seen: of all ranks, of one of them, the curve."""
    return [one for one in browser.find_elements("css selector", "canvas") if one.is_displayed()]


def pixels(browser, canvas):
    return browser.execute_script("return arguments[0].toDataURL()", canvas)


def changed(browser, canvas, before):
    """Wait until a chart is drawn anew; Vega does it with the next frame."""
    wait = waits.WebDriverWait(browser, 5)
    return wait.until(lambda browser: pixels(browser, canvas) != before)


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
    assert sorted(found) == [[name, True] for name in sorted(SECTIONS)]
    fits = browser.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => c.scrollWidth <= c.clientWidth)"
    )
    assert all(fits)


def test_all_text_can_be_read_in_both_colour_schemes(browser, page, scheme):
    look(browser, page, 1440, scheme)
    assert browser.execute_script(CONTRAST) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_pointed_at_says_what_it_is(browser, page, width):
    look(browser, page, width, "light")
    for canvas in charts(browser)[:1]:
        middle = canvas.size["width"] // 2
        actions = webdriver.ActionChains(browser).scroll_to_element(canvas)
        for x in range(60, canvas.size["width"] - 60, 4):  # somewhere in the first lane is a span
            top = 10 - canvas.size["height"] // 2
            actions.move_to_element_with_offset(canvas, x - middle, top).perform()
            tips = browser.find_elements("css selector", ".vg-tooltip.visible")
            if tips:
                break
        assert any(word in tips[0].text for word in ("forward", "backward", "waits"))
        assert "<script>" not in tips[0].get_attribute("innerHTML")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_wheel_zooms_every_chart_and_a_double_click_shows_all_again(browser, page, width):
    look(browser, page, width, "light")
    for canvas in reversed(charts(browser)):  # the first last: a click there shows another rank
        script = "arguments[0].scrollIntoView({block: 'center'});"
        script += "return arguments[0].closest('.timeline')"
        is_timeline = browser.execute_script(script, canvas)
        for y in (60, 250) if is_timeline else (25,):  # lanes and memory
            before = pixels(browser, canvas)
            place = (0, y - canvas.size["height"] // 2)
            actions = webdriver.ActionChains(browser)
            actions.move_to_element_with_offset(canvas, *place).perform()
            actions.scroll_from_origin(ScrollOrigin.from_element(canvas, *place), 0, -300).perform()
            changed(browser, canvas, before)
            zoomed = pixels(browser, canvas)
            actions.double_click().perform()
            changed(browser, canvas, zoomed)
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_contents_leads_to_every_section(browser, page, width):
    look(browser, page, width, "light")
    folded = browser.find_element("css selector", "nav.narrow summary")
    assert folded.is_displayed() == (width == 390)
    if width == 390:
        folded.click()
    for name in SECTIONS:
        links = browser.find_elements("css selector", f"nav a[href='#{name}']")
        [link] = [link for link in links if link.is_displayed()]
        link.click()
        top = f"return document.getElementById('{name}').getBoundingClientRect().top"
        assert -1 <= browser.execute_script(top) < WIDTHS[width]


def test_buttons_zoom_where_there_is_no_wheel(browser, page):
    look(browser, page, 390, "light")
    for canvas in charts(browser):
        buttons = "return arguments[0].closest('.chart').previousElementSibling.children"
        for button in browser.execute_script(buttons, canvas):
            before = pixels(browser, canvas)
            button.click()
            changed(browser, canvas, before)
    assert browser.get_log("browser") == []


def test_any_rank_can_be_chosen(browser, page):
    look(browser, page, 390, "dark")
    for option in browser.find_elements("css selector", "#rank option")[-1:]:
        option.click()
        wait_for_charts(browser)
        shown = browser.find_elements("css selector", ".timeline:not([hidden])")
        assert [one.get_attribute("data-rank") for one in shown] == [option.get_attribute("value")]
        assert len(charts(browser)) >= 2, "of all ranks, and of this one"
    assert browser.get_log("browser") == []


def test_64_ranks_are_there_at_once(browser, many):
    start = time.monotonic()
    look(browser, many, 1440, "light")
    assert time.monotonic() - start < 10
    text = many.read_text()
    assert text.count("<option") == 64, "no rank is left out"
    assert len(text) < 5e6
    height = browser.execute_script("return document.scrollingElement.scrollHeight")
    assert height < 8000, "no 64 timelines one below the other"

"""A page says what its numbers say, has every section in every case, and escapes what is named."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
import sys
from html.parser import HTMLParser

import pytest
from reports import GIB, HOSTILE, bare_report, facts, gpu_report, ranks_of, trace

from megatron_offload.core.row_config import RowConfig
from megatron_offload.engine.stats import GroupStats
from megatron_offload.errors import ConfigError
from megatron_offload.planning.found import Alternative, Alternatives, FoundPlan, FoundStage
from megatron_offload.report.report import MemoryKind, Pair, Report, render_report
from megatron_offload.report.tables import found_rows

pytest.importorskip("jinja2")
pytest.importorskip("altair")

SECTIONS = ["plan", "memory", "groups", "timeline", "bits", "setup"]
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Elements with their attributes, the text, and the open elements at the end."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.inside = [], [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open:
            self.inside.setdefault(self.open[-1], []).append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module", params=[gpu_report, bare_report], ids=["whole", "bare"])
def page(request):
    return Page(render_report(request.param()))


def test_every_section_is_there_and_every_element_is_closed(page):
    assert page.open == []
    sections = [h["id"] for h in page.of("h2")]
    assert sections == [s["aria-labelledby"] for s in page.of("section")]
    is_found = page.of("script")  # then the plans are the first picture
    assert sections == (SECTIONS if is_found else ["memory", "groups", "plan", *SECTIONS[3:]])
    assert len(page.of("h1")) == len(page.of("main")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels)), "no level is skipped"
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] for a in page.of("a")]
    assert links == 2 * [f"#{name}" for name in sections], "beside the page, and folded"


def test_no_attribute_holds_markup(page):
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert name.replace("-", "").isalpha()
            if name not in ("aria-label", "title"):
                assert not set(value or "") & set('"<>'), (name, value)


def test_nothing_is_loaded_and_one_script_may_run(page):
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"iframe", "object", "embed", "img", "form", "base"}
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:,") == "data:,"
        assert attributes.get("href", "data:,") in ("data:,", *(f"#{name}" for name in SECTIONS))
    style = "".join(page.inside["style"])
    assert "url(" not in style
    assert "@import" not in style
    policy = next(m["content"] for m in page.of("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'")
    running = [a for a in page.of("script") if a.get("type") != "application/gzip"]
    assert len(running) == (1 if len(page.of("script")) > 1 else 0)
    if running:
        digest = hashlib.sha256(page.inside["script"][-1].encode()).digest()
        assert policy.endswith(f"script-src 'sha256-{base64.b64encode(digest).decode()}'")


def test_every_table_has_a_caption_and_its_own_box_and_every_picture_a_text(page):
    assert all(a.get("class") != "chart" or a["aria-label"] for a in page.of("div"))
    tags = [tag for tag, _ in page.elements]
    tables = [index for index, tag in enumerate(tags) if tag == "table"]
    assert tables
    for index in tables:
        assert tags[index + 1] == "caption"
        box = page.elements[index - 1][1]
        assert (box["class"], box["tabindex"], box["role"]) == ("scroll", "0", "region")
        assert box["aria-label"]


def test_what_users_named_is_text_wherever_it_stands():
    text = render_report(gpu_report())
    page = Page(text)
    assert "".join(page.text).count(HOSTILE) >= 7
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    zipped = [base64.b64decode(data) for data in page.inside["script"][:-1]]
    charts = [json.loads(gzip.decompress(data)) for data in zipped]
    assert len(charts) == 4, "both ranks, each of them, a stage's plans"
    assert any("<script>alert" in str(chart) for chart in charts)


def test_the_plans_of_each_stage_say_what_they_free_and_take():
    text = render_report(gpu_report())
    cells = "<td>2.0 GiB</td><td>37.0 GiB</td><td>+0.2 %</td><td>+0.1 % (+0.0 to +0.2)</td>"
    assert f'<td class="text">followed</td>{cells}' in text
    assert "<td>2.0 GiB</td><td>not known</td>" in text
    note = "so what is measured says nothing of a GPU"
    assert note not in text
    assert note in render_report(gpu_report(facts=facts(is_simulated=True)))


@pytest.mark.parametrize("has_plan", [True, False])
def test_a_described_job_s_picture_is_first_and_its_table_behind(has_plan):
    sizes = {"reserved_bytes": 30 * GIB, "node_host_bytes": 0, "takes_longer_percent": -1e-9}
    each = [Alternative(what=HOSTILE, kind="nothing", fits=False, **sizes)]
    if has_plan:
        sizes |= {"reserved_bytes": 15 * GIB, "takes_longer_percent": 2.0}
        each.append(Alternative(what="the chosen rows", kind="chosen", fits=True, **sizes))
    verdict = HOSTILE + "\nto fit: more"
    shown = Alternatives(title=HOSTILE, verdict=verdict, device_bytes=20 * GIB, each=each)
    whole = gpu_report()
    found = {"found": whole.found} if has_plan else {}
    text = render_report(Report(HOSTILE, alternatives=shown, **found))
    page = Page(text)
    assert page.open == []
    sections = ["fit", "plan"] if has_plan else ["fit"]
    assert [h["id"] for h in page.of("h2")] == sections
    assert [a["href"] for a in page.of("a")] == 2 * [f"#{name}" for name in sections]
    main = text[text.index("<main>") :]
    assert main.index('class="chart"') < main.index("<table>")
    assert f'class="verdict {"good" if has_plan else "bad"} wrap"' in text
    assert ("\N{MINUS SIGN}50.0 %" in text) == has_plan, "of the job, not of a stage"
    assert "<td>+0.0 %</td>" in text
    assert "<script>alert" not in text
    assert 'class="missing"' not in text


def test_what_is_missing_is_named_with_the_way_to_get_it():
    text = render_report(bare_report())
    assert text.count('class="missing"') == 5
    ways = ("run.measure_live_bytes", "frontier.json", "run.trace_step: 4", "compare")
    for way in ways:
        assert way in text
    assert 'class="missing"' not in render_report(gpu_report())
    text = render_report(gpu_report(traces=[trace(1)]))
    assert "The folder holds no <code>trace_0.json</code>, which" in text
    assert text.count('class="missing"') == 1


def test_too_many_timelines_are_said_and_not_drawn(monkeypatch):
    monkeypatch.setattr("megatron_offload.report.plots.MOST_TIMELINES", 2)
    text = render_report(gpu_report(traces=[trace(rank) for rank in range(5)]))
    assert text.count('<figure class="timeline"') == text.count("<option") == 2
    assert "3 more ranks" in text


@pytest.mark.parametrize("missing", ["jinja2", "altair vl_convert"])
def test_without_packages_what_installs_them_is_named(monkeypatch, missing):
    for package in missing.split():
        monkeypatch.setitem(sys.modules, package, None)
    names = missing.replace("vl_convert", "vl-convert-python")
    with pytest.raises(ConfigError, match=f"report needs .* pip install {names}$"):
        render_report(gpu_report())


@pytest.mark.parametrize(
    ("findings", "kind", "words"),
    [
        ({"losses of 5 steps": True}, "good", "Bitwise identical"),
        ({"losses": True, "norms": False}, "bad", "NOT the same bits (norms differ)"),
    ],
)
def test_the_verdict_says_whether_the_bits_are_the_same(findings, kind, words):
    report = gpu_report(findings=findings)
    page = Page(render_report(report))
    assert f"{words} over 5 steps on 2 ranks." in page.inside["p"]
    verdict = next(a for a in page.of("p") if a.get("id") == "verdict")
    assert verdict["class"] == f"verdict {kind}"


def test_the_highest_rank_of_each_run_counts():
    kind = MemoryKind("x", (Pair(5, 4), Pair(3, 6), Pair(None, None)))
    assert kind.highest == (5, 6)
    assert MemoryKind("x", (Pair(None, 1),)).highest == (None, 1)
    for pair in (Pair(None, 1), Pair(1, None), Pair(0, 1)):
        assert pair.change is None, "a change needs both"


def test_on_a_gpu_reserved_memory_and_time_are_compared():
    report = gpu_report()
    assert [kind.name for kind in report.memory][:2] == ["reserved memory", "allocated memory"]
    assert report.memory[0].highest == (38 * GIB, 30 * GIB)
    assert round(report.step_time_s.change, 3) == 0.004


def test_groups_are_added_up_and_say_what_moved_and_why_the_rest_was_kept():
    kept = {"why": GIB, "more": GIB + GIB // 2}
    ranks = (
        *ranks_of(
            (0, 0), groups=(GroupStats("x", 2, GIB, GIB, GIB, 5 * GIB // 2, kept), GroupStats("y"))
        ),
        *ranks_of((0, 0), groups=(GroupStats("x", 2, 2 * GIB),)),
    )
    x, y = gpu_report(facts=facts(by_rank=ranks)).groups
    assert (x["name"], x["num_groups"], x["offloaded_bytes"]) == ("x", 4, 3 * GIB)
    moved, recomputed = "3.0 GiB offloaded", "1.0 GiB recomputed in backward"
    assert x["reasons"] == [moved, recomputed, "1.5 GiB kept: more", "1.0 GiB kept: why"]
    assert y["reasons"] == ["nothing in it to offload: too small, or kept alive by something else"]


def test_rows_are_said_in_short_without_the_parts_of_what_goes_as_a_whole():
    rows = [
        {"layers": "0-1,9", "site": "attention", "offload": "all"},
        {"layers": "0-1,9", "site": "self_attention.core_attention", "offload": "all"},
        {"layers": 3, "site": "mlp", "offload": 2},
        {"layers": "4-5", "site": "mlp.experts", "offload": "all"},
        {"site": "norm", "recompute": True},
        {"layers": 7, "site": "layer", "recompute": True},
    ]
    plans = (
        FoundPlan(rows=(), freed_bytes=0, predicted_percent=0.0),
        FoundPlan(rows=[RowConfig(**row) for row in rows], freed_bytes=7, predicted_percent=1.0),
    )
    stage = FoundStage(name="0", bare_bytes=9, plans=plans, followed=1)
    _, nothing, some = found_rows(stage, chosen=0, followed=1)
    assert nothing[1:3] == ["chosen", "nothing"]
    assert some[1:3] == [
        "followed",
        "offload attention 0-1, 9, mlp 3 (2 of its tensors), mlp.experts 4-5; "
        "recompute norm, layer 7",
    ]

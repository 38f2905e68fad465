"""Pictures are drawn for several ranks, and for settings of any name."""

from __future__ import annotations

import itertools
import math
import random
import re
from operator import mul

import pytest

from megatron_offload.core.trace import PIPELINE_WAIT, ByteCount, Counter, Span, StepTrace
from megatron_offload.planning.found import Alternative, Alternatives, FoundPlan, FoundStage

altair = pytest.importorskip("altair")
vl_convert = pytest.importorskip("vl_convert")
plots = pytest.importorskip("megatron_offload.report.plots")


def trace(rank):
    spans = [Span("compute", "forward", "x[chunk 0, 0]", 0, 10), Span("d2h", "d2h", "x", 3, 5, 64)]
    return StepTrace(rank, spans, [Counter(ByteCount.LIVE, 1, 64)])


def rows_of(chart, field):
    """Return the rows of a chart's data that have a field."""
    found = chart.to_dict()["datasets"].values()
    return [row for rows in found for row in rows if field in row]


def test_each_part_of_a_picture_has_data_of_its_own():
    traces = [trace(rank) for rank in range(2)]
    for number, one in enumerate(traces):
        one.spans[0] = Span("compute", "forward", f"x[chunk {number}, 0]", 0, 10)
        one.counters.append(Counter(ByteCount.LIVE, 2, 64 * number))
    picture = altair.vconcat(*(plots.timeline_chart(one, 20.0) for one in traces))
    vega = str(vl_convert.vegalite_to_vega(picture.to_json()))
    drawn = re.findall(r"'(?:from|facet)': \{(?:'name': '\w+', )?'data': '(data_\d+)'", vega)
    assert len(drawn) == len(set(drawn)) == 4


def test_parts_of_a_picture_zoom_as_one():
    chart = plots.timeline_chart(trace(0), 20.0).to_dict()
    assert chart["params"][0]["views"] == [part["name"] for part in chart["vconcat"]]
    fields = {part["encoding"]["x"]["field"] for part in chart["vconcat"]}
    assert len(fields) == 1, "a scale that is shared follows the range of one field"


def test_spans_stand_where_their_times_say_and_ranks_share_an_axis():
    short = StepTrace(0, [Span("compute", "forward", "a", 0, 500)])
    long = StepTrace(1, [Span("compute", "backward", "a", 0, 1000), Span("d2h", "d2h", "a", 9, 7)])
    end_us = plots.last_us([short, long])
    chart = plots.timeline_chart(short, end_us)
    [row] = rows_of(chart, "end")
    assert (row["at"], row["end"], row["what"]) == (0, 500, "forward")
    assert "[0, 1000.0]" in str(chart.to_dict())
    rows = rows_of(plots.timeline_chart(long, end_us), "end")
    assert [(row["what"], row["at"], row["end"]) for row in rows] == [
        *(("backward", 0, 1000), ("offload (D2H)", 9, 16))
    ]


def test_a_long_trace_makes_no_large_chart_and_keeps_its_peak():
    spans = [Span("compute", "forward", "x", i, 0.4, 1) for i in range(20_000)]
    counters = [Counter(ByteCount.LIVE, i, (i % 7) * 2**20) for i in range(20_000)]
    counters.append(Counter(ByteCount.LIVE, 10_000.5, 2**30))
    chart = plots.timeline_chart(StepTrace(0, spans, counters), 20_000.0)
    assert len(rows_of(chart, "end")) <= 2000
    sizes = [row["size"] for row in rows_of(chart, "size") if "end" not in row]
    assert len(sizes) < 10_000
    assert max(sizes) == 1.0, "GiB"


def test_a_curve_holds_its_last_value_to_the_end():
    counters = [
        Counter(ByteCount.LIVE, 0, 0),
        Counter(ByteCount.LIVE, 500, 10),
        Counter(ByteCount.HELD, 0, 3),
    ]
    one = StepTrace(0, [Span("compute", "forward", "", 0, 1000)], counters)
    rows = rows_of(plots.timeline_chart(one, 1000.0), "size")
    found = [(row["what"], row["size"]) for row in rows]
    assert found == [
        *((ByteCount.LIVE, x) for x in (0, 10, 10)),
        (ByteCount.HELD, 3),
        (ByteCount.HELD, 3),
    ]


def test_all_ranks_share_one_picture_and_every_kind_has_its_thickness():
    spans = [
        *(Span("compute", kind, "x", 10 * i, 10) for i, kind in enumerate(("forward", "backward"))),
        Span("compute", "other", "", 20, 10),
        Span("d2h", "d2h", "x", 0, 10, 64),
    ]
    rows = rows_of(plots.overview_chart([StepTrace(0, spans), StepTrace(1, spans)], 30.0), "rank")
    found = [(row["rank"], row["what"]) for row in rows]
    assert sorted(found) == [(rank, what) for rank in (0, 1) for what in ("backward", "forward")]
    assert len({(row["what"], row["thickness"]) for row in rows}) == 2


# Machado, Oliveira and Fernandes 2009, of people who lack one of three kinds of cones.
VISIONS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no medium": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no short": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def lab(color, vision):
    """Return where a colour lies for eyes, in CIE Lab."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    r, g, b = (min(1, max(0, sum(map(mul, row, linear)))) for row in VISIONS[vision])
    xyz = (0.412 * r + 0.358 * g + 0.18 * b) / 0.95, 0.213 * r + 0.715 * g + 0.072 * b
    xyz = *xyz, (0.019 * r + 0.119 * g + 0.95 * b) / 1.089
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("name", ["_KINDS", "_COUNTERS", "_POINTS", "_DONE"])
def test_colours_are_distinct_by_every_kind_of_eyes(name, vision):
    colors = [color for color, _ in getattr(plots, name).values()]
    for pair in itertools.combinations(colors, 2):
        assert math.dist(*(lab(color, vision) for color in pair)) > 12, pair


@pytest.mark.parametrize(
    ("span", "what"),
    [
        (Span("compute", "stall", "x", 0, 10, wait="W2"), "waits for a copy"),
        (Span("compute", "stall", "x", 0, 10, wait=PIPELINE_WAIT), "waits for a stage"),
        (Span("compute", "<script>", "x", 0, 10), "outside groups"),
    ],
)
def test_waiting_for_another_stage_is_not_waiting_for_a_copy(span, what):
    [row] = rows_of(plots.timeline_chart(StepTrace(0, [span]), 10.0), "end")
    assert row["what"] == what


def stage_of(*plans, **changes):
    """Return a stage of plans, each with what it needs of 100 bytes, and the time that it takes."""
    found = [
        FoundPlan(rows=(), freed_bytes=100 - size, predicted_percent=percent)
        for size, percent in plans
    ]
    stage = FoundStage(name="0", bare_bytes=100, plans=tuple(found), followed=0)
    return stage.model_copy(update=changes)


def test_a_line_joins_what_nothing_beats():
    random_numbers = random.Random(7)
    for _ in range(25):
        pairs = [
            (random_numbers.randrange(20), float(random_numbers.randrange(20)))
            for _ in range(random_numbers.randrange(1, 12))
        ]
        rows = rows_of(plots.tradeoff_chart(stage_of(*pairs)), "memory")
        best = [
            (r["memory"], r["percent"]) for r in rows if r["is_best"] and r["how"] == "predicted"
        ]
        unbeaten = {
            (peak, percent)
            for peak, percent in pairs
            if not any(a <= peak and b <= percent and (a, b) != (peak, percent) for a, b in pairs)
        }
        assert sorted(best) == sorted(unbeaten)


def test_plans_that_a_run_has_found_are_points_and_the_one_that_was_followed_is_one_of_its_own():
    stage = stage_of((100, 0.0), (80, 2.0), (60, 4.0), followed=1)
    tried = {"measured_percent": (3.0, 2.0, 4.0), "reserved_bytes": 90}
    plans = (stage.plans[0], stage.plans[1].model_copy(update=tried), stage.plans[2])
    stage = stage.model_copy(update={"plans": plans})
    points = rows_of(plots.tradeoff_chart(stage), "memory")
    assert [(x["plan"], x["memory"], x["percent"], x["how"]) for x in points] == [
        ("plan 0", 110, 0.0, "predicted"),
        ("plan 1", 90, 2.0, "predicted"),
        ("plan 1", 90, 3.0, "plan"),
        ("plan 2", 70, 4.0, "predicted"),
    ]
    other = plots.tradeoff_chart(stage.model_copy(update={"followed": 2}))
    hows = [point["how"] for point in rows_of(other, "memory")]
    assert hows == [*["predicted"] * 2, "measured", "predicted", "plan"]
    assert plots.tradeoff_chart(stage.model_copy(update={"bare_bytes": 0})) is None


def test_what_a_job_may_do_are_numbered_points_and_those_in_one_place_share_a_text():
    def one(size, percent, kind):
        sizes = {"reserved_bytes": size << 30, "node_host_bytes": 0}
        more = {"fits": size < 10, "takes_longer_percent": percent}
        return Alternative(what=f"what {size}", kind=kind, **sizes, **more)

    each = (one(20, 0.0, "nothing"), one(8, 30.0, "recompute"), one(8, 30.1, "chosen"))
    found = Alternatives(title="job", verdict="fits", device_bytes=10 << 30, each=each)
    chart = plots.alternatives_chart(found, has_names=True)
    rows = rows_of(chart, "memory")
    points = [(row["memory"], row["percent"], row["how"]) for row in rows if "how" in row]
    assert set(points) == {(20, 0.0, "nothing"), (8, 30.0, "recompute"), (8, 30.1, "chosen")}
    assert [row["memory"] for row in rows if "is" in row] == [10], "what a GPU has"
    assert {row["number"] for row in rows if "number" in row} == {"1", "2", "3", "2, 3"}
    drawn = vl_convert.vegalite_to_svg(chart.to_json())
    for text in ("1  what 20: 20.0 GiB, +0.0 %, does not fit", "2  what 8: 8.0 GiB", "2, 3", "job"):
        assert f">{text}" in drawn.replace("\u00a0", " ")

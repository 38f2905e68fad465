"""Pictures are drawn for several ranks, and for settings of any name."""

from __future__ import annotations

import pytest

from megatron_offload.core.trace import LIVE_BYTES, PIPELINE_WAIT, Counter, Span, StepTrace
from megatron_offload.report.plots import MOST_TIMELINES, plot_timeline, plot_tradeoff
from megatron_offload.report.tradeoff import TradeOff, TradeOffPoint

image = pytest.importorskip("matplotlib.image")

PNG = b"\x89PNG\r\n\x1a\n"


def trace(rank):
    spans = [Span("compute", "forward", "x[chunk 0, 0]", 0, 10), Span("d2h", "d2h", "x", 3, 5, 64)]
    return StepTrace(rank, spans, [Counter(LIVE_BYTES, 1, 64)])


def test_each_rank_gets_its_own_lanes(tmp_path):
    for number in (1, 2):
        traces = [trace(rank) for rank in range(number)]
        assert plot_timeline(traces, tmp_path / f"{number}.png", r"$\frac{$")
    one, two = (image.imread(tmp_path / f"{number}.png") for number in (1, 2))
    assert two.shape[0] == 2 * one.shape[0]
    assert two.shape[1] == one.shape[1]


def test_waiting_for_another_stage_is_not_drawn_as_waiting_for_a_copy(tmp_path):
    pixels = []
    for wait in ("W2", PIPELINE_WAIT):
        one = StepTrace(0, [Span("compute", "stall", "x", 0, 10, wait=wait)])
        assert one.summary().total_stall_us == 10
        assert one.summary().copy_stall_us == (10 if wait == "W2" else 0)
        assert plot_timeline([one], tmp_path / "one.png")
        pixels.append(image.imread(tmp_path / "one.png")[..., :3])
    red = (0xD1 / 255, 0x33 / 255, 0x3B / 255)
    num_red = [(abs(picture - red) < 0.01).all(axis=-1).sum() for picture in pixels]
    assert num_red[0] > 10_000
    assert num_red[1] == 0


@pytest.mark.parametrize("number", [0, MOST_TIMELINES + 1])
def test_no_rank_and_too_many_are_refused(number, tmp_path):
    with pytest.raises(ValueError, match=f"1 to {MOST_TIMELINES} ranks, got {number}"):
        plot_timeline([trace(rank) for rank in range(number)], tmp_path / "none.png")
    assert not list(tmp_path.iterdir())


def test_labels_are_text_and_no_formulas(tmp_path):
    points = (
        TradeOffPoint(label=r"$\frac{", peak_bytes=2**30, step_time_percent=1.0),
        TradeOffPoint(label="$x$", peak_bytes=2**31, step_time_percent=0.0, is_plan=True),
        TradeOffPoint(label="p", peak_bytes=2**31, step_time_percent=0.0, is_predicted=True),
        TradeOffPoint(label="untimed", peak_bytes=2**31, step_time_percent=None),
    )
    path = tmp_path / "deep" / "tradeoff.png"
    formula = r"$\frac{$"
    assert plot_tradeoff(TradeOff(memory=formula, points=points), path, formula)
    assert path.read_bytes().startswith(PNG)

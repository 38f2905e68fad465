"""What rows cost, of steps of any lengths: what is said holds in nineteen of twenty runs."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_offload.autotune.measured import TimedStep, growth_of, slowdown_of


def steps_of(draw, number, percent, *, noise=0.02, sizes=(512, 2048), outliers=0):
    steps = []
    for place in range(number):
        has_rows, size = place % 4 in (1, 2), float(draw.integers(*sizes, endpoint=True))
        us = (3e4 + 50 * size) * (1 + percent / 100 * has_rows) * np.exp(draw.normal(0, noise))
        steps.append(TimedStep(us, size, has_rows))
    for place in draw.choice(number, outliers, replace=False):
        steps[place] = steps[place]._replace(us=steps[place].us * 10)
    return steps


@pytest.mark.parametrize(
    "keys", [{}, {"sizes": (700, 700)}, {"outliers": 3}, {"noise": 0.05}], ids=str
)
@pytest.mark.parametrize("percent", [0.0, 1.5, 20.0])
def test_the_interval_holds_what_is_true(percent, keys):
    draw = np.random.default_rng(0)
    runs = [slowdown_of(steps_of(draw, 40, percent, **keys)) for _ in range(200)]
    held = [run.low <= percent <= run.high for run in runs]
    assert np.mean(held) >= 0.92
    widths = [run.high - run.low for run in runs]
    assert np.median(widths) < 4 * 100 * keys.get("noise", 0.02)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_of_too_few_steps_nothing_is_said(number):
    assert slowdown_of(steps_of(np.random.default_rng(2), number, 1.0)) is None


def test_steps_without_noise_are_told_exactly():
    steps = [TimedStep(100.0 + 5 * on, 16.0, on) for on in (False, True, True, False, True, False)]
    found = slowdown_of(steps)
    assert found == pytest.approx((5.0, 5.0, 5.0))
    assert str(found) == "+5.0 % (+5.0 to +5.0)"


@pytest.mark.parametrize(
    ("us_of", "power"), [(lambda x: x * x, 2), (lambda x: 9, 0), (lambda x: x**3, 2)]
)
def test_growth_is_the_power_of_size_by_which_time_grows(us_of, power):
    steps = [TimedStep(us_of(size), size, 0.0) for size in (2.0, 3.0, 5.0)]
    assert growth_of(steps) == pytest.approx(power, abs=1e-6)
    assert growth_of(steps[:1]) == growth_of([]) == growth_of(steps[:1] * 3) == 1

"""No wrong order of copies can pass: each wait, taken out, is named by the simulation."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from programs import (
    KIB,
    ORDER,
    TIMINGS,
    check_steps,
    make_manager,
    make_model,
    run_step,
)

import megatron_offload
from megatron_offload.backends.base import Wait
from megatron_offload.recompute.proof import Proof

ENGINE_WAITS = [wait for wait in Wait if wait is not Wait.W3]
"""H2D is behind the compute stream (W6), which has waited for D2H at the release (W2)."""

SETTINGS = {
    # The pool allocates what has been free longest, so only where it is short of memory does it
    # allocate what a reload is still reading.
    Wait.W5: {"host_memory_bytes": 40 * KIB, "host_slab_bytes": 4 * KIB, "prefetch_bytes": 16 * KIB}
}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("wait", ENGINE_WAITS, ids=lambda wait: wait.name)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_missing_wait_is_named(wait, timing, recomputes, monkeypatch):
    monkeypatch.setattr(Proof, "begin", lambda *_: False)  # else other bits are an error first
    monkeypatch.setattr(Proof, "refuse_unseen", lambda *_: "")
    manager = make_manager(timing, removed_waits={wait}, **SETTINGS.get(wait, {}))
    model = make_model(recomputes=recomputes)
    for _ in range(3):
        run_step(model, manager, ORDER)
    assert wait in {hazard.wait for hazard in manager.backend.hazards}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("inflight_bytes", [0, 48 * KIB, None])
@pytest.mark.parametrize("prefetch_bytes", [0, 64 * KIB, None])
def test_with_all_waits_nothing_is_reported(timing, inflight_bytes, prefetch_bytes):
    recomputes = prefetch_bytes is None  # in a third of the cases
    model = make_model(recomputes=recomputes)
    manager = make_manager(timing, max_inflight_bytes=inflight_bytes, prefetch_bytes=prefetch_bytes)
    check_steps(model, manager, ORDER, 3)
    assert manager.last_step.offloaded_bytes > 0
    assert (manager.last_step.recomputed_bytes > 0) == recomputes


def test_every_wait_of_the_engine_is_made_at_one_place():
    places = defaultdict(set)
    engine = Path(megatron_offload.__file__).parent / "engine"
    for path in engine.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                text = ast.unparse(function)
                for name in re.findall(r"\.wait(?:_compute)?\(.*Wait\.(W\d)\)", text):
                    places[name].add(function.name)
    assert {name: len(found) for name, found in places.items()} == {
        wait.name: 1 for wait in ENGINE_WAITS
    }

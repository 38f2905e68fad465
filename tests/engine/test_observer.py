"""What observers are given, in which order, and that nothing else changes."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import partialmethod

import torch
from programs import check_steps, in_group, make_manager, make_model, one_forward_one_backward

from megatron_offload.backends.base import Wait
from megatron_offload.engine.observer import Observer
from megatron_offload.recompute.recipes import recomputable

ORDER = one_forward_one_backward(2, depth=1)
EVENTS = [name for name, _ in inspect.getmembers(Observer, inspect.isfunction)]


class Noting(Observer):
    """Notes the name of each event, and of copies and waits what they are and whose."""

    def __init__(self):
        self.events = []

    def note(self, name, *args, **kw):
        is_issued = name.endswith("issued")
        self.events.append((name, *((args[0], args[-1].label) if is_issued else ())))


for event in EVENTS:
    setattr(Noting, event, partialmethod(Noting.note, event))


def names(noting):
    return [name for name, *_ in noting.events]


def test_every_event_of_one_group_comes_in_its_order():
    manager, noting = make_manager(max_inflight_bytes=0, prefetch_bytes=0), Noting()

    def run(x):
        return recomputable(torch.cos, x.exp(), manager=manager).sin()

    with manager.observed_by(noting), manager.step():
        in_group(manager, run, torch.ones(64, requires_grad=True) * 1).sum().backward()
    assert names(noting) == [
        *("group_starts", *["tensor_saved"] * 3, "group_commits"),
        *("block_offloads", "block_offloads", "copy_starts", "copy_issued"),
        *("wait_starts", "wait_issued", "boundary_passed", "backward_enters"),
        *("tensor_reloaded", "copy_starts", "copy_issued", "boundary_passed"),
        *("recompute_starts", "wait_starts", "wait_issued", "block_read", "recomputed"),
        *(*["block_read"] * 3, "backward_leaves", "boundary_passed"),
    ]
    assert set(names(noting)) == set(EVENTS)
    told = [args for name, *args in noting.events if name.endswith("issued")]
    assert told == [[what, "g[chunk 0, group 0]"] for what in ("d2h", Wait.W2, "h2d", Wait.W4)]


def test_two_are_reported_the_same_and_bits_are_identical():
    model, manager, both = make_model(), make_manager(), (Noting(), Noting())
    with manager.observed_by(*both):
        check_steps(model, manager, ORDER)
    assert both[0].events == both[1].events
    counts = Counter(names(both[0]))
    assert counts["group_starts"] * 3 == counts["boundary_passed"] == 36
    assert manager.observers == []

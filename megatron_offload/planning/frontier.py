"""The frontier of a model: plans of rows, each freeing more than the one before, for least time.

A plan says of each layer which of its actions is taken. Plans are made by moves: a single layer
takes another action, the one that frees most for what it costs. Functions know no layer: moves are
made once from layers without any that run again, and once from layers where all do. Which plan is
followed is for those who measure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron_offload.core.row_config import MODEL, UNITS, RowConfig, ranges

Part: TypeAlias = tuple[str, int | Literal["all", "recompute"]]
"""A site, and what is done there: it is recomputed, or so many of its tensors are offloaded."""

LINK_SHARE = 1.1  # of what a link carries while layers run: behind the last one there is more
BACKWARD_SHARE = 3  # a forward and a backward, in forwards
_NUM_PRICES = 4


class Action(NamedTuple):
    """What rows may do with one layer."""

    parts: tuple[Part, ...] = ()
    freed_bytes: int = 0
    us: float = 0.0
    """What a step takes longer."""
    copied_bytes: int = 0
    """To the host, and back as well."""


KEEP = Action()
"""Nothing is done."""

Layers: TypeAlias = Mapping[int, Sequence[Action]]
"""Of each layer, by its number, what is done at first and then what may be done in its place."""


def total(actions: Collection[Action]) -> Action:
    """Return what actions do together."""
    return Action(
        tuple(part for one in actions for part in one.parts),
        sum(one.freed_bytes for one in actions),
        sum(one.us for one in actions),
        sum(one.copied_bytes for one in actions),
    )


class Plan(NamedTuple):
    """What is done with each layer, by its number."""

    actions: Mapping[int, Action]
    freed_bytes: int
    us: float
    copied_bytes: int
    min_tokens: int = 0
    """Of the calls in which it is followed."""

    @classmethod
    def of(cls, actions: Mapping[int, Action]) -> Plan:
        """Make it of what is done with each layer."""
        return cls(actions, *total(actions.values())[1:])

    def rows(self) -> tuple[RowConfig, ...]:
        """Return the plan as a person writes it."""
        layers: dict[Part, list[int]] = {}
        for number, action in sorted(self.actions.items()):
            for part in action.parts:
                layers.setdefault(part, []).append(number)
        rows = []
        for (site, what), numbers in layers.items():
            does: dict[str, Any] = {"recompute": True} if what == "recompute" else {"offload": what}
            is_everywhere = site in (*UNITS, MODEL)  # functions know no layer
            which = "all" if is_everywhere else ranges(numbers)
            does |= {"min_tokens": self.min_tokens} if self.min_tokens else {}
            rows.append(RowConfig.model_validate({"site": site, "layers": which, **does}))
        return tuple(rows)


def link_bytes(
    forward_us: Mapping[int, float], bytes_per_us: float, deep: Collection[int]
) -> dict[int, float]:
    """Return of each layer how much of it and of those behind it can be copied by its backward.

    What a layer saves is copied while those behind it run: of the last nothing, but where it is
    ``deep`` in a pipeline, so that backwards of other microbatches lie between. Layers come, and
    are returned, in the order of their calls.
    """
    found, behind_us = dict[int, float](), 0.0
    for number, us in reversed([*forward_us.items()]):
        is_deep = number in deep
        found[number] = bytes_per_us * (BACKWARD_SHARE * (behind_us + us) if is_deep else behind_us)
        behind_us += us
    return dict(reversed(found.items()))


def frontier(kinds: Sequence[Layers], link_bytes: Mapping[int, float] | None = None) -> list[Plan]:
    """Return plans in the order of what they free, beginning with what is done at first.

    Of the others each takes longer than those before it. Where the link is short, what is offloaded
    first would take it from what could only be offloaded: moves are made anew as if bytes on it had
    a price.

    Args:
        kinds: the layers, without functions that run again, with some in all of them, or both.
        link_bytes: how much of each and of those behind it can be copied before backward comes, in
            the order of their calls; by default anything, in the order of their numbers.
    """
    prices = [0.0] if link_bytes is None else _prices(kinds)
    found = [
        plan
        for layers, price in product(kinds, prices)
        for plan in _moves(layers, link_bytes or {}, price)
    ]
    plans: list[Plan] = []
    more = (plan for plan in found if plan.freed_bytes > found[0].freed_bytes)
    for plan in sorted(more, key=lambda one: (-one.freed_bytes, one.us)):
        if not plans or (plan.freed_bytes < plans[-1].freed_bytes and plan.us < plans[-1].us):
            plans.append(plan)
    return [found[0], *plans[::-1]]


def _prices(kinds: Sequence[Layers]) -> list[float]:
    """Return what a byte on the link is taken to cost: nothing, or as much as to recompute it."""
    every = {action for layers in kinds for own in layers.values() for action in own}
    reruns = sorted(x.us / x.freed_bytes for x in every if x.freed_bytes > 0 and not x.copied_bytes)
    if not (reruns and any(one.copied_bytes for one in every)):
        return [0.0]
    last = len(reruns) - 1
    return [0.0, *sorted({reruns[last * step // _NUM_PRICES] for step in range(_NUM_PRICES + 1)})]


def _moves(layers: Layers, link_bytes: Mapping[int, float], price: float) -> list[Plan]:
    """Return plans, in each of which one layer does what frees more than in the one before."""
    alike: dict[tuple[Action, ...], list[Action]] = {}
    order = [*filter(layers.__contains__, link_bytes)] or sorted(layers)
    choices = {
        number: alike.setdefault(tuple(layers[number]), _worthy(layers[number])) for number in order
    }
    taken = {number: layers[number][0] for number in choices}
    left = dict.fromkeys(choices, math.inf) | dict(link_bytes)
    plans: list[Plan] = []
    while True:
        plans.append(Plan.of(taken))
        # Of layers that are alike the first: what it saves lives longest.
        first: dict[tuple[int, Action], int] = {}
        for number, action in taken.items():
            first.setdefault((id(choices[number]), action), number)
        most = dict(zip(choices, accumulate((left[x] for x in choices), min), strict=True))
        best, move = (0.0, 0), (-1, KEEP)  # what it frees for its time, and what it frees
        for (_, before), number in first.items():
            for after in choices[number]:
                freed_bytes = after.freed_bytes - before.freed_bytes
                copied_bytes = after.copied_bytes - before.copied_bytes
                if freed_bytes <= 0 or copied_bytes > max(0.0, most[number]):
                    continue
                us = after.us - before.us + price * copied_bytes
                worth = (freed_bytes / us if us > 0 else math.inf), freed_bytes
                if worth > best:
                    best, move = worth, (number, after)
        number, after = move
        if not after.freed_bytes:
            return plans
        more_bytes = after.copied_bytes - taken[number].copied_bytes
        left |= {x: left[x] - more_bytes for x in order[: order.index(number) + 1]}
        taken = taken | {number: after}


def _worthy(actions: Sequence[Action]) -> list[Action]:
    """Return the actions that free more than all that cost no more, and copy no more."""
    found: list[Action] = []
    for action in sorted(actions, key=lambda one: (one.us, -one.freed_bytes, one.copied_bytes)):
        _, freed_bytes, _, copied_bytes = action
        if all(x.freed_bytes < freed_bytes or x.copied_bytes > copied_bytes for x in found):
            found.append(action)
    return found

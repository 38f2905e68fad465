"""The frontier of a model: plans of rows, each freeing more than the one before, for least time.

A plan says of each layer which of its actions is taken. From one plan to the next a single layer
takes another action, the one that frees most for what it costs. Every plan of the list is a prefix
of those moves; which one is followed is for those who measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron_offload.core.row_config import UNITS, RowConfig, ranges

Part: TypeAlias = tuple[str, int | Literal["all", "recompute"]]
"""A site, and what is done there: it is recomputed, or so many of its tensors are offloaded."""


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


class Plan(NamedTuple):
    """What is done with each layer, by its number."""

    actions: Mapping[int, Action]
    freed_bytes: int
    us: float
    copied_bytes: int

    def rows(self) -> tuple[RowConfig, ...]:
        """Return the plan as a person writes it."""
        layers: dict[Part, list[int]] = {}
        for number, action in sorted(self.actions.items()):
            for part in action.parts:
                layers.setdefault(part, []).append(number)
        rows = []
        for (site, what), numbers in layers.items():
            does = {"recompute": True} if what == "recompute" else {"offload": what}
            which = "all" if site in UNITS else ranges(numbers)  # functions know no layer
            rows.append(RowConfig.model_validate({"site": site, "layers": which, **does}))
        return tuple(rows)


def to_plain(layers: Mapping[int, Sequence[Action]]) -> list[Any]:
    """Return actions of layers in lists, texts and numbers: what JSON has."""
    alike: dict[tuple[Action, ...], list[int]] = {}
    for number, actions in layers.items():
        alike.setdefault(tuple(actions), []).append(number)
    return [[numbers, actions] for actions, numbers in alike.items()]


def of_plain(found: Sequence[Any]) -> dict[int, tuple[Action, ...]]:
    """Return what `to_plain` was given."""
    layers: dict[int, tuple[Action, ...]] = {}
    for numbers, actions in found:
        own = [Action(tuple((site, what) for site, what in x), *more) for x, *more in actions]
        layers |= dict.fromkeys(numbers, tuple(own))
    return dict(sorted(layers.items()))


def frontier(
    layers: Mapping[int, Sequence[Action]], link_bytes: Mapping[int, float] | None = None
) -> list[Plan]:
    """Return plans in the order of what they free, beginning with the one that does nothing.

    ``layers`` has by number what may be done with each; ``link_bytes`` how much of it and of those
    behind it can be copied before backward comes, by default anything.
    """
    alike: dict[tuple[Action, ...], list[Action]] = {}
    choices = {
        number: alike.setdefault(tuple(actions), _worthy(actions))
        for number, actions in sorted(layers.items())
    }
    taken = dict.fromkeys(choices, KEEP)
    left = dict.fromkeys(choices, math.inf) | dict(link_bytes or {})
    plans = [Plan(dict(taken), 0, 0.0, 0)]
    while True:
        # Of layers that are alike the first: what it saves lives longest.
        first: dict[tuple[int, Action], int] = {}
        for number, action in taken.items():
            first.setdefault((id(choices[number]), action), number)
        most = dict(zip(choices, accumulate((left[x] for x in choices), min), strict=True))
        best: tuple[tuple[float, int], int, Action] | None = None
        for (_, before), number in first.items():
            for after in choices[number]:
                if after.copied_bytes - before.copied_bytes > max(0.0, most[number]):
                    continue
                freed_bytes, us = after.freed_bytes - before.freed_bytes, after.us - before.us
                worth = (freed_bytes / us if us > 0 else math.inf), freed_bytes
                if freed_bytes > 0 and (best is None or worth > best[0]):
                    best = worth, number, after
        if best is None:
            return plans
        _, number, after = best
        before, taken[number] = taken[number], after
        copied_bytes = after.copied_bytes - before.copied_bytes
        left |= {x: left[x] - copied_bytes for x in choices if x <= number}
        last = plans[-1]
        plans.append(
            Plan(
                dict(taken),
                last.freed_bytes + after.freed_bytes - before.freed_bytes,
                last.us + after.us - before.us,
                last.copied_bytes + copied_bytes,
            )
        )


def _worthy(actions: Sequence[Action]) -> list[Action]:
    """Return the actions that free more than all that cost no more, and copy no more."""
    found: list[Action] = []
    for action in sorted(actions, key=lambda one: (one.us, -one.freed_bytes, one.copied_bytes)):
        _, freed_bytes, _, copied_bytes = action
        if all(x.freed_bytes < freed_bytes or x.copied_bytes > copied_bytes for x in found):
            found.append(action)
    return found

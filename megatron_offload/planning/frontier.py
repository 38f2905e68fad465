"""The frontier of a model: plans of rows, each freeing more than the one before, for least time.

A plan says of each layer which of its actions is taken. Plans are made by moves: a single layer
takes another action, the one that frees most for what it costs; or all do at once where functions
begin to run again, as these know no layer. Which one is followed is for those who measure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron_offload.core.row_config import MODEL, UNITS, RowConfig, ranges

Part: TypeAlias = tuple[str, int | Literal["all", "recompute"]]
"""A site, and what is done there: it is recomputed, or so many of its tensors are offloaded."""


_NUM_PRICES = 4

_Worth: TypeAlias = tuple[float, int]
"""What a move frees for its time, and what it frees."""


class Action(NamedTuple):
    """What rows may do with one layer."""

    parts: tuple[Part, ...] = ()
    freed_bytes: int = 0
    us: float = 0.0
    """What a step takes longer."""
    copied_bytes: int = 0
    """To the host, and back as well."""

    @property
    def has_units(self) -> bool:
        """Whether functions run again, which do so in all layers or in none."""
        return any(site in UNITS for site, _ in self.parts)


KEEP = Action()
"""Nothing is done."""


def both(one: Action, other: Action) -> Action:
    """Return what two actions do together."""
    return Action(
        one.parts + other.parts,
        one.freed_bytes + other.freed_bytes,
        one.us + other.us,
        one.copied_bytes + other.copied_bytes,
    )


class Plan(NamedTuple):
    """What is done with each layer, by its number."""

    actions: Mapping[int, Action]
    freed_bytes: int
    us: float
    copied_bytes: int
    min_tokens: int = 0
    """Of the calls in which it is followed."""

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

    Of the others each takes longer than those before it. Where the link is short, what is offloaded
    first would take it from what could only be offloaded: moves are made anew as if bytes on it had
    a price.

    Args:
        layers: by number what may be done with each.
        link_bytes: how much of each and of those behind it can be copied before backward comes; by
            default anything.
    """
    found = [
        plan for price in _prices(layers, link_bytes) for plan in _moves(layers, link_bytes, price)
    ]
    plans: list[Plan] = []
    for plan in sorted(found, key=lambda one: (-one.freed_bytes, one.us)):
        is_first = not plans or plan.freed_bytes < plans[-1].freed_bytes
        if plan.freed_bytes > 0 and is_first and (not plans or plan.us < plans[-1].us):
            plans.append(plan)
    return [found[0], *plans[::-1]]


def _prices(
    layers: Mapping[int, Sequence[Action]], link_bytes: Mapping[int, float] | None
) -> list[float]:
    """Return what a byte on the link is taken to cost: nothing, or as much as to recompute it."""
    every = {action for actions in layers.values() for action in actions}
    reruns = sorted(x.us / x.freed_bytes for x in every if x.freed_bytes > 0 and not x.copied_bytes)
    if link_bytes is None or not (reruns and any(one.copied_bytes for one in every)):
        return [0.0]
    last = len(reruns) - 1
    return [0.0, *sorted({reruns[last * step // _NUM_PRICES] for step in range(_NUM_PRICES + 1)})]


def _moves(
    layers: Mapping[int, Sequence[Action]],
    link_bytes: Mapping[int, float] | None,
    price: float,
) -> list[Plan]:
    """Return plans, in each of which one layer does what frees more, or all run functions again."""
    alike: dict[tuple[Action, ...], _Choices] = {}
    choices = {
        number: alike.setdefault(tuple(actions), _choices_of(actions))
        for number, actions in sorted(layers.items())
    }
    taken = dict.fromkeys(choices, KEEP)
    left = dict.fromkeys(choices, math.inf) | dict(link_bytes or {})
    has_units = False
    plans = [Plan(taken, 0, 0.0, 0)]
    while True:
        # Of layers that are alike the first: what it saves lives longest.
        first: dict[tuple[int, Action], int] = {}
        for number, action in taken.items():
            first.setdefault((id(choices[number]), action), number)
        most = dict(zip(choices, accumulate((left[x] for x in choices), min), strict=True))
        best: tuple[_Worth, dict[int, Action]] = (0.0, 0), {}
        for (_, before), number in first.items():
            for after in choices[number][has_units]:
                if after.copied_bytes - before.copied_bytes > max(0.0, most[number]):
                    continue
                worth = _worth(before, after, price)
                if worth > best[0]:
                    best = worth, {number: after}
        for with_units in () if has_units else _with_units(taken, choices):
            before, after = total(taken.values()), total(with_units.values())
            worth = _worth(before, after, price)
            if worth > best[0] and _fits(taken, with_units, left):
                best = worth, with_units
        has_units = has_units or any(x.has_units for x in best[1].values())
        if not best[1]:
            return plans
        last, taken = taken, taken | best[1]
        more_bytes = 0
        for number in reversed(choices):
            more_bytes += taken[number].copied_bytes - last[number].copied_bytes
            left[number] -= more_bytes
        plans.append(Plan(taken, *total(taken.values())[1:]))


class _Choices(NamedTuple):
    """What may be done with a layer, without and with functions that run again."""

    without: list[Action]
    with_units: list[Action]


def _worth(before: Action, after: Action, price: float) -> _Worth:
    """Return how good a move is; nothing where it frees nothing."""
    freed_bytes = after.freed_bytes - before.freed_bytes
    if freed_bytes <= 0:
        return 0.0, 0
    us = after.us - before.us + price * (after.copied_bytes - before.copied_bytes)
    return (freed_bytes / us if us > 0 else math.inf), freed_bytes


def _choices_of(actions: Sequence[Action]) -> _Choices:
    with_units = [action for action in actions if action.has_units]
    without = [action for action in actions if not action.has_units]
    # In what runs again as a whole no function does by itself.
    neutral = [action for action in without if ("layer", "recompute") in action.parts]
    plain = _worthy(without)
    return _Choices(plain, _worthy([*with_units, *neutral]) if with_units else plain)


def _with_units(
    taken: Mapping[int, Action], choices: Mapping[int, _Choices]
) -> Iterator[dict[int, Action]]:
    """Yield of each layer what frees as much as now, or the most, where functions run again.

    What takes least comes first, then what copies least; nothing where no layer has any.
    """
    if any(with_units is not without for without, with_units in choices.values()):
        for order in (_by_time, _by_copies):
            found = dict(taken)
            for number, (without, with_units) in choices.items():
                if with_units is not without:
                    enough = (x for x in with_units if x.freed_bytes >= taken[number].freed_bytes)
                    most = max(with_units, key=lambda one: one.freed_bytes)
                    found[number] = min(enough, key=order, default=most)
            yield found


def _by_time(action: Action) -> tuple[float, float]:
    return action.us, action.copied_bytes


def _by_copies(action: Action) -> tuple[float, float]:
    return action.copied_bytes, action.us


def _fits(
    before: Mapping[int, Action], after: Mapping[int, Action], left: dict[int, float]
) -> bool:
    """Whether the link carries what is copied more."""
    more = (after[x].copied_bytes - before[x].copied_bytes for x in reversed(left))
    return all(
        x <= max(0.0, left[n]) for x, n in zip(accumulate(more), reversed(left), strict=True)
    )


def total(actions: Collection[Action]) -> Action:
    """Return what actions free and take together, and what they copy."""
    return Action(
        (),
        sum(one.freed_bytes for one in actions),
        sum(one.us for one in actions),
        sum(one.copied_bytes for one in actions),
    )


def _worthy(actions: Sequence[Action]) -> list[Action]:
    """Return the actions that free more than all that cost no more, and copy no more."""
    found: list[Action] = []
    for action in sorted(actions, key=lambda one: (one.us, -one.freed_bytes, one.copied_bytes)):
        _, freed_bytes, _, copied_bytes = action
        if all(x.freed_bytes < freed_bytes or x.copied_bytes > copied_bytes for x in found):
            found.append(action)
    return found

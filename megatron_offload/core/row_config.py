"""A row: what is done at one site of a model's layers.

A plan that a person writes is a list of rows; what none of them names is kept, and costs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import Converted, StrictModel, default

UNITS = ("norm", "mlp_act")
"""What rows recompute wherever it is: modules of known classes, and Megatron's functions."""

EXPERTS = ".experts"
"""In an MLP: they run again where routing can't, or wouldn't to the bit."""

MOE_ACT = "moe_act"
"""The activation of Megatron's grouped experts, which it recomputes itself."""

LOSS = "loss"
"""The site of a model's loss, which is computed by rows of its logits."""

MODEL = "model"
"""The site of all that a model saves, whatever layer it is in, and if it is in none."""

_RANGES = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


def _ranges(value: Any) -> str:
    text = str(value).replace(" ", "")
    if not (text == "all" or _RANGES.fullmatch(text)):
        raise ValueError("layers are 'all', a number, or numbers such as '0-13,20'")
    if text != "all" and any(first > last for first, last in _parts(text)):
        raise ValueError("the first of some layers comes before the last, as in '0-13'")
    return text


def _most(value: Any) -> Any:
    if value not in (None, "all") and not (type(value) is int and value >= 1):
        raise ValueError("offload is 'all', or how many of the largest tensors, such as 2")
    return value


def _parts(text: str) -> list[tuple[int, int]]:
    ends = (part.partition("-") for part in text.split(","))
    return [(int(first), int(last or first)) for first, _, last in ends]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as rows take them: ``0-13,20``."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda one: one[1] - one[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


class RowConfig(StrictModel):
    """One site of some layers, and one of three actions: offload, recompute, by_rows."""

    site: Annotated[str, Field(min_length=1, max_length=200)]
    """A module within each layer by its dotted name, such as ``mlp.act_fn`` or ``mlp.*``; ``layer``
    for the layer itself; ``mlp`` and ``attention`` under whatever name; ``loss``; or ``model`` for
    all that is saved or, where the program marks groups, marked."""

    layers: Converted[Annotated[str, BeforeValidator(_ranges)], int | str] = default("all")
    """Which layers: ``all``, or numbers from 0 over the whole model, such as ``0-13,20``."""

    offload: Annotated[int | Literal["all"] | None, BeforeValidator(_most)] = None
    """Offload what is saved inside the site: ``all`` of it, or so many of the largest tensors."""

    recompute: bool = False
    """Recompute the site in backward."""

    by_rows: bool = False
    """Compute the loss by rows of its logits, with the same bits."""

    min_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    """Only in calls whose first tensor has so many elements, but for its last dimension: memory
    is short in long forwards alone."""

    def model_post_init(self, _: Any, /) -> None:
        """Refuse a row without an action, with several, or with one that the site can't have."""
        if bool(self.offload) + self.recompute + self.by_rows != 1:
            raise ConfigError(
                f"the row of {self.site!r} needs one action: offload: all, offload: 2, "
                "recompute: true, or by_rows: true"
            )
        if self.by_rows != (self.site == LOSS) or (self.by_rows and self.layers != "all"):
            raise ConfigError("by_rows: true is for site: loss, and that takes nothing else")
        if self.site == MODEL and (self.offload, self.layers) != ("all", "all"):
            raise ConfigError("site: model takes offload: all and nothing else")
        if self.min_tokens and (self.by_rows or self.site in (MODEL, *UNITS)):
            raise ConfigError(f"min_tokens is for modules of layers, and not for {self.site!r}")

    @property
    def most(self) -> int | None:
        """How many of its largest tensors are offloaded; None where that is all."""
        return None if self.offload == "all" else self.offload

    def has_layer(self, number: int) -> bool:
        """Whether a layer is among the row's."""
        parts = [] if self.layers == "all" else _parts(self.layers)
        return not parts or any(first <= number <= last for first, last in parts)

    @property
    def last_layer(self) -> int:
        """The highest number of a layer that it names; -1 where it names none."""
        return -1 if self.layers == "all" else max(last for _, last in _parts(self.layers))

    def __str__(self) -> str:
        does = f"offload: {self.offload}" if self.offload else "recompute: true"
        does = "by_rows: true" if self.by_rows else does
        layers = f'"{self.layers}"' if "," in self.layers else self.layers  # as in YAML
        is_plain = re.fullmatch(r"[\w.*-]+", self.site)
        site = self.site if is_plain else json.dumps(self.site)
        when = f", min_tokens: {self.min_tokens}" if self.min_tokens else ""
        return f"{{layers: {layers}, site: {site}, {does}{when}}}"

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of its layers; none where these are all."""
        return tuple(filter(self.has_layer, range(self.last_layer + 1)))

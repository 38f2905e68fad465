"""The steps of one model, as its forwards and backwards come: when one is over, and its size.

A program needn't say where steps begin: a forward begins one where the backwards of all before it
are over. Several forwards before their backwards are one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_offload.engine.boundary import hook_backward
from megatron_offload.model_map.module_hooks import hook_calls, remove, tokens_of

_MOST_FORWARDS = 16  # a backward that never comes, or always late, ends no step


class ModelSteps:
    """Counts what lies between `enter` and `leave` as one forward, by hooks of first layers.

    Of several that a forward calls, such as those of an encoder and a decoder, the first counts,
    and of its calls the first: ``layer_begins`` is called with how many tokens it is given
    (`tokens_of`).

    Attributes:
        num_pending: forwards whose backward is still to come.
        most_pending: of these the most at a time, in any step.
        tokens: of each forward of this step; none where it had no forward of the model.
        ended: what ``now`` has returned when the last backward was over: an optimizer's step, data
            and evaluations lie behind it. None where none has.
    """

    def __init__(
        self,
        first_layers: Iterable[nn.Module],
        now: Callable[[], Any],
        layer_begins: Callable[[float], None],
    ) -> None:
        self.tokens: list[float] = []
        self.ended: Any = None
        self._now, self._layer_begins = now, layer_begins
        self._waits = False
        """Whether a forward has begun of which no layer was called yet."""
        self._open: nn.Module | None = None
        """Whose call is counted, and not over."""
        self.num_pending = self.most_pending = self._number = 0
        hooked = [hook_calls(x, self._begin, self._end, owner=ModelSteps) for x in first_layers]
        self._handles = [handle for handles in hooked for handle in handles]

    def close(self) -> None:
        """Count no more."""
        remove(self._handles)

    def is_over(self) -> bool:
        """Whether the step is, now that another forward is about to begin."""
        return not self.num_pending or len(self.tokens) >= _MOST_FORWARDS

    def restart(self) -> None:
        """Begin a step."""
        self._number += 1
        self.tokens, self.ended, self.num_pending = [], None, 0

    def enter(self) -> None:
        """A forward begins."""
        self._waits, self._open = True, None

    def leave(self) -> None:
        """It ends."""
        self._waits, self._open = False, None

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._waits:
            self._waits, self._open = False, module
            tokens = tokens_of(args, kwargs)
            self.tokens.append(tokens if math.isfinite(tokens) else 1.0)
            self._layer_begins(self.tokens[-1])

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open is module:
            self._open = None
            if hook_backward(output, partial(self._reach_first, self._number)):
                self.num_pending += 1
                self.most_pending = max(self.most_pending, self.num_pending)

    def _reach_first(self, number: int, grad: object) -> None:
        if number == self._number:  # else it is of a step that was given up
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.num_pending = max(0, self.num_pending - 1)
        self.ended = self._now()

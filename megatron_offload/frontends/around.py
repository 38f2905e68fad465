"""What the front doors have in common that are entered around forwards.

Owns entering, leaving, and what is asked of a step that nobody marks. Must not know what is chosen
to move. Read next: `megatron_offload.engine.automatic`.
"""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from typing import Self

from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.stats import StepStats

__all__ = ["AroundForwards"]


class AroundForwards(AbstractContextManager["AroundForwards", None]):
    """A context for any number of forwards, one after the other or one inside the other."""

    @property
    @abc.abstractmethod
    def _groups(self) -> AutomaticGroups:
        """What moves the tensors."""

    def __enter__(self) -> Self:
        self._groups.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._groups.end(has_failed=kind is not None)

    @property
    def last_step(self) -> StepStats:
        """Counters of the last step that is over."""
        return self._groups.manager.last_step

    def end_step(self) -> bool:
        """End the step now if nothing that it saved is left, as the next forward would.

        Returns:
            Whether there was one; its counters are in `last_step` then.
        """
        return self._groups.end_step_if_over()

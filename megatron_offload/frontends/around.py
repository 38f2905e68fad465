"""What the front doors have in common that are entered around forwards."""

from __future__ import annotations

import abc
from typing import Self

from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.engine.automatic import AutomaticGroups, unpack
from megatron_offload.engine.stats import StepStats


class AroundForwards(saved_tensors_hooks, abc.ABC):
    """A context for any number of forwards, one after the other or one inside the other.

    Its ``pack_hook`` and ``unpack_hook`` are those of saved tensors; packed outside of the context
    a tensor stays on the device.
    """

    def __init__(self) -> None:
        super().__init__(self._groups.pack, unpack)

    @property
    @abc.abstractmethod
    def _groups(self) -> AutomaticGroups:
        """What moves the tensors."""

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns nothing
        self._groups.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self._groups.end(has_failed=any(part is not None for part in exception))

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

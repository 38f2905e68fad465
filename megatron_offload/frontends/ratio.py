"""Offload of a share of the activations, counted in bytes, under a tag.

What something else keeps on the device anyway is neither offloaded nor counted, and neither is what
backward recomputes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch

from megatron_offload.config import OffloadConfig
from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.frontends.around import AroundForwards, followed, with_nearest


def get_tensor_memory(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class _Tag:
    """What is known of one tag, and what offloads its tensors."""

    def __init__(self, name: str, manager: PipelineOffloadManager) -> None:
        self.ratio = 0.0
        self.seen_bytes = self.chosen_bytes = self.total_bytes = 0
        is_size_set = {"min_tensor_bytes", "min_tensor_elements"} & manager.config.model_fields_set
        self.groups = AutomaticGroups(
            manager,
            name,
            min_tensor_bytes=None if is_size_set else 0,
            should_offload=self.should_offload,
            on_step=self.begin_step,
        )

    def should_offload(self, num_bytes: int) -> bool:
        """Whether the next block, of this many bytes, is offloaded."""
        self.seen_bytes += num_bytes
        known_bytes = max(self.seen_bytes, self.total_bytes)
        moves = self.chosen_bytes + num_bytes <= self.ratio * known_bytes
        if moves:
            self.chosen_bytes += num_bytes
        return moves

    def begin_step(self) -> None:
        """Learn from the step that is over."""
        self.total_bytes = self.seen_bytes
        self.seen_bytes = self.chosen_bytes = 0


class CPUOffload(AroundForwards):
    """While it is entered, a share of what autograd saves goes to host memory.

    Objects of one tag share its counters, its streams and its host memory, so that one may be made
    for every block; the last one's ratio counts. Blocks of one tag may come several times in a
    step, and tags may nest: the innermost counts. A step of a tag ends when its block is entered
    and nothing that was saved under it is left.

    Args:
        offload_ratio: most of the tag's bytes that is offloaded, from 0 to 1: of those that the
            last step saved, or this one where that is more. What is offloaded is less by at most
            one tensor.
        tag: what is counted together.
        config: how they are offloaded; only for the first object of a tag. All sizes move, and
            count, unless it sets a smallest one.

    Raises:
        ValueError: the ratio is outside [0, 1], the tag is no text, or a config comes for one that
            exists.
        ConfigError: ``config`` sets what a ratio can't follow.
    """

    _tags: ClassVar[dict[str, _Tag]] = {}

    @with_nearest
    def __init__(
        self, offload_ratio: float = 0.1, tag: str = "default", config: OffloadConfig | None = None
    ) -> None:
        if not (hasattr(offload_ratio, "__float__") and 0 <= offload_ratio <= 1):
            raise ValueError(f"offload_ratio must be between 0 and 1, got {offload_ratio!r}")
        if not isinstance(tag, str):
            raise ValueError(f"a tag is a text, got {tag!r}")
        if config is not None and tag in self._tags:
            raise ValueError(f"tag {tag!r} exists: give its configuration to its first object")
        self.offload_ratio = offload_ratio
        self.tag = tag
        if tag not in self._tags:
            _, settings = followed("CPUOffload", config, None)
            self._tags[tag] = _Tag(tag, PipelineOffloadManager(settings))
        self._tag = self._tags[tag]
        super().__init__(self._tag.groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._of_tag, (self.offload_ratio, self.tag, self._tag.groups.manager.config)

    @classmethod
    def _of_tag(cls, offload_ratio: float, tag: str, config: OffloadConfig) -> Self:
        return cls(offload_ratio, tag, None if tag in cls._tags else config)

    @classmethod
    def forget(cls, tag: str) -> None:
        """Free a tag's memory and count it anew; does nothing where there is no such tag."""
        known = cls._tags.pop(tag, None)
        if known is not None:
            known.groups.manager.close()

    get_tensor_memory = staticmethod(get_tensor_memory)

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns nothing
        self._tag.ratio = self.offload_ratio
        return super().__enter__()

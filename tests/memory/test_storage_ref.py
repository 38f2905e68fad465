"""Whether tensors count their changes together."""

from __future__ import annotations

import pytest
import torch

from megatron_offload.memory.storage_ref import count_together


class Interrupts:
    @property
    def _version(self):
        raise KeyboardInterrupt


def test_an_interrupt_leaves_a_version_as_it_was():
    tensor = torch.ones(2)
    with pytest.raises(KeyboardInterrupt):
        count_together(tensor, Interrupts())
    assert tensor._version == 0

"""The saved-tensor hooks that are in force for open groups.

Owns what this manager has pushed on autograd's stack of hooks. Must not know when groups open or
close.

Invariant: after `clear` none of them is in force, whatever cut short the code that was to take them
off. Read next: `megatron_offload.engine.manager`.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.engine.transfers import Transfers

__all__ = ["HookStack"]


class HookStack:
    """The hooks of one manager, in the order of its ``with`` blocks.

    Args:
        transfers: tells this manager's groups from another's.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._hooks: list[saved_tensors_hooks | None] = []

    def __len__(self) -> int:
        return len(self._hooks)

    def push(self, group: OffloadGroup | None) -> None:
        """Let a group catch what autograd saves from here on; None leaves all as it is."""
        hooks = saved_tensors_hooks(group.pack, SavedTensor.unpack) if group is not None else None
        self._hooks.append(hooks)  # first, so that none is in force that isn't known here
        if hooks is not None:
            hooks.__enter__()

    def pop(self) -> None:
        """Undo the last `push`; nothing where `clear` has done it."""
        if not self._hooks:
            return
        hooks = self._hooks[-1]
        if hooks is not None:
            hooks.__exit__()
        self._hooks.pop()

    def clear(self) -> None:
        """Take this manager's hooks off the top of autograd's, whoever was to do that."""
        self._hooks.clear()
        while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            group = getattr(hooks[0], "__self__", None)
            if not isinstance(group, OffloadGroup) or group.transfers is not self._transfers:
                return
            torch._C._autograd._pop_saved_tensors_default_hooks()

"""Finds operations that would make the host of a GPU wait, on a CPU where nothing waits.

Those are the operations whose result, or whose shape, the host must know. Copies to the host are
not seen: on a CPU there are none.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class HostSyncs(TorchDispatchMode):
    """While entered, notes the name of each such operation in `names`."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name
        if name in _INDEXING:  # only a mask's hits have to be counted, for all that the tags say
            waits = any(index is not None and index.dtype is torch.bool for index in args[1])
        else:
            waits = not _TAGS.isdisjoint(operation.tags)
        if waits:
            self.names.append(name)
        return operation(*args, **(kwargs or {}))

"""How long the calls of modules run in one forward, as the device has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.backends.base import Backend
from megatron_offload.engine.module_hooks import ModuleHook
from megatron_offload.model_map.sites import Site, modules_of

_NUM_PAUSES = 100  # of a millisecond: in so many the host launches a forward


class CallTimes:
    """Sees how long the sites of a model run in one forward.

    Where it ``holds_back`` the device behind the host, as long as the device alone needs for them.
    """

    def __init__(
        self, sites: Mapping[str, Site], backend: Backend, *, holds_back: bool = False
    ) -> None:
        self._sites, self._backend, self.holds_back = sites, backend, holds_back
        self._began: list[tuple[Any, float]] = []
        self._spans: list[tuple[str, Any, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._us: dict[str, float] | None = None
        self.scale = 1.0
        """How large the forward is of which times are asked, beside the one that was timed."""

    def begin(self) -> None:
        """Time what comes."""
        for _ in range(_NUM_PAUSES if self.holds_back else 0):
            self._backend.pause()
        for path, module in modules_of(self._sites).items():
            begin, end = ModuleHook(self._begin), ModuleHook(partial(self._end, path))
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
            self._handles.append(module.register_forward_hook(end))

    def end(self) -> None:
        """Time no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _now(self) -> Any:
        return self._backend.timestamp(self._backend.compute_stream())

    def _begin(self, *_: Any) -> None:
        self._began.append((self._now(), self._backend.host_us()))

    def _end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._began:
            began, began_us = self._began.pop()
            self._spans.append((path, began, self._now()))
            self._ended(path, began_us, args, output)

    def _ended(self, path: str, began_us: float, args: Any, output: Any) -> None:
        """Note a call that is over; it began when the host's clock showed ``began_us``."""

    def us(self, path: str) -> float:
        """Return how long all calls of a site have run; waits for the device at first."""
        if self._us is None:
            self._us = defaultdict(float)
            for name, began, ended in self._spans:
                self._us[name] += self._backend.sync_elapsed_us(began, ended)
        return self.scale * self._us[path]

"""The states of the random generators that a function may draw from, to draw the same once more.

Megatron-core's tracker has states of its own, of which its ``fork`` puts one in the place of the
device's. They count as well, whenever that library was imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_uint
from functools import lru_cache
from typing import Any

import numpy as np
import torch


def are_captured(devices: Iterable[str]) -> bool:
    """Whether a graph of one of these types of devices is captured: its states can't be read."""
    modules = [torch.get_device_module(kind) for kind in devices if kind != "cpu"]
    asked = [getattr(module, "is_current_stream_capturing", None) for module in modules]
    return any(is_captured is not None and is_captured() for is_captured in asked)


def other_states() -> tuple[Any, Any]:
    """Return Python's and numpy's states, which are not put back, to compare with later ones."""
    python = bytes(_python_words) if _is_known else random.getstate()
    of_numpy: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(of_numpy) is not np.random.MT19937:
        return python, repr(of_numpy.state)
    return python, bytes(_numpys(of_numpy))


def _words_at(address: int) -> Any:
    """Return what a Mersenne twister is; both libraries' own copies take fifty times as long."""
    return (c_uint * 625).from_address(address)


@lru_cache(maxsize=1)
def _numpys(generator: Any) -> Any:
    return _words_at(generator.ctypes.state_address)


_is_known = sys.implementation.name == "cpython" and hasattr(random, "_inst")
if _is_known:
    _python_words = _words_at(id(random._inst) + object.__basicsize__)
    _is_known = random.getstate()[1] == (*_python_words[1:], _python_words[0])


class RandomStates:
    """The states as they are when this is made: the host's, these devices', and the tracker's."""

    def __init__(self, devices: Iterable[str] = ()) -> None:
        self._states = {"cpu": torch.default_generator.get_state()}
        for kind in devices:
            if kind != "cpu":
                self._states[kind] = torch.get_device_module(kind).get_rng_state()
        self._tracked = _tracked()
        for name, state in self._tracked.items():
            if isinstance(state, torch.Generator):  # as CUDA graphs may use
                self._tracked[name] = state.get_state()

    def are_current(self) -> bool:
        """Whether nothing was drawn since."""
        found = RandomStates(self._states)
        return all(
            now.keys() == then.keys() and all(torch.equal(now[name], then[name]) for name in now)
            for now, then in ((found._states, self._states), (found._tracked, self._tracked))
        )

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that draws from these; behind it all is as it was before."""
        now, tracked_now = RandomStates(self._states), _tracked()
        tracked = tracked_now.copy()
        for name, bits in self._tracked.items():
            state = tracked[name]
            is_generator = isinstance(state, torch.Generator)
            tracked[name] = state.clone_state().set_state(bits) if is_generator else bits
        try:
            _set(self._states, tracked)
            return function(*args)
        finally:
            _set(now._states, tracked_now)


def _tracker() -> Any:
    home = sys.modules.get("megatron.core.tensor_parallel.random")
    return getattr(home, "_CUDA_RNG_STATE_TRACKER", None)


def _tracked() -> dict[str, Any]:
    tracker = _tracker()
    return {} if tracker is None else dict(tracker.get_states())


def _set(states: Mapping[str, torch.Tensor], tracked: dict[str, Any]) -> None:
    for kind, state in states.items():
        if kind == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(kind).set_rng_state(state)
    if tracked:
        _tracker().set_states(tracked)

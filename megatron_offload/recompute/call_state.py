"""What a call runs under besides its arguments, so that it can run again under the same.

Grad mode, autocast, modes of dispatch and of functions, torch's own switches, by which kernels are
chosen, and the states of the random generators that it may draw from. Megatron-core's tracker has
states of its own, of which its ``fork`` puts one in the place of the device's: they count as well,
whenever that library was imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from ctypes import c_uint
from functools import lru_cache, partial
from itertools import chain, product, starmap
from operator import call
from typing import Any, ClassVar

import numpy as np
import torch
from torch._C import _is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as _num_modes
from torch._C import _len_torch_function_stack as _num_function_modes
from torch._C._autograd import (  # type: ignore[attr-defined]  # its stub has not all
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_is_enabled,
)
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _pop_mode, _push_mode

from megatron_offload.engine.hooks import device_context, leave_modes

_HERE = nullcontext()

PackHook = Callable[[torch.Tensor], Any]

_NAMED = """cudnn_enabled cudnn_benchmark cudnn_deterministic mkldnn_enabled mkldnn_deterministic
    nnpack_enabled blas_preferred_backend cublas_allow_fp16_accumulation
    cublas_allow_fp16_reduced_precision_reduction cublas_allow_bf16_reduced_precision_reduction
    sdp_priority_order flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled
    cudnn_sdp_enabled"""
"""Switches of ``torch._C``, as ``_get_`` and ``_set_`` end, but for the last four: of these
``_set_sdp_use_flash`` is the first one's."""

_PRECISIONS = ("generic", "all"), *product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))
"""Of float32, by backend and kind of operation."""


def _set_of(name: str) -> Callable[..., Any]:
    kernel = name.removesuffix("_sdp_enabled")
    setter = getattr(torch._C, f"_set_{name}" if kernel == name else f"_set_sdp_use_{kernel}")
    return lambda value: setter(*value) if isinstance(value, tuple) else setter(value)


def _switches() -> Iterator[tuple[Callable[[], Any], Callable[..., Any]]]:
    """Yield what reads a switch, and what sets it to what was read."""
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    for kind in ("cpu", "cuda"):
        yield (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind))
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    for name in _NAMED.split():
        if hasattr(torch._C, f"_get_{name}"):  # not every version has all
            yield getattr(torch._C, f"_get_{name}"), _set_of(name)
    for backend, kind in _PRECISIONS:
        yield (
            partial(torch._C._get_fp32_precision_getter, backend, kind),
            partial(torch._C._set_fp32_precision_setter, backend, kind),
        )


_SWITCHES = tuple(_switches())
_GETTERS = tuple(read for read, _ in _SWITCHES)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Keep what is saved out of the hooks around; a pack and unpack hook."""
    return tensor


class CallState:
    """The state as it is when this is made.

    ``keeps_grad`` says whether grad mode counts: what is known not to ask runs quicker without.
    ``random_states`` is None of what draws nothing.
    """

    __slots__ = ("_device_context", "_has_grad", "_random_states", "_values")

    _last: ClassVar[list[Any]] = []

    def __init__(
        self, random_states: RandomStates | None = None, *, keeps_grad: bool = False
    ) -> None:
        self._random_states = random_states
        values, last = [*map(call, _GETTERS)], CallState._last
        CallState._last = self._values = last if values == last else values  # all keep one
        self._has_grad = keeps_grad and torch.is_grad_enabled()
        self._device_context = device_context() if _num_function_modes() else None

    def run(self, function: Callable[..., Any], *args: Any, pack: PackHook = as_it_is) -> Any:
        """Call a function under this state; afterwards all is as it was before.

        ``pack`` is given what it saves.
        """
        values = [*map(call, _GETTERS)]
        is_usual = values == self._values and self._device_context is None
        if is_usual and not (_num_modes() or _num_function_modes() or _is_any_autocast_enabled()):
            return self._run(function, args, pack)
        with ExitStack() as undo:
            for (_, put), now, then in zip(_SWITCHES, values, self._values, strict=True):
                if now != then:
                    undo.callback(put, now)
                    put(then)
            # Casts of weights in the cache of autocast would outlive this call.
            undo.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            leave_modes(undo)
            if self._device_context is not None:
                _push_mode(self._device_context)
                undo.callback(_pop_mode)
            return self._run(function, args, pack)

    def _run(self, function: Callable[..., Any], args: Sequence[Any], pack: PackHook) -> Any:
        had_grad, has_hooks = torch.is_grad_enabled(), _saved_tensors_hooks_is_enabled()
        torch._C._set_grad_enabled(self._has_grad)
        if has_hooks:
            _push_saved_tensors_default_hooks(pack, as_it_is)
        try:
            if self._random_states is None:
                return function(*args)
            return self._random_states.run(function, *args)
        finally:
            if has_hooks:
                _pop_saved_tensors_default_hooks()
            torch._C._set_grad_enabled(had_grad)


def are_captured(devices: Iterable[torch.device]) -> bool:
    """Whether a graph of one of these devices is captured: its random states can't be read."""
    modules = (getattr(torch, device.type) for device in devices)
    return any(getattr(module, "is_current_stream_capturing", bool)() for module in modules)


def devices_of(leaves: Iterable[Any]) -> set[torch.device]:
    """Return the devices of tensors among these, but the host, which all have."""
    found = {x.device for x in leaves if isinstance(x, torch.Tensor)}
    return {device for device in found if device.type not in ("cpu", "meta")}


def other_states() -> tuple[Any, Any]:
    """Return what of Python's and numpy's states, which aren't put back, differs in later ones."""
    python = _mark_of(_python_words) if _is_known else random.getstate()
    of_numpy: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(of_numpy) is not np.random.MT19937:
        return python, repr(of_numpy.state)
    return python, _mark_of(_numpys(of_numpy))


def _words_at(address: int) -> Any:
    """Return what a Mersenne twister is; both libraries' own copies take fifty times as long."""
    return (c_uint * 625).from_address(address)


def _mark_of(words: Any) -> tuple[int, int, int]:
    """Return its position, which Python has first and numpy last, and two of its other words.

    Each draw moves the position on; where it begins anew all words are others.
    """
    return words[0], words[1], words[624]


@lru_cache(maxsize=1)
def _numpys(generator: Any) -> Any:
    return _words_at(generator.ctypes.state_address)


_python_words = _words_at(id(random._inst) + object.__basicsize__)
_is_known = random.getstate()[1] == (*_python_words[1:], _python_words[0])


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return the host's generator and those of devices, as far as these have one each."""
    found = [torch.default_generator]
    for device in devices:
        own = getattr(getattr(torch, device.type), "default_generators", ())
        found += own[device.index : device.index + 1]
    return found


class RandomStates:
    """The states when this is made: of these generators, and of the tracker."""

    __slots__ = ("_generators", "_states", "_tracked")

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._states = [generator.get_state() for generator in generators]
        self._tracked = _tracked()
        for name, state in self._tracked.items():
            if isinstance(state, torch.Generator):  # as CUDA graphs may use
                self._tracked[name] = state.get_state()

    def now(self) -> RandomStates:
        """Return the states of the same as they are now."""
        return RandomStates(self._generators)

    def are_current(self) -> bool:
        """Whether nothing was drawn since."""
        now = self.now()
        if now._tracked.keys() != self._tracked.keys():
            return False
        tracked = zip(self._tracked.values(), map(now._tracked.get, self._tracked), strict=True)
        both = chain(zip(self._states, now._states, strict=True), tracked)
        return all(starmap(torch.equal, both))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that draws from these; behind it all is as it was before."""
        now, tracked_now = self.now(), _tracked()
        tracked = tracked_now.copy()
        for name, bits in self._tracked.items():
            state = tracked[name]
            is_generator = isinstance(state, torch.Generator)
            tracked[name] = state.clone_state().set_state(bits) if is_generator else bits
        try:
            self._set(tracked)
            return function(*args)
        finally:
            now._set(tracked_now)

    def _set(self, tracked: dict[str, Any]) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        if tracked:
            _tracker().set_states(tracked)


def _tracker() -> Any:
    home = sys.modules.get("megatron.core.tensor_parallel.random")
    return getattr(home, "_CUDA_RNG_STATE_TRACKER", None)


def _tracked() -> dict[str, Any]:
    tracker = _tracker()
    return {} if tracker is None else dict(tracker.get_states())


def _vmap_level() -> int:
    both = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting
    return [*map(call, both)][1]  # in C, so that no interrupt comes in between


def outside_vmap() -> AbstractContextManager[None]:
    """Leave all of vmap, by which a backward may take gradients in batches, of tensors without."""
    return _outside_vmap() if _vmap_level() or peek_interpreter_stack() else _HERE


@contextmanager
def _outside_vmap() -> Iterator[None]:
    level = _vmap_level()
    for _ in range(level):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(level):
            torch._C._vmapmode_increment_nesting()

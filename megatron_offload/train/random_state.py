"""The states of all random generators of a training process, as plain tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron_offload.errors import ConfigError

_WORDS = 624
"""Words in the state of a Mersenne Twister; its position and a Gaussian number follow them."""

_MEGATRON = "megatron."


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of Python's, numpy's, torch's and megatron-core's generators."""
    _, words, gauss = random.getstate()
    found: Any = np.random.get_state()
    states = {
        "python": _twister(words, gauss),
        "numpy": _twister([*found[1].tolist(), found[2]], found[4] if found[3] else None),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    for name, state in _tracker().get_states().items():
        states[_MEGATRON + name] = state.clone()
    return states


def restore_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set every generator to a state of `random_states`; what is none is a `ConfigError`."""
    words, gauss = _from_twister(states, "python")
    key, cached = _from_twister(states, "numpy")
    try:
        random.setstate((3, tuple(words), gauss))
        numbers = np.array(key[:_WORDS], dtype=np.uint32)
        has_cached = int(cached is not None)
        np.random.set_state(("MT19937", numbers, key[_WORDS], has_cached, cached or 0.0))
        torch.set_rng_state(states["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
        tracked = {
            name.removeprefix(_MEGATRON): state.clone()
            for name, state in states.items()
            if name.startswith(_MEGATRON)
        }
        for state in tracked.values():
            # The tracker takes whatever it is given, and would fail in the first dropout.
            torch.Generator(device).set_state(state)
        _tracker().set_states(tracked)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"a random state can't be set: {error}") from error


def _twister(words: Any, gauss: float | None) -> torch.Tensor:
    """Put words of 32 bits and a number that may be missing into one tensor, which is exact."""
    return torch.tensor([*words, math.nan if gauss is None else gauss], dtype=torch.float64)


def _from_twister(states: Mapping[str, torch.Tensor], name: str) -> tuple[list[int], float | None]:
    *numbers, gauss = states[name].tolist()
    # Neither generator checks them all; a wrong position would read beyond the state.
    if not all(number.is_integer() and 0 <= number < 2**32 for number in numbers):
        raise ConfigError(f"the random state {name!r} is not one of a Mersenne Twister")
    words = [int(number) for number in numbers]
    if words[-1] > _WORDS:
        raise ConfigError(f"the random state {name!r} is not one of a Mersenne Twister")
    return words, None if math.isnan(gauss) else gauss


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()

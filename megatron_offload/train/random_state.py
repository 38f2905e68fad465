"""The states of all random generators of a training process, as plain tensors.

Owns the translation between generators and tensors of int64, float64 and uint8. Must not know
where they are kept.

Invariant: `restore_random_states` of what `random_states` returned makes every generator go on as
it would have. Read next: `megatron_offload.train.checkpoint`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron_offload.errors import ConfigError

__all__ = ["random_states", "restore_random_states"]

_WORDS = 624
"""Words in the state of a Mersenne Twister; its position follows them."""


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of Python's, numpy's, torch's and megatron-core's generators, on the CPU.

    Args:
        device: where this process trains; a CUDA device's own generator belongs to it.
    """
    _, words, gauss = random.getstate()
    found: Any = np.random.get_state()
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": _optional(gauss),
        "numpy": torch.tensor([*found[1].tolist(), found[2]], dtype=torch.int64),
        "numpy_gauss": _optional(found[4] if found[3] else None),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    for name, state in _tracker().get_states().items():
        states[f"megatron.{name}"] = state.clone()
    return states


def restore_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set every generator to a state that `random_states` returned.

    Args:
        states: under the same names, of the same dtypes and shapes.
        device: where this process trains.

    Raises:
        ConfigError: a state is none.
    """
    for name in ("python", "numpy"):
        # Neither checks them all; a wrong position would read beyond the state.
        *words, position = states[name].tolist()
        if not 0 <= position <= _WORDS or not all(0 <= word < 2**32 for word in words):
            raise ConfigError(f"the random state {name!r} is not one of a Mersenne Twister")
    try:
        random.setstate((3, tuple(states["python"].tolist()), _value(states["python_gauss"])))
        words, gauss = states["numpy"].tolist(), _value(states["numpy_gauss"])
        key = np.array(words[:_WORDS], dtype=np.uint32)
        np.random.set_state(("MT19937", key, words[_WORDS], int(gauss is not None), gauss or 0.0))
        torch.set_rng_state(states["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
        ours = {
            name.removeprefix("megatron."): state.clone()
            for name, state in states.items()
            if name.startswith("megatron.")
        }
        for state in ours.values():
            # The tracker takes whatever it is given, and would fail in the first dropout.
            torch.Generator(device).set_state(state)
        _tracker().set_states(ours)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"a random state can't be set: {error}") from error


def _optional(value: float | None) -> torch.Tensor:
    return torch.tensor([value is not None, value or 0.0], dtype=torch.float64)


def _value(pair: torch.Tensor) -> float | None:
    given, value = pair.tolist()
    return value if given else None


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()

"""Random programs give the same bits with and without offload; ``--fuzz N`` runs N of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import random_programs
import random_states


@pytest.mark.parametrize("kind", [random_programs, random_states], ids=lambda k: k.__name__)
def test_random_programs_are_exact(kind, fuzz_seed):
    try:
        kind.check(fuzz_seed)
    except Exception as error:
        raise AssertionError(
            f"seed {fuzz_seed} fails; again with: "
            f"pytest tests/fuzz --fuzz 1 --fuzz-first-seed {fuzz_seed}"
        ) from error

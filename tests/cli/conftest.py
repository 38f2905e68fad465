"""What the tests of commands share."""

from __future__ import annotations

import pytest
from jobs import described


@pytest.fixture
def model(tmp_path):
    """Return the description of a small job."""
    return described(tmp_path)

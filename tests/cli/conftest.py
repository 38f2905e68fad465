"""What the tests of commands share."""

from __future__ import annotations

import pytest
from jobs import SMALL


@pytest.fixture
def model(tmp_path):
    """Return the description of a small job."""
    path = tmp_path / "job.yaml"
    path.write_text(SMALL)
    return path

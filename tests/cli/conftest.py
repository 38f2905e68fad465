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


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    """Let searches of described jobs be short; what they find is tested elsewhere."""
    monkeypatch.setattr("megatron_offload.planning.job_search._MOST_WORK_US", 3e5)

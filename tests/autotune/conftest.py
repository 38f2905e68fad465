"""What small models need whose rows are looked for."""

from __future__ import annotations

import pytest

from megatron_offload.autotune import layers
from megatron_offload.engine import automatic
from megatron_offload.model_map import sites


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch, request):
    """Look at tensors of any size, and let layers of tests run again."""
    own = "layered_job.", f"{request.module.__name__}."
    monkeypatch.setattr(layers, "_LEAST_BYTES", 0)
    monkeypatch.setattr(automatic, "_LEAST_GROUP_BYTES", 1000)
    monkeypatch.setattr(sites, "LIBRARIES", (*sites.LIBRARIES, *own))

"""A model of transformers on a real device, with gradient checkpointing and without."""

from __future__ import annotations

import contextlib

import pytest
from llama_programs import KINDS, LAYERS, STATE_BYTES, make_model, train
from programs import assert_nothing_left, assert_same

from megatron_offload import OffloadActivations, OffloadConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("checkpointing", KINDS, ids=["none", "not reentrant", "reentrant"])
@pytest.mark.parametrize("limit", [0, STATE_BYTES])
def test_every_bit_is_the_same(checkpointing, limit):
    config = OffloadConfig(
        backend="cuda",
        min_tensor_bytes=0,
        max_inflight_bytes=limit,
        prefetch_bytes=limit,
        policy={"kind": "modules"},
    )
    model, offload = make_model(checkpointing).cuda(), OffloadActivations(config=config)
    expected = train(model, contextlib.nullcontext())
    for _ in range(4):
        assert_same(expected, train(model, offload))
        assert offload.end_step()
        assert_nothing_left(offload.manager)
    assert offload.last_step.offloaded_bytes >= (LAYERS - 2) * STATE_BYTES
    assert offload.last_step.reloaded_bytes > 0
    offload.close()

"""Megatron's unfused loss by rows on two ranks of tensor parallelism: the same bits, if named."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import found_by, path_to, torchrun
from torch import nn

from megatron_offload import OffloadConfig, PipelineOffloadManager, offload_modules
from megatron_offload.errors import ConfigError

WORKER = Path(__file__).with_name("vocabulary_loss_worker.py")
THEIRS, OURS = "_VocabParallelCrossEntropyBackward", "_ByRowsBackward"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.16", "later"])
def test_a_split_vocabulary_s_loss_by_rows_has_megatron_s_bits(version):
    for found in found_by(torchrun(2, WORKER, path=path_to(version), OMP_NUM_THREADS="1")):
        assert len(found) == 13
        for case, (plain, called, is_same) in found.items():
            is_ours = case not in ("float32", "smoothing", "unnamed")
            assert (plain, called) == (THEIRS, OURS if is_ours else THEIRS), case
            assert is_same, case


def test_named_modules_take_no_loss_by_name():
    config = OffloadConfig(backend="simulated", recompute=["norm", "loss"])
    manager, model = PipelineOffloadManager(config), nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="offload_modules can't recompute 'loss'"):
        offload_modules(model, ["0"], manager=manager)
    assert manager.recompute == ("norm",)
    manager.close()

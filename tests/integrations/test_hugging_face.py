"""Models and the trainer of transformers, with gradient checkpointing and without."""

from __future__ import annotations

import contextlib

import pytest
import torch
from llama_programs import (
    BATCH,
    KINDS,
    LAYERS,
    LENGTH,
    STATE_BYTES,
    WORDS,
    make_model,
    train,
    transformers,
)
from programs import MOVING, assert_nothing_left, assert_same

from megatron_offload import OffloadActivations
from megatron_offload.errors import ConfigError
from megatron_offload.integrations.hugging_face import OffloadMixin


@pytest.mark.parametrize("checkpointing", KINDS, ids=["none", "not reentrant", "reentrant"])
def test_a_llama_keeps_its_bits_and_moves_what_it_saves(checkpointing):
    model, offload = make_model(checkpointing), OffloadActivations(config=MOVING)
    expected = train(model, contextlib.nullcontext())
    for _ in range(3):
        assert_same(expected, train(model, offload))
        assert offload.end_step()
        assert_nothing_left(offload.manager)
    moved_bytes = offload.last_step.offloaded_bytes  # of a microbatch
    if checkpointing is None:
        assert moved_bytes > 20 * LAYERS * STATE_BYTES
    else:  # the layers' inputs, and what norm, head and loss save
        head_bytes = 3 * BATCH * LENGTH * WORDS * 4 + 3 * STATE_BYTES
        assert LAYERS * STATE_BYTES <= moved_bytes <= LAYERS * STATE_BYTES + head_bytes
    offload.close()


def test_a_trainer_in_front_of_the_mixin_is_refused():
    trainer = transformers.Trainer
    with pytest.raises(ConfigError, match=r"as in class Wrong\(OffloadMixin, Trainer\)"):
        type("Wrong", (trainer, OffloadMixin), {})
    ours = type("Ours", (OffloadMixin,), {"compute_loss": lambda *_: None})
    in_front = type("InFront", (trainer,), {})
    for bases in ((OffloadMixin, trainer), (ours, trainer), (in_front, OffloadMixin, trainer)):
        right = type("Right", bases, {})
        type("Further", (right,), {})


def train_by_trainer(folder, *, offloads):
    class OffloadTrainer(OffloadMixin, transformers.Trainer):
        offload_config = MOVING

    generator = torch.Generator().manual_seed(2)
    words = torch.randint(WORDS, (16, LENGTH), generator=generator)
    trainer = (OffloadTrainer if offloads else transformers.Trainer)(
        model=make_model({"use_reentrant": False}),
        args=transformers.TrainingArguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": one, "labels": one} for one in words],
        eval_dataset=[{"input_ids": one, "labels": one} for one in words[:4]],
    )
    trainer.train()
    return trainer, [p.detach().clone() for p in trainer.model.parameters()]


def test_its_trainer_logs_the_same_losses_and_ends_with_the_same_weights(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    plain, expected = train_by_trainer(tmp_path, offloads=False)
    keys = {"loss", "grad_norm", "eval_loss"}
    for _ in range(2):
        trainer, found = train_by_trainer(tmp_path, offloads=True)
        assert_same(expected, found)
        logs = trainer.state.log_history
        for log, other in zip(plain.state.log_history, logs, strict=True):
            assert {key: log[key] for key in keys & log.keys()} == {
                key: other[key] for key in keys & other.keys()
            }
        moved = [log["offload/offloaded_bytes"] for log in logs if "loss" in log]
        assert len(moved) == 4
        assert all(moved)
        assert not any("offload/offloaded_bytes" in log for log in logs if "eval_loss" in log)
        trainer.offload.close()

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
from megatron_offload.cli.report import read_report
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


class OwnLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = output.loss + output.logits.square().mean()
        return (loss, output) if return_outputs else loss


class OwnStep:
    def training_step(self, model, inputs, num_items_in_batch=None):
        with torch.no_grad():  # a sample, of which nothing is saved
            model(**inputs)
        loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        self.accelerator.backward(loss)
        return loss.detach()


def train_by_trainer(folder, *bases, model=None, accumulated=1):
    """Train by a class of these bases; return the rows of its log, and parameters."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    generator = torch.Generator().manual_seed(2)
    lengths = [length for length in (64, LENGTH, 32) for _ in range(accumulated * BATCH)]
    words = [torch.randint(WORDS, (length,), generator=generator) for length in lengths]
    own = {"offload_config": MOVING, "offload_report": folder / "report"}
    trainer = type("Own", bases, own)(
        model=model or make_model({"use_reentrant": False}),
        args=transformers.TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=accumulated,
            gradient_checkpointing=accumulated > 1,
            train_sampling_strategy="sequential",
            logging_steps=1,
            eval_strategy="steps" if accumulated > 1 else "no",
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
    return trainer.state.log_history, [p.detach().clone() for p in trainer.model.parameters()]


SAVED = "offload/saved_mib"


def assert_same_training(plain, found):
    """The second has the same losses and parameters; and beside each loss what its step saved."""
    keys = {"loss", "grad_norm", "eval_loss"}
    logs = [{key: row[key] for key in keys & row.keys()} for row in plain[0]]
    assert logs == [{key: row[key] for key in keys & row.keys()} for row in found[0]]
    assert_same(plain[1], found[1])
    assert [SAVED in row for row in found[0]] == ["loss" in row for row in found[0]]
    middle, long, short = (row[SAVED] for row in found[0] if "loss" in row)
    assert long > 1.5 * middle > 2.25 * short > 0


@pytest.mark.parametrize(
    ("own", "bases", "least_mib"),  # of the first step
    [
        (OwnLoss, (type("InFront", (OwnLoss, OffloadMixin), {}), transformers.Trainer), 0.4),
        (OwnStep, (OwnStep, transformers.Trainer, OffloadMixin), 0.3),
    ],
)
def test_a_trainer_s_own_methods_offload_wherever_they_stand(own, bases, least_mib, tmp_path):
    plain = train_by_trainer(tmp_path, own, transformers.Trainer)
    found = train_by_trainer(tmp_path, *bases)
    assert_same_training(plain, found)
    assert found[0][0][SAVED] > least_mib  # of what the own loss saves, too


def test_a_trainer_logs_each_step_s_own_counters_beside_the_same_losses(tmp_path):
    trainer = transformers.Trainer
    plain = train_by_trainer(tmp_path, trainer, accumulated=2)
    model = make_model({"use_reentrant": False})
    state = {name: one.clone() for name, one in model.state_dict().items()}
    for _ in range(2):  # the second goes on with the context's memory, and no counter of the first
        model.load_state_dict(state)
        found = train_by_trainer(tmp_path, OffloadMixin, trainer, model=model, accumulated=2)
        assert_same_training(plain, found)
        (rank,) = read_report(tmp_path / "report").ranks
        assert rank["offloaded_bytes"] > 0

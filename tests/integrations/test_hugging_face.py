"""Models and the trainer of transformers, with gradient checkpointing and without."""

from __future__ import annotations

import contextlib
import copy
from functools import partial

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
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from megatron_offload import OffloadActivations
from megatron_offload.cli.report import read_report
from megatron_offload.integrations.hugging_face import OffloadMixin
from megatron_offload.observe.unseen import CACHED, Cache

CACHING = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
SELECTIVE = {"use_reentrant": False, "context_fn": CACHING}
NAMES = ["none", "not reentrant", "reentrant", "selective"]


@pytest.mark.parametrize("checkpointing", [*KINDS, SELECTIVE], ids=NAMES)
def test_a_llama_keeps_its_bits_and_moves_what_it_saves(checkpointing, caplog):
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
    cached = 10 * LAYERS * STATE_BYTES if checkpointing is SELECTIVE else 0  # of matrix products
    kept = offload.last_step.by_name["activations"].kept_bytes_by_reason
    assert (kept.get(CACHED, 0), caplog.text.count("selective checkpoints")) == (
        cached,
        cached > 0,
    )
    assert "__exit__" not in vars(Cache)
    offload.close()


class OwnLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs, num_items_in_batch=num_items_in_batch)
        return output.loss + output.logits.square().mean()


class OwnStep:
    def training_step(self, model, inputs, num_items_in_batch=None):
        assert "forward" not in vars(copy.deepcopy(model)), "a copy runs its own weights"
        loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        self.accelerator.backward(loss)
        return loss.detach()


def make_trainer(folder, *bases, model=None, accumulated=1):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    generator = torch.Generator().manual_seed(2)
    lengths = [length for length in (64, LENGTH, 32) for _ in range(accumulated * BATCH)]
    words = [torch.randint(WORDS, (length,), generator=generator) for length in lengths]
    own = {"offload_config": MOVING, "offload_report": folder / "report"}
    return type("Own", bases, own)(
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
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": one, "labels": one} for one in words],
        eval_dataset=[{"input_ids": one, "labels": one} for one in words[:4]],
    )


def train_by_trainer(*args, **options):
    trainer = make_trainer(*args, **options)
    trainer.train()
    return trainer.state.log_history, [p.detach().clone() for p in trainer.model.parameters()]


def assert_same_training(plain, found):
    """Compare losses and parameters, and see each step's own size; return that of the first."""
    keys = {"loss", "grad_norm", "eval_loss"}
    logs = [{key: row[key] for key in keys & row.keys()} for row in plain[0]]
    assert logs == [{key: row[key] for key in keys & row.keys()} for row in found[0]]
    assert_same(plain[1], found[1])
    saved = {row["step"]: row["offload/saved_mib"] for row in found[0] if "loss" in row}
    assert saved[2] > 1.5 * saved[1] > 2.25 * saved[3] > 0
    assert not any("offload/saved_mib" in row for row in found[0] if "loss" not in row)
    return saved[1]


@pytest.mark.parametrize(
    ("own", "bases", "least_mib"),  # of the first step, with what the own loss saves
    [
        (OwnLoss, (type("InFront", (OwnLoss, OffloadMixin), {}), transformers.Trainer), 0.4),
        (OwnStep, (OwnStep, transformers.Trainer, OffloadMixin), 0.3),
    ],
)
def test_a_trainer_s_own_methods_offload_wherever_they_stand(own, bases, least_mib, tmp_path):
    plain = train_by_trainer(tmp_path, own, transformers.Trainer)
    assert assert_same_training(plain, train_by_trainer(tmp_path, *bases)) > least_mib


def test_a_trainer_logs_each_step_s_own_counters_beside_the_same_losses(tmp_path):
    plain = train_by_trainer(tmp_path, transformers.Trainer, accumulated=2)
    model, bases = make_model({"use_reentrant": False}), (OffloadMixin, transformers.Trainer)
    for _ in range(2):  # the second goes on with the context's memory, and no counter of the first
        model.load_state_dict(make_model(None).state_dict())
        assert_same_training(plain, train_by_trainer(tmp_path, *bases, model=model, accumulated=2))
        (rank,) = read_report(tmp_path / "report").facts.by_rank
        assert rank.offloaded_bytes > 0


def test_a_second_training_has_a_context_of_its_own_model(tmp_path):
    trainer = make_trainer(tmp_path, OffloadMixin, transformers.Trainer)
    trainer.model_init = partial(make_model, None)  # for each training
    offloads = [trainer.train() and trainer.offload for _ in range(2)]
    assert offloads[0] is not offloads[1] is trainer.offload
    assert offloads[1].is_of(trainer.model)
    assert offloads[1].last_step.offloaded_bytes > 0
    trainer.model = torch.nn.Sequential(trainer.model)
    assert trainer.offload is offloads[1], "behind training it has what was trained"


def test_what_is_logged_remains_the_caller_s(tmp_path):
    trainer, logs = make_trainer(tmp_path, OffloadMixin, transformers.Trainer), {"loss": 1.0}
    trainer.log(logs)
    assert logs == {"loss": 1.0}
    assert "offload/saved_mib" in trainer.state.log_history[-1]

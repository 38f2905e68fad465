"""Lightning's trainer with the callback and without."""

from __future__ import annotations

import functools
import importlib
import warnings

import pytest
import torch
from programs import MOVING, assert_same
from torch import nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def make_model():
    """A function that makes a module; importing Lightning takes seconds, so no sooner than here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning.pytorch", reason="no lightning")

    class Model(lightning.LightningModule):
        """With a validation, and by choice with its own backward."""

        def __init__(self, *, steps_itself=False, fails_at=None):
            super().__init__()
            torch.manual_seed(0)
            layers = [
                nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
            ]
            self.model = nn.Sequential(*layers, nn.Linear(64, 8))
            self.automatic_optimization = not steps_itself
            self.fails_at = fails_at
            self.losses = []

        def training_step(self, batch, index):
            loss = self.model(batch).square().mean()
            if len(self.losses) == self.fails_at:
                raise RuntimeError("as asked")
            self.losses.append(loss.detach())
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch, index):
            self.losses.append(self.model(batch).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model


def make_callback():
    return importlib.import_module("megatron_offload.integrations.lightning").OffloadCallback(
        config=MOVING
    )


def fit(model, *callbacks, accumulated=1, epochs=2, batches=None):
    lightning = importlib.import_module("lightning.pytorch")
    torch.manual_seed(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_train_batches=batches,
        accumulate_grad_batches=accumulated,
        callbacks=[*callbacks],
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(4 * 256, 64)
    load = functools.partial(torch.utils.data.DataLoader, batch_size=256)
    trainer.fit(model, load(rows), load(rows[:256]))
    return trainer


@pytest.mark.parametrize("options", [{}, {"steps_itself": True}, {"accumulated": 2}], ids=str)
def test_a_module_keeps_its_bits_and_moves_what_it_saves(options, make_model):
    options = dict(options)
    more = {"accumulated": options.pop("accumulated", 1)}
    plain, model, callback = make_model(**options), make_model(**options), make_callback()
    fit(plain, **more)
    trainer = fit(model, callback, **more)
    assert len(plain.losses) == 11  # two epochs of four and a validation each, and one before
    assert_same(plain.losses, model.losses)
    assert_same([*plain.parameters()], [*model.parameters()])
    assert callback.offload.last_step.offloaded_bytes > 4 * 256 * 64 * 4
    assert trainer.logged_metrics["offload/offloaded_bytes"] > 4 * 256 * 64 * 4
    assert "training_step" not in vars(trainer.strategy)
    assert callback.offload.manager.host_pool.is_closed
    fit(make_model(**options), callback, **more)  # and a second time


def test_the_only_batch_of_a_fit_is_counted(make_model):
    callback = make_callback()
    trainer = fit(make_model(), callback, epochs=1, batches=1)
    assert callback.offload.last_step.offloaded_bytes > 4 * 256 * 64 * 4
    assert trainer.logged_metrics["offload/offloaded_bytes"] > 4 * 256 * 64 * 4


def test_a_step_that_fails_leaves_nothing_behind(make_model):
    model, callback = make_model(fails_at=3), make_callback()
    with pytest.raises(RuntimeError, match="as asked"):
        fit(model, callback)
    assert callback.offload.manager.host_pool.is_closed
    model.fails_at = None
    fit(model, callback)
    assert callback.offload.last_step.offloaded_bytes > 0

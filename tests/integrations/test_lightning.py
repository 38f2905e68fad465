"""Lightning's trainer with the callback and without."""

from __future__ import annotations

import functools
import importlib
import warnings

import pytest
import torch
from processes import run_python
from programs import MOVING, assert_same
from torch import nn

from megatron_offload.cli.report import read_report

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


def make_callback(**options):
    found = importlib.import_module("megatron_offload.integrations.lightning")
    return found.OffloadCallback(config=MOVING, **options)


def fit(model, *callbacks, accumulated=1, epochs=2, batches=None, log_every=1):
    lightning, logged = importlib.import_module("lightning.pytorch"), []

    class Logger(lightning.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step):
            logged.extend((step, x) for name, x in metrics.items() if "saved_mib" in name)

    torch.manual_seed(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_train_batches=batches,
        accumulate_grad_batches=accumulated,
        callbacks=[*callbacks],
        log_every_n_steps=log_every,
        num_sanity_val_steps=1,
        logger=Logger(),
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar"), False),
        enable_model_summary=False,
    )
    rows = torch.randn(4 * 256 - 128, 64)
    load = functools.partial(torch.utils.data.DataLoader, batch_size=256)
    trainer.fit(model, load(rows), load(rows[:256]))
    return trainer, logged


@pytest.mark.parametrize(
    ("options", "more", "rows"),  # each with its step, and whether its batch is an epoch's last
    [
        ({}, {}, [(step, step % 4 == 3) for step in range(8)]),
        ({"steps_itself": True}, {"log_every": 4}, [(3, True), (7, True)]),
        ({}, {"accumulated": 2}, [(step, step % 2 == 1) for step in range(4)]),
        ({}, {"epochs": 1, "batches": 1}, [(0, False)]),
    ],
)
def test_a_module_keeps_its_bits_and_logs_what_each_step_saves(options, more, rows, make_model):
    plain, model, callback = make_model(**options), make_model(**options), make_callback()
    fit(plain, **more)
    trainer, logged = fit(model, callback, **more)
    assert_same(plain.losses, model.losses)
    assert_same([*plain.parameters()], [*model.parameters()])
    assert callback.offload.last_step.offloaded_bytes > 4 * 128 * 64 * 4
    assert [(step, saved_mib < 0.5) for step, saved_mib in logged] == rows  # that one is smaller
    assert all(saved_mib > 0.25 for _, saved_mib in logged)
    assert "training_step" not in vars(trainer.strategy)
    assert callback.offload.manager.host_pool.is_closed
    fit(make_model(**options), callback, **more)  # and a second time


def test_a_fit_leaves_its_report(make_model, tmp_path):
    callback = make_callback(report=tmp_path)
    fit(make_model(), callback, epochs=1, batches=1)
    (rank,) = read_report(tmp_path).facts.by_rank
    assert rank.offloaded_bytes == callback.offload.last_step.offloaded_bytes > 0


def test_a_step_that_fails_leaves_nothing_behind(make_model):
    model, callback = make_model(fails_at=3), make_callback()
    with pytest.raises(RuntimeError, match="as asked"):
        fit(model, callback)
    assert callback.offload.manager.host_pool.is_closed
    model.fails_at = None
    fit(model, callback)
    assert callback.offload.last_step.offloaded_bytes > 0


SPAWNED = """
import copy, sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader
from megatron_offload import OffloadConfig
from megatron_offload.integrations.lightning import OffloadCallback

model, batches = BoringModel(), DataLoader(RandomDataset(32, 64), batch_size=8)
model.layer = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)), model.layer)
config = OffloadConfig(policy="modules", backend="simulated", min_tensor_bytes=0, prefetch_bytes=0)
callback = OffloadCallback(config=config, report=sys.argv[1])
found = []
for callbacks in ([], [callback]):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1, callbacks=callbacks,
        logger=False, enable_checkpointing=False, limit_val_batches=0,
    )
    trained = copy.deepcopy(model)
    trainer.fit(trained, batches)
    found.append([x.tolist() for x in trained.parameters()])
assert found[0] == found[1] != [x.tolist() for x in model.parameters()]
assert callback.offload is None
"""


def test_ranks_that_fit_starts_itself_offload_and_say_where_their_counters_are(tmp_path):
    done = run_python("-c", SPAWNED, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("OffloadCallback.offload is None") == 1
    (rank,) = read_report(tmp_path).facts.by_rank
    assert rank.offloaded_bytes > 0

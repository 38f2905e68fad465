"""Groups that a program marks itself, with as few words as the documents say it takes."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from programs import assert_nothing_left, assert_same, in_group, make_manager
from torch import nn

from megatron_offload import PipelineOffloadManager, group_commit, group_start
from megatron_offload.engine import step as step_file
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.observe.verdicts import say_last

ROWS, WIDTH = 16, 32


def make_mlps():
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
    )


def loss_of(mlps, manager, seed):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    for mlp in mlps:
        x = in_group(manager, mlp, x, "mlp")
    return x.square().mean()


def train(mlps, manager, order):
    """Run forwards and backwards in the order of ``order``, as in ``FFBB``; return all results."""
    mlps.zero_grad()
    waiting, results = [], []
    for seed, action in enumerate(order):
        if action == "F":
            waiting.append(loss_of(mlps, manager, seed))
            results.append(waiting[-1].detach().clone())
        else:
            waiting.pop(0).backward()
    return results + [parameter.grad.clone() for parameter in mlps.parameters()]


@pytest.mark.parametrize(
    ("order", "num_chunks"), [("FB", 1), ("FBFB", 2), ("FFBB", 1), ("FFBFBB", 2)]
)
def test_a_group_in_a_step_begins_a_chunk_by_itself(order, num_chunks):
    mlps, manager = make_mlps(), make_manager()
    expected = train(mlps, None, order)
    for _ in range(3):
        with manager.step():
            assert_same(expected, train(mlps, manager, order))
            chunks = {group.key.chunk for group in manager.decisions.groups()}
            assert len(chunks) == num_chunks
        assert manager.last_step.num_groups == 3 * order.count("F")
        assert manager.last_step.offloaded_bytes > 0
        assert_nothing_left(manager)


def test_groups_outside_of_a_step_and_a_chunk_are_reported_once(caplog):
    mlps, manager = make_mlps(), make_manager()
    expected = train(mlps, None, "FB")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(expected, train(mlps, manager, "FB"))
            with torch.no_grad():
                loss_of(mlps, manager, 0)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "group 'mlp' was started outside a chunk, so nothing of it is offloaded"
    ]
    caplog.clear()
    with torch.no_grad():
        loss_of(mlps, make_manager(), 0)
    assert not caplog.records, "nothing would move in any case"


def test_a_group_of_another_manager_than_the_step_s_is_refused(monkeypatch, caplog):
    mlps, manager, others = make_mlps(), make_manager(), make_manager()
    monkeypatch.setattr(PipelineOffloadManager, "instance", others)

    def step():
        with manager.step():
            x = group_start(torch.randn(ROWS, WIDTH, requires_grad=True), "mlp")
            with manager:
                x = mlps[0](x)
            group_commit(x, "mlp").sum().backward()

    step()
    assert re.search(r"outside a chunk.* set PipelineOffloadManager\.instance to", caplog.text)
    caplog.clear()
    PipelineOffloadManager.instance = manager
    step()
    assert manager.last_step.offloaded_bytes > 0
    loss_of(mlps, manager, 0)
    loss_of(mlps, others, 0)
    plan, told = caplog.messages  # the other has said it above
    assert (plan, "outside a chunk" in told) == (manager.plan, True)


@pytest.mark.parametrize("committed", ["mlps", None])
def test_groups_that_are_never_committed_are_reported_once(committed, caplog):
    mlps, manager = make_mlps(), make_manager()

    def step():
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        for mlp in mlps:
            x = start_group(manager, x, "mlp")
            with manager:
                x = mlp(x)
            x = commit_group(manager, x, committed) if committed else x
        x.sum().backward()

    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert "in step 4" not in caplog.text
            with manager.step():
                step()
    plan, said, won = caplog.messages
    assert (plan, "as 'mlp' in this step" in said) == (manager.plan, True)
    assert won.endswith("in step 4 nothing was offloaded or recomputed")
    caplog.clear()
    with manager.step():
        train(mlps, manager, "FB")
    assert not caplog.records
    assert manager.last_step.offloaded_bytes > 0


def test_a_program_that_ends_with_an_evaluation_says_its_last_training_step(caplog):
    mlps, manager = make_mlps(), make_manager()
    for _ in range(5):
        with manager.step():
            train(mlps, manager, "FB")
    with manager.step(), torch.no_grad():
        loss_of(mlps, manager, 0)
    assert manager.last_step.offloaded_bytes == 0
    say_last(manager)
    assert "in the last step at most" in caplog.messages[-1]


def test_a_program_that_never_ends_a_step_has_counters_and_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(step_file, "_MOST_CHUNKS", 3)
    mlps, manager = make_mlps(), make_manager()
    manager.begin_chunk()
    train(mlps, manager, "FB")
    assert manager.last_step.num_groups == 3
    assert manager.last_step.offloaded_bytes > 0
    with manager.step():
        pass
    assert manager.last_step.num_groups == 3, "a step that is over"
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            manager.begin_chunk()
            train(mlps, manager, "FB")
    assert manager.last_step.num_groups == 9
    assert len([r for r in caplog.records if "3 forwards and no end of a step" in r.message]) == 1


@pytest.mark.parametrize("nothing", [None, (), (None,), [None, 3]])
def test_a_group_may_begin_and_end_with_nothing(nothing):
    mlps, manager = make_mlps(), make_manager()
    expected = train(mlps, None, "FB")
    mlps.zero_grad()
    with manager.step():
        assert start_group(manager, nothing, "all") is nothing
        with manager:
            loss = loss_of(mlps, None, 0)
        assert commit_group(manager, nothing, "all") is nothing
        loss.backward()
    assert manager.last_step.offloaded_bytes > 0
    assert_same(expected[1:], [parameter.grad for parameter in mlps.parameters()])
    assert manager.cur_forward_chunk() is None

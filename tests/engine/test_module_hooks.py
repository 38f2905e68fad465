"""What is found in what modules take and return, and how long torch's methods are patched."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Thread

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.engine.module_hooks import tensors_in
from megatron_offload.frontends.whole_model import OffloadActivations


@dataclass
class Node:
    others: list = field(default_factory=list)

    @property
    def tensor(self):
        raise AssertionError("code of the program ran")


Node.__dataclass_fields__["tensor"] = Node.__dataclass_fields__["others"]


def test_what_holds_itself_is_looked_into_once_and_runs_no_code():
    nodes, x = [Node() for _ in range(30)], torch.ones(1)
    for node in nodes:
        node.others += [*nodes, {"x": x}]
    nodes.append(nodes)
    deep = [x + 1]
    for _ in range(5000):
        deep = [deep]
    assert [float(one) for one in tensors_in((nodes, deep, {"last": x + 2}))] == [1.0] * 30 + [2, 3]


def test_torch_is_as_it_was_behind_the_last_forward_of_all_threads():
    original = saved_tensors_hooks.__enter__

    def enter():
        with OffloadActivations():
            assert saved_tensors_hooks.__enter__ is not original

    with OffloadActivations():
        threads = [Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert saved_tensors_hooks.__enter__ is not original
    assert saved_tensors_hooks.__enter__ is original

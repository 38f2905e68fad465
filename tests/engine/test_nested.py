"""What is found in what modules take and return."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_offload.engine.nested import tensors_in


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

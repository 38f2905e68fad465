"""Offload by ratio and tag: the share is exact, and so are the bits."""

from __future__ import annotations

import pytest
import torch
import zoo
from programs import TWO_TIMINGS, make_config
from torch import nn

import megatron_offload
from megatron_offload import recomputable
from megatron_offload.frontends.ratio import CPUOffload, get_tensor_memory


def config(timing="late", **settings):
    return make_config(timing, **{"max_inflight_bytes": None, "prefetch_bytes": None, **settings})


def end_step(tag):
    return CPUOffload(0, tag).end_step()


def manager_of(tag):
    return CPUOffload._tags[tag].groups.manager


@pytest.mark.parametrize("timing", TWO_TIMINGS)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_bit_is_the_same(name, timing):
    offload = CPUOffload(0.3, "model", config(timing))
    assert zoo.assert_exact(name, offload, order="FFBB").offloaded_bytes > 0


class Stack(nn.Module):
    """Layers that save one tensor of a known size each."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def forward(self, x):
        for size in self.sizes:
            x = x.mean().expand(size).exp()  # its result is what exp saves
        return x.sum()


FIRST = [4096, 128, 9000, 512, 2048, 300, 7000, 1024] * 3
SECOND = [1500, 6000, 256, 256, 12000, 768, 3000] * 3


@pytest.mark.parametrize(("ratio", "other"), [(0, 0.5), (0.1, 1), (0.5, 0.1), (1, 0), (1, 1)])
def test_the_share_of_two_interleaved_tags_is_exact(ratio, other):
    thirds = [Stack(FIRST[i::3]) for i in range(3)], [Stack(SECOND[i::3]) for i in range(3)]
    CPUOffload(ratio, "first", config())
    CPUOffload(other, "second", config())
    for step in range(4):
        x = torch.full((8,), 0.01, requires_grad=True)
        total = torch.zeros(())
        for a, b in zip(*thirds, strict=True):
            with CPUOffload(ratio, tag="first"):
                y = a(x)
            with CPUOffload(other, tag="second"):
                total = total + y + b(x)
        total.backward()
        del total, y
        for tag, wanted, sizes in (("first", ratio, FIRST), ("second", other, SECOND)):
            assert end_step(tag)
            moved = CPUOffload(wanted, tag).last_step.offloaded_bytes
            saved = 4 * sum(sizes)
            assert CPUOffload._tags[tag].total_bytes == pytest.approx(saved, abs=100)
            most = wanted * CPUOffload._tags[tag].total_bytes
            assert most - 4 * max(sizes) <= moved <= most, (step, tag)
            if wanted in (0, 1):
                assert moved == pytest.approx(wanted * saved, abs=100), (step, tag)


def test_after_the_first_step_it_is_the_beginning_that_moves():
    sizes = [1024] * 10
    CPUOffload(0.3, "model", config(max_inflight_bytes=0, prefetch_bytes=4096))
    model = Stack(sizes)
    for step in range(3):
        with CPUOffload(0.3, "model"):
            loss = model(torch.full((8,), 0.01, requires_grad=True))
        groups = manager_of("model").decisions.groups()
        blocks = [b for group in groups for b in group.blocks() if b.num_bytes == 4096]
        moves = [not block.is_kept for block in blocks]
        assert sum(moves) == 3
        assert sum(group.num_bytes for group in groups) == 3 * 4096, "a group's size is what moves"
        assert (moves[:3] == [True] * 3) == (step > 0)
        del blocks, groups
        loss.backward()
        del loss
    assert end_step("model")
    (group,) = CPUOffload(0.3, "model").last_step.by_name.values()
    kept = {"beyond the share that is offloaded": group.kept_bytes}
    assert group.kept_bytes_by_reason == kept
    assert group.kept_bytes == 7 * 4096


@pytest.mark.parametrize("ratio", [0, 0.5, 1])
def test_what_is_recomputed_is_no_part_of_the_share(ratio):
    class Gelu(nn.Module):
        def forward(self, x):
            return recomputable(nn.functional.gelu, x)

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32), Gelu()] * 6, nn.Linear(32, 32))
    x = torch.ones(64, 32, requires_grad=True)
    size = x.nbytes
    offload = CPUOffload(ratio, "made", config())
    for _ in range(3):
        with offload:
            y = model(x)
        y.sum().backward()
        del y
        assert end_step("made")
    last = manager_of("made").last_step
    assert last.recomputed_bytes == 6 * size  # what each GELU makes
    total = CPUOffload._tags["made"].total_bytes
    assert total in (6 * size, 7 * size)  # what it takes, and maybe the first layer's input
    assert 0 <= ratio * total - last.offloaded_bytes <= size


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "0.3"])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(ValueError, match="offload_ratio must be between 0 and 1"):
        CPUOffload(ratio, "model")
    assert "model" not in CPUOffload._tags


def test_a_tag_is_configured_once():
    CPUOffload(0.1, "model", config())
    with pytest.raises(ValueError, match="a tag is a text, got 3"):
        CPUOffload(0.5, 3)
    with pytest.raises(TypeError, match="did you mean 'offload_ratio'"):
        CPUOffload(ratio=0.5)
    with pytest.raises(ValueError, match="tag 'model' exists"):
        CPUOffload(0.1, "model", config())
    CPUOffload.forget("model")
    CPUOffload.forget("model")
    CPUOffload(0.1, "model", config())


def test_bytes_of_a_tensor():
    assert get_tensor_memory(torch.empty(3, 5, dtype=torch.bfloat16)) == 30
    assert CPUOffload.get_tensor_memory(torch.empty(2, 2)) == 16
    assert megatron_offload.get_tensor_memory(torch.empty(0)) == 0

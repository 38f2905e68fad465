"""What a context says with nothing set: as it begins, and as the program ends."""

from __future__ import annotations

import pytest
import torch
from processes import run_python
from torch import nn

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.observe.verdicts import say_last

PROGRAM = """
import torch
from megatron_offload import OffloadActivations, OffloadConfig
offload, net = OffloadActivations(config=OffloadConfig(policy="modules")), torch.nn.Linear(64, 64)
for _ in range(6):
    with offload:
        loss = torch.nn.Sequential(*[net] * 16)(torch.randn(512, 64)).sum()
    loss.backward()
"""


@pytest.mark.parametrize(
    ("settings", "plan", "last"),
    [
        ({"policy": "modules"}, "in a context, is offloaded from the first step", "off the device"),
        ({"rows": []}, "rows: []", "nothing is offloaded: no row says so"),
        ({"policy": "auto"}, "then rows cost at most 3 % of a step", "has ended before rows"),
        (
            {"policy": {"kind": "memory_target", "memory_target": ["1GiB", "2GiB"]}},
            "then rows let at most 1.0 GiB, 2.0 GiB be reserved",
            "nothing is offloaded yet: the first steps",
        ),
        ({"enabled": False}, "nothing is offloaded: it is switched off", "it is switched off"),
    ],
)
def test_a_context_says_what_it_will_do_and_what_it_has_done(settings, plan, last, caplog):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    config = OffloadConfig(**settings)
    offload = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
    assert plan in repr(offload)
    with offload:
        loss = model(torch.randn(4096, 8)).sum()
    loss.backward()
    assert ([plan in x for x in caplog.messages] == [True]) is ("policy" in settings)
    say_last(offload.manager)
    assert last in caplog.text + offload.describe()


def test_a_program_says_its_plan_and_what_it_has_won_at_the_level_that_the_environment_names():
    said = run_python("-c", PROGRAM, MEGATRON_OFFLOAD_LOG="info").stderr
    plan, won, last = said.splitlines()
    assert ("is offloaded from the first step on" in plan, "of what a step" in won) == (True, True)
    assert last.startswith("megatron-offload: of what the last step has saved, most at a time: ")
    said, *_ = run_python("-c", PROGRAM, MEGATRON_OFFLOAD_LOG="debgu").stderr.splitlines()
    assert said == "MEGATRON_OFFLOAD_LOG is a level, and not 'debgu'; did you mean 'debug'?"

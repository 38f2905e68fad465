"""The section ``policy:``, its keys by its kind."""

from __future__ import annotations

import pytest

from megatron_offload.config import StrictModel
from megatron_offload.core.policy_config import ModulesConfig, PolicyConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.strict_yaml import parse_yaml


class Whole(StrictModel):
    policy: PolicyConfig = ModulesConfig()


def read(text):
    return validate(Whole, parse_yaml(text) or {}, "it").policy


@pytest.mark.parametrize(
    ("target", "targets"), [("20GiB", (20 << 30,) * 2), ("[1GiB, 4096]", (1 << 30, 4096))]
)
def test_one_target_is_every_rank_s(target, targets):
    assert read(f"policy: {{kind: memory_target, memory_target: {target}}}").targets(2) == targets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: {kind: rato}", "'policy': there is no kind 'rato'; did you mean 'ratio'"),
        ("policy: {kind: modules, fraction: 0.5}", "'policy.fraction' of kind 'modules'"),
        ("policy: {ratio: 0.5}", "'policy' needs a kind, one of modules, ratio"),
        ("policy: {kind: ratio}", "'policy.ratio' is required"),
        ("policy: {kind: ratio, ratio: 1.5}", "'policy.ratio': .* less than or equal to 1"),
        ("policy: {kind: ratio, ratio: 0.5, fraction: 1}", "'policy.fraction' of kind 'ratio'"),
        ("policy: {kind: auto, most_slowdown_procent: 1}", "did you mean 'most_slowdown_percent'"),
        ("policy: {kind: memory_target, memory_target: -1}", "0 or more bytes"),
        ("policy: {kind: memory_target, memory_target: [1GiB, lots]}", "memory_target"),
        ("policy: {kind: memory_target, memory_target: []}", "memory_target"),
        ("policy: {kind: memory_target, memory_target: 22}", "^it: 'policy.memory_target': 22 is"),
        ("policy: {kind: memory_target, memory_target: [1GiB, 22]}", "write 22GiB or 22MiB"),
        ("policy: {kind: plan_file, path: p}", "no kind 'plan_file'.*ratio"),
        ("policy: modules", "policy"),
    ],
)
def test_what_does_not_fit_the_kind_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)

"""The section ``policy:``, its keys by its kind."""

from __future__ import annotations

import pytest

from megatron_offload.config import StrictModel
from megatron_offload.core.machine import MachineConfig
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
    assert read(f"policy: {{kind: memory_target, target_bytes: {target}}}").targets(2) == targets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: {kind: rato}", "'ratio'"),
        ("policy: {ratio: 0.5}", "kind"),
        ("policy: {kind: ratio}", "'policy.ratio.ratio' is required"),
        ("policy: {kind: ratio, ratio: 1.5}", "less than or equal to 1"),
        ("policy: {kind: ratio, ratio: 0.5, fraction: 1}", "unknown key 'policy.ratio.fraction'"),
        ("policy: {kind: auto, most_slowdown_procent: 1}", "did you mean 'most_slowdown_percent'"),
        ("policy: {kind: auto, machine: {node_gps: 1}}", "did you mean 'node_gbps'"),
        ("policy: {kind: auto, machine: {node_gbps: 0}}", "greater than 0"),
        ("policy: {kind: auto, machine: defalt}", "policy.auto.machine': give 'default', or a"),
        ("policy: {kind: auto, machine: 3}", "policy.auto.machine"),
        ("policy: {kind: memory_target, target_bytes: -1}", "0 or more bytes"),
        ("policy: {kind: memory_target, target_bytes: [1GiB, lots]}", "target_bytes"),
        ("policy: {kind: memory_target, target_bytes: []}", "target_bytes"),
        ("policy: {kind: memory_target, target_bytes: 22}", "22 is 22 bytes; write 22GiB"),
        ("policy: {kind: memory_target, target_bytes: [1GiB, 22]}", "write 22GiB or 22MiB"),
        ("policy: {kind: plan_file, path: ''}", "path"),
        ("policy: modules", "policy"),
    ],
)
def test_what_does_not_fit_the_kind_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize("kind", ["kind: auto", "kind: memory_target, target_bytes: 1KiB"])
def test_the_word_default_is_a_section_and_no_section_is_none(kind):
    assert read(f"policy: {{{kind}}}").machine is None
    given = read(f"policy: {{{kind}, machine: default}}")
    assert given.machine == MachineConfig()
    again = given.model_dump(mode="json", exclude_unset=True)
    assert again["machine"] == {}, "what is written down is read as the same"

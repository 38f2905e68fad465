"""The section ``policy:``, its keys by its kind."""

from __future__ import annotations

import pytest

from megatron_offload.config import StrictModel
from megatron_offload.core.machine import Machine, MachineConfig
from megatron_offload.core.policy_config import ModulesConfig, PolicyConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.strict_yaml import parse_yaml
from megatron_offload.planning.auto import AutoPolicy, Prediction
from megatron_offload.planning.make_policy import make_policy
from megatron_offload.planning.memory_target import MemoryTargetPolicy, Resources
from megatron_offload.planning.policy import ModulesPolicy, PlanFilePolicy, RatioPolicy


class Whole(StrictModel):
    policy: PolicyConfig = ModulesConfig()


def read(text):
    return validate(Whole, parse_yaml(text) or {}, "it").policy


def predict(plan):
    return Prediction(1.0, (0,))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", ModulesPolicy()),
        (
            "policy: {kind: modules, modules: [core_attn, 'decoder.*'], fraction: 0.5, "
            "resident_bytes: 1KiB, delta_bytes_across_pp_ranks: 2KB}",
            ModulesPolicy(
                fraction=0.5,
                resident_bytes=1024,
                modules=("core_attn", "decoder.*"),
                delta_bytes_across_pp_ranks=2000,
            ),
        ),
        ("policy: {kind: ratio, ratio: 0.3}", RatioPolicy(0.3)),
        ("policy: {kind: memory_target, target_bytes: 20GiB}", MemoryTargetPolicy(20 << 30)),
        (
            "policy: {kind: memory_target, target_bytes: [1GiB, 3], gpus_per_rank: 8, "
            "prefetch_bytes: 1MiB, machine: {node_gbps: 100, ranks_per_node: 1}}",
            MemoryTargetPolicy(
                (1 << 30, 3),
                Resources(Machine(node_gbps=100.0, ranks_per_node=1), 8, None, 1 << 20),
            ),
        ),
        ("policy: {kind: auto}", AutoPolicy(predict)),
        ("policy: {kind: auto, machine: default}", AutoPolicy(predict)),
        (
            "policy: {kind: auto, most_slowdown_percent: 2, max_inflight_bytes: 5}",
            AutoPolicy(predict, 2.0, Resources(max_inflight_bytes=5)),
        ),
    ],
)
def test_a_section_becomes_its_policy(text, policy):
    made = make_policy(read(text), predict)
    assert made == policy
    assert type(made) is type(policy)


def test_a_plan_file_is_named_by_its_path():
    made = make_policy(read("policy: {kind: plan_file, path: runs/plan.json}"))
    assert isinstance(made, PlanFilePolicy)
    assert str(made.path) == "runs/plan.json"


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
        ("policy: {kind: memory_target, target_bytes: -1}", "can't be negative"),
        ("policy: {kind: memory_target, target_bytes: [1GiB, lots]}", "target_bytes"),
        ("policy: {kind: memory_target, target_bytes: []}", "target_bytes"),
        ("policy: {kind: plan_file, path: ''}", "path"),
        ("policy: modules", "policy"),
    ],
)
def test_what_does_not_fit_the_kind_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize("kind", ["kind: auto", "kind: memory_target, target_bytes: 1"])
def test_the_word_default_is_a_section_and_no_section_is_none(kind):
    assert read(f"policy: {{{kind}}}").machine is None
    given = read(f"policy: {{{kind}, machine: default}}")
    assert given.machine == MachineConfig()
    again = given.model_dump(mode="json", exclude_unset=True)
    assert again["machine"] == {}, "what is written down is read as the same"


def test_auto_needs_a_prediction():
    with pytest.raises(ConfigError, match="needs a prediction"):
        make_policy(read("policy: {kind: auto}"))

"""Configuration from anyone ends in one clear line, at once, and runs nothing."""

from __future__ import annotations

import resource
import time

import pytest

from megatron_offload.config import OffloadConfig, apply_overrides, load_yaml
from megatron_offload.errors import ConfigError
from megatron_offload.files import strict_yaml
from megatron_offload.files.strict_model import validate

MOST_SECONDS = 3
MOST_GROWN_KIB = 200 * 1024

LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
)

HOSTILE = {
    "billion laughs": (LAUGHS, "anchor &a0"),
    "alias": ("a: *b", "alias *b"),
    "brackets": ("[" * 100_000, "nested deeper than 32"),
    "braces": ("{a: " * 50_000, "nested deeper than 32"),
    "dashes": ("- " * 100_000, "nested deeper than 32"),
    "stairs": ("\n".join(" " * n + "a:" for n in range(600)), "nested deeper than 32"),
    "python call": ("a: !!python/object/apply:os.system ['exit 1']", "python/object/apply"),
    "python name": ("a: !!python/name:os.system", "only plain values"),
    "renamed tag": ("%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system x", "only plain"),
    "set": ("a: !!set {b}", "only plain values"),
    "plain text tag": ("a: !!str 5", "only plain values"),
    "non-specific tag": ("a: ! 5", "only plain values"),
    "merge key": ("<<: {a: 1}", "merge key"),
    "repeated key": ("a: 1\nb: 2\na: 3", "line 3: key 'a' is given twice"),
    "repeated inner key": ("b: {a: 1, 'a': 2}", "key 'a' is given twice"),
    "number as key": ("1: a", "a key must be text, got 1"),
    "truth as key": ("yes: a", "a key must be text, got yes"),
    "list as key": ("? [a]\n: 1", "a key must be text, got a list"),
    "huge integer": ("a: " + "9" * 100_000, "no number that can be used"),
    "over 64 bits": ("a: 9223372036854775808", "no number that can be used"),
    "no digits": ("a: 0x_", "no number that can be used"),
    "base 60": ("a: 1:30", "no number that can be used"),
    "infinity": ("a: .inf", "no number that can be used"),
    "not a number": ("a: .nan", "no number that can be used"),
    "overflowing float": ("a: 1.0e+999", "no number that can be used"),
    "long text": ("a: " + "x" * 300_000, "more than 262144 bytes|longer than 262144"),
    "long key": ("x" * 200_000 + ": 1", "mapping values are not allowed"),
    "many items": ("[" + "a," * 100_000 + "]", "more than 10000 keys and values"),
    "many keys": ("\n".join(f"k{n}: 1" for n in range(20_000)), "more than 10000"),
    "null character": (r'a: "\0"', "can't hold the character"),
    "half a character": (r'a: "\ud800"', "surrogate"),
    "control character": ("a: \x01", "special characters"),
    "two documents": ("a: 1\n---\nb: 2", "another document"),
    "no YAML": ("a: [1, 2", "line 1"),
    "other version": ("%YAML 9.9\n---\na: 1", "version"),
}


@pytest.fixture(autouse=True)
def _quickly_and_in_little_memory():
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    yield
    assert time.process_time() - start < MOST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_GROWN_KIB


def error_of(function, *args):
    with pytest.raises(ConfigError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    assert len(message) < 600
    return message


@pytest.mark.parametrize(("text", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_or_override_is_refused_in_one_line(text, words, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    of_file = error_of(load_yaml, path)
    of_override = error_of(apply_overrides, {}, [f"run.steps={text}"])
    assert str(path) in of_file
    assert of_override.startswith("run.steps: ")
    for message in (of_file, of_override):
        assert any(word in message for word in words.split("|")), message


def test_a_tag_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    for module in ("os.system", "subprocess.check_output"):
        text = f"!!python/object/apply:{module} ['touch {mark}']"
        for place in (text, f"a: {text}", f"{text}: a"):
            error_of(strict_yaml.parse_yaml, place)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("run.steps", "a setting is key=value"),
        ("=1", "a setting is key=value"),
        ("run..steps=1", "a setting is key=value"),
        ("a." * 50_000 + "a=1", "a setting is key=value"),
        ("run.ste\nps=1", "a setting is key=value"),
        ("run.seed.x=1", "'seed' is a value, not a section"),
    ],
)
def test_a_hostile_override_key_is_refused_in_one_line(item, words):
    assert words in error_of(apply_overrides, {"run": {"seed": 1}}, [item])


def test_plain_values_round_trip(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "a: {b: [1, -2, 0x10, 1_000], c: 1.5, d: yes, e: ~, f: '<<'}\n"
        "g: 2026-11-21\nh: 10GiB\ni: '007'\nj: =\n'<<': 1\nk: " + "[" * 30 + "]" * 30
    )
    data = load_yaml(path)
    assert data.pop("k") is not None
    assert data == {
        "a": {"b": [1, -2, 16, 1000], "c": 1.5, "d": True, "e": None, "f": "<<"},
        "g": "2026-11-21",
        "h": "10GiB",
        "i": "007",
        "j": "=",
        "<<": 1,
    }
    path.write_text("# nothing\n")
    assert load_yaml(path) == {}
    path.write_text("- a")
    assert "must hold a mapping" in error_of(load_yaml, path)


def test_overrides_reach_into_sections_and_leave_the_data_alone():
    data = {"run": {"steps": 1, "seed": 2}}
    result = apply_overrides(data, ["run.steps=5", "offload.modules=[core_attn, mlp_act]"])
    assert result["run"] == {"steps": 5, "seed": 2}
    assert result["offload"] == {"modules": ["core_attn", "mlp_act"]}
    assert data == {"run": {"steps": 1, "seed": 2}}


NO_SHARES = (0, -0.5, 1.5, float("nan"), float("inf"), "half", None)
"""A share of host memory is more than nothing and at most all."""


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("host_memory_bytes", "9" * 60, "less than 9223372036854776000"),
        ("host_memory_bytes", "9" * 400, "a text such as"),
        ("host_memory_bytes", 10**30, "less than 9223372036854776000"),
        ("host_memory_bytes", float("inf"), "a text such as"),
        ("host_memory_bytes", float("nan"), "a text such as"),
        ("host_memory_bytes", -1, "0 or more"),
        ("host_memory_bytes", "-1GiB", "0 or more"),
        ("host_memory_bytes", True, "a text such as"),
        ("host_memory_bytes", [1], "a text such as"),
        ("host_memory_bytes", "1 parsec", "there is no unit 'parsec'"),
        *(("host_memory_share", share, "host_memory_share") for share in NO_SHARES),
    ],
)
def test_a_size_or_share_that_is_none_is_refused(key, value, words):
    assert words in error_of(validate, OffloadConfig, {key: value}, "x")


def test_a_share_of_host_memory_may_stand_beside_a_number_of_bytes():
    both = validate(OffloadConfig, {"host_memory_share": 1, "host_memory_bytes": "1GiB"}, "x")
    assert validate(OffloadConfig, both.model_dump(), "x") == both


def test_so_many_errors_are_counted_not_listed_and_a_very_long_key_is_cut():
    with pytest.raises(ConfigError) as caught:
        validate(OffloadConfig, {f"key{n}": 1 for n in range(5000)}, "run.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "run.yaml: and 4980 more"
    assert "xxx..." in error_of(validate, OffloadConfig, {"x" * 100_000: 1}, "run.yaml")


def test_a_kind_of_policy_alone_is_its_section():
    assert OffloadConfig(policy="auto") == OffloadConfig(policy={"kind": "auto"})
    with pytest.raises(ValueError, match=r"policy\.ratio' is required"):
        OffloadConfig(policy="ratio")
    with pytest.raises(ValueError, match="no kind 'autp'; did you mean 'auto'"):
        OffloadConfig(policy="autp")
    asked = apply_overrides({"policy": "modules"}, ["policy.kind=auto", "policy.measured_plans=1"])
    assert asked == {"policy": {"kind": "auto", "measured_plans": 1}}


@pytest.mark.parametrize(
    ("target", "targets"), [("20GiB", (20 << 30,) * 2), (["1GiB", 4096], (1 << 30, 4096))]
)
def test_one_memory_target_is_every_rank_s(target, targets):
    config = OffloadConfig(policy={"kind": "memory_target", "memory_target": target})
    assert config.policy.targets(2) == targets


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("{kind: ratio, ratio: 1.5}", "'policy.ratio': .* less than or equal to 1"),
        ("{kind: auto, most_slowdown_procent: 1}", "did you mean 'most_slowdown_percent'"),
        ("{kind: memory_target, memory_target: -1}", "0 or more bytes"),
        ("{kind: memory_target, memory_target: [1GiB, lots]}", "memory_target"),
        ("{kind: memory_target, memory_target: []}", "memory_target"),
        ("{kind: memory_target, memory_target: 22}", "^it: 'policy.memory_target': 22 is"),
        ("{kind: memory_target, memory_target: [1GiB, 22]}", "write 22GiB or 22MiB"),
    ],
)
def test_what_does_not_fit_a_policy_s_kind_is_refused(policy, message):
    with pytest.raises(ConfigError, match=message):
        validate(OffloadConfig, {"policy": strict_yaml.parse_yaml(policy)}, "it")


def test_one_name_stands_for_a_list_of_it():
    one = OffloadConfig(modules="mlp_fc1", recompute="norm")
    assert (one.modules, one.recompute) == (("mlp_fc1",), ("norm",))
    for names in ("nrm", ["nrm"]):
        with pytest.raises(ConfigError, match="unknown recompute kind 'nrm'; did you mean 'norm'"):
            OffloadConfig(recompute=names)

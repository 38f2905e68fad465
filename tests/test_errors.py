"""Names that were meant are found, however many there are."""

from __future__ import annotations

import time

from megatron_offload.errors import did_you_mean


def test_the_nearest_name_is_found_among_few_and_among_many():
    few = [f"name_{index:03}" for index in range(400)] + ["zebra"]
    assert did_you_mean("zebro", few) == "; did you mean 'zebra'?"
    assert did_you_mean("name_399_", few) == "; did you mean 'name_399'?"
    many = [f"decoder.layers.{index}.mlp" for index in range(20_000)]
    assert (
        did_you_mean("decoder.layers.777.mlpp", many) == "; did you mean 'decoder.layers.777.mlp'?"
    )


def test_thousands_of_long_names_take_no_longer_than_few():
    names = [f"{index:05}" + "ab" * 90 for index in range(5_000)]
    start = time.process_time()
    text = did_you_mean("zz" * 95, names)
    # Each of them compared with all of its letters takes a minute.
    assert time.process_time() - start < 5
    assert text.endswith(" and 4950 more")
    assert len(text) < 50 * 210
    start = time.process_time()
    did_you_mean("x" * 100_000, ["x" * 100_000 + "y"] * 10)
    assert time.process_time() - start < 1

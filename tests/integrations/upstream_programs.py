"""Takes the same steps with megatron-core's own handler and with this package's.

Run in a process of its own, because the version of megatron-core is meant:

    PYTHONPATH=.venv/megatron-core-later python tests/integrations/upstream_programs.py [PROGRAM]

The last line of the output is JSON: for each program what was found.
"""

from __future__ import annotations

import functools
import json
import sys
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from upstream_sides import KIB, Ours, Theirs, Without


class Program:
    """Microbatches through groups that a handler moves; without one, the same bits."""

    def __init__(self, side):
        self.side, self.outputs, self.gradients = side, {}, []

    def begin(self, vp_size=1, vp_stage=0, *, fraction=1.0):
        self.side.interface.init_chunk_handler(0, vp_size, vp_stage, 0, 0, fraction)

    def mark(self, name, x):
        """Return what a group's forward enters, to commit it with ``group_offload``."""
        return self.side.interface(True, x, name)

    def group(self, name, function, x):
        mark = self.mark(name, x)
        with mark as x:
            y = function(x)
        return mark.group_offload(y)

    def train(self, forward, **chunk):
        """Take three steps of one microbatch; return the gradients of their inputs."""
        for step in range(3):
            self.begin(**chunk)
            x = leaf(step)
            self.outputs[step] = x, forward(x)
            self.backward(step)
            self.side.end_step()
        return self.gradients

    def backward(self, key):
        x, y = self.outputs.pop(key)
        y.sum().backward()
        self.gradients.append(x.grad)


def leaf(seed, rows=8):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attempt(side, steps):
    """Return the gradients of a program's steps, or the error that it ended with."""
    try:
        with side.active():
            return steps(Program(side))
    except (AssertionError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def compare(steps, **settings):
    """Run a program without a handler and with both; say whose bits are those without.

    Megatron's copies are never late here, so that no other fault than the one meant can show.
    """
    expected = attempt(Without(), steps)
    found = {}
    for side in (functools.partial(Theirs, is_late=False), functools.partial(Ours, **settings)):
        side = side()
        got = attempt(side, steps)
        is_error = isinstance(got, str)
        same = not is_error and all(map(torch.equal, expected, got))
        found[side.name] = {"equal": same, "error": got if is_error else ""}
    return found


# The programs


def inline_reload():
    """#7398: Megatron's GPT on one rank, whose last groups are needed before they are reloaded."""
    from megatron_programs import build_config, build_model, train

    expected, _ = train(build_model(build_config({}, offload=False)), "")
    found = {}
    for side in (Theirs, Ours):
        for timing in ("eager", "late"):
            its = side(is_late=timing == "late")
            with its.active():
                got, _ = train(build_model(build_config({}, offload=True)), "")
            found[f"{its.name}, {timing}"] = all(map(torch.equal, expected, got))
    return found


def early_end(num_layers=1):
    """#6783: interleaved; in the last chunk each name's last group is kept."""
    names = ["attn_norm", "core_attn", "attn_proj"] * num_layers

    def steps(program):
        backward = program.backward

        def forward(batch, stage):
            program.begin(2, stage)
            x = h = leaf(len(program.gradients) + batch + 5 * stage)
            for name in names:
                h = program.group(name, lambda x: x.sin().square(), h)
            program.outputs[batch, stage] = x, h

        for _ in range(3):
            forward(0, 0), forward(1, 0)
            forward(0, 1), backward((0, 1)), forward(1, 1), backward((1, 1))
            backward((0, 0)), backward((1, 0))
            program.side.end_step()
        return program.gradients

    return compare(steps)


def norm_inputs(alive):
    """Return steps; ``alive`` gets how many norms' inputs each leaves on the device."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    norm, linear = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32, bias=False)

    def forward(program, h):
        inputs = []
        for _ in range(6):
            h = h * 2
            inputs.append(StorageWeakRef(h.untyped_storage()))
            whole = CheckpointWithoutOutput()
            mark = program.mark("attn_norm", h)
            with mark as h:
                y = whole.checkpoint(norm, h)
            out = linear(y)
            whole.discard_output_and_register_recompute(out)
            h = mark.group_offload(out)
            del y, out
        num_alive = sum(not one.expired() for one in inputs)
        alive.setdefault(program.side.name, []).append(num_alive)
        return h

    return lambda program: program.train(functools.partial(forward, program))


def pinned_inputs():
    """#6553: inputs of recomputed norms that are kept on the device."""
    alive = {}
    return {**compare(norm_inputs(alive), max_inflight_bytes=0), "alive": alive}


def uncompiled():
    """Activations that rows recompute where nothing can be compiled."""
    from megatron.core.tensor_parallel import random

    from megatron_offload.integrations import megatron_rows

    def gradients_of(side):
        got = attempt(side, steps)
        return got if isinstance(got, str) else all(map(torch.equal, expected, got))

    steps = norm_inputs({})
    expected = attempt(Without(), steps)
    with (
        mock.patch.object(random, "_share_storage_ext", None),
        mock.patch.object(random, "load_inline", side_effect=RuntimeError("no compiler")),
    ):
        found = {"Megatron's": gradients_of(Without()), "without rows": gradients_of(Ours())}
        experts = torch.nn.Module()
        megatron_rows._built[experts] = {megatron_rows.RERUN: False}
        return found | {"rows": gradients_of(Ours())}


def segments(*, again=True):
    """#6429: segments that are run again while another microbatch's forward is under way."""

    def steps(program):
        backward = program.backward

        def layer(h):
            h = program.group("mlp_norm", torch.exp, h)
            return program.group("core_attn", torch.sin, h)

        def forward(batch):
            program.begin()
            x = h = leaf(len(program.gradients) + batch)
            for _ in range(2):
                h = checkpoint(layer, h, use_reentrant=True) if again else layer(h)
            program.outputs[batch] = x, h

        for _ in range(3):
            forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)
            program.side.end_step()
        return program.gradients

    return compare(steps)


def discarded_output(*, is_marked=False):
    """#7237: the output of attention is discarded before its projection's group ends."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    def steps(program):
        project = torch.nn.Linear(32, 32, bias=False)
        torch.nn.init.eye_(project.weight)

        def forward(h):
            for _ in range(3):
                whole = CheckpointWithoutOutput()
                core = program.group("core_attn", functools.partial(whole.checkpoint, torch.sin), h)
                mark = program.mark("attn_proj", core)
                with mark as core:
                    if is_marked:
                        program.side.interface.mark_not_offload(core)
                    h = project(core)
                    whole.discard_output_and_register_recompute(h)
                h = mark.group_offload(h)
            return h

        return [*program.train(forward), project.weight.grad]

    return compare(steps)


def sines(num_saved, h):
    for _ in range(num_saved):
        h = h.sin()
    return h


def halves(**settings):
    """#5101: half of the groups: their share of the bytes, and how much is back when needed.

    Of six groups the last three save eight times as much. What is back is counted when backward
    reaches the third.
    """
    found = {}

    def steps(program):
        side, moved, back = program.side, [], []

        def forward(x):
            before = side.num_back
            moved.append(side.moved_bytes)  # of the step before
            h = x * 2  # nobody but the first group keeps it
            for index in range(6):
                num_saved = 8 if index > 2 else 1
                h = program.group("moe_act", functools.partial(sines, num_saved), h)
                if index == 2:
                    h.register_hook(lambda _: back.append(side.num_back - before))
            return h

        gradients = program.train(forward, fraction=0.5)
        found[side.name] = {"share": side.moved_bytes / moved[1], "back": back[-1]}
        return gradients

    return {**compare(steps, prefetch_bytes=1 * KIB, **settings), "found": found}


def host_memory():
    """Bridge #4911: microbatches of experts that save more than the host may give."""
    found = {}

    def steps(program):
        for batch in range(8):
            program.begin()
            x = h = leaf(batch, 64)
            for _ in range(2):
                h = program.group("fused_group_mlp", lambda h: h.sin().square().cos(), h)
            program.outputs[batch] = x, h
        for batch in range(8):
            program.backward(batch)
        program.side.end_step()
        found[program.side.name] = program.side.host_bytes
        return program.gradients

    return {**compare(steps, host_memory_bytes=128 * KIB), "host_bytes": found}


def no_switch():
    """NeMo-RL #2279: what stands for TransformerEngine's offload is absent."""

    def steps(program):
        program.begin()
        x = leaf(0)
        program.group("core_attn", torch.sin, x).sum().backward()
        program.side.end_step()
        return [x.grad]

    with mock.patch.object(Theirs, "has_switch", False):
        return compare(steps)


PROGRAMS = {
    "inline_reload": inline_reload,
    "early_end": early_end,
    "early_end, two layers": functools.partial(early_end, 2),
    "pinned_inputs": pinned_inputs,
    "uncompiled": uncompiled,
    "segments": segments,
    "segments, not run again": functools.partial(segments, again=False),
    "discarded_output": discarded_output,
    "discarded_output, marked": functools.partial(discarded_output, is_marked=True),
    "halves": halves,
    "halves of the bytes": functools.partial(halves, policy={"kind": "ratio", "ratio": 0.5}),
    "host_memory": host_memory,
    "no_switch": no_switch,
}


def main(*names):
    from megatron_programs import load_megatron, one_process

    load_megatron()
    import megatron.core

    findings = {"version": megatron.core.__version__}
    with one_process():
        for name in names or PROGRAMS:
            findings[name] = PROGRAMS[name]()
    sys.stdout.write("\n" + json.dumps(findings) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

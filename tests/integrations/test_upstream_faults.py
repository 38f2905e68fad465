"""Known faults of megatron-core's own handler: each shows with it, and not with this package.

This file is run as a program too, in a process of its own because the version of megatron-core is
meant. It takes the same steps with both handlers, on devices that stand for CUDA and whose copies
run as late as their order allows, and prints what it found as JSON:

    PYTHONPATH=.venv/megatron-core-later python tests/integrations/test_upstream_faults.py [PROGRAM]
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parents[1]))
from processes import ROOT, found_by, path_to, run_python

KIB = 1024


class Event:
    """A point in a stream, as ``torch.cuda.Event``."""

    def __init__(self, **_):
        self.stream, self.position = None, 0

    def record(self, stream):
        self.stream, self.position = stream, stream.issued


class Stream:
    """A queue of copies and waits; the compute stream, as the host, is never late."""

    def __init__(self, *, is_late=True):
        self.is_late = is_late
        self.queue, self.issued = deque(), 0

    def issue(self, work):
        self.issued += 1
        self.queue.append(work)
        if not self.is_late:
            self.run_to(self.issued)

    def run_to(self, position):
        while self.issued - len(self.queue) < position:
            self.queue.popleft()()

    def wait_event(self, event):
        if event.stream is not None:
            self.issue(functools.partial(event.stream.run_to, event.position))

    def wait_stream(self, stream):
        self.issue(functools.partial(stream.run_to, stream.issued))


class Theirs:
    """Megatron-core's own handler, and what stands for CUDA where it asks for that.

    Pinned memory holds NaN at first.

    Attributes:
        host_bytes: all that was asked for.
        moved_bytes: copied to the host in the last step.
        num_back: copies back to the device.
    """

    name, has_switch = "theirs", True

    def __init__(self, *, is_late=True):
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

        from megatron_offload.integrations import megatron_core

        megatron_core.uninstall()
        self.interface = module.FineGrainedActivationOffloadingInterface
        self.current = Stream(is_late=False)
        self.streams, self.is_late = [], is_late
        self.pinned, self.host_bytes = [], 0
        self.moved_bytes = self.copied_bytes = self.num_back = 0
        self._copy = torch.Tensor.copy_
        self._module = module

    def stream(self):
        self.streams.append(Stream(is_late=self.is_late))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty(self, *size, device=None, pin_memory=False, **more):
        tensor = torch.empty(*size, **more)
        if torch.device(device or "cpu").type == "cpu" and tensor.is_floating_point():
            tensor.fill_(torch.nan)
            self.pinned.append(tensor)
            self.host_bytes += tensor.nbytes
        return tensor

    def copy(self, tensor, source, non_blocking):
        if not non_blocking:
            return self._copy(tensor, source)
        if any(source is known for known in self.pinned):
            self.num_back += 1
        else:
            self.copied_bytes += source.nbytes
            # A copy may read at once what it writes late. Emptied memory may hold anything.
            is_there = source.untyped_storage().nbytes() >= source.nbytes
            source = source.detach().clone() if is_there else torch.full_like(tensor, torch.nan)
        # A copy that runs late is no change that autograd has to hear of.
        self.current.issue(lambda: self._copy(tensor.data, source.data))
        return tensor

    def end_step(self):
        self.interface.reset()
        for stream in self.streams:
            stream.run_to(stream.issued)
        self.moved_bytes, self.copied_bytes = self.copied_bytes, 0

    @contextlib.contextmanager
    def active(self):
        module, patch = self._module, mock.patch.object
        from megatron.core.extensions import transformer_engine

        cuda = SimpleNamespace(
            Stream=self.stream,
            Event=Event,
            stream=self.on,
            current_stream=lambda: self.current,
            is_available=lambda: False,
        )
        names = {**vars(torch), "cuda": cuda, "empty": self.empty}
        accepts = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))

        def copy_(*tensors, non_blocking=False):
            return self.copy(*tensors, non_blocking)

        with contextlib.ExitStack() as stack:
            for patched in (
                patch(module, "torch", SimpleNamespace(**names)),
                patch(module.ChunkOffloadHandler, "_can_manage_tensor_for_offload", accepts),
                patch(module, "print_offload_summary_table", lambda *_: None),
                patch(torch.Tensor, "copy_", copy_),
                patch(torch.Tensor, "is_pinned", lambda _: True),
                patch(torch.Tensor, "record_stream", lambda *_: None),
            ):
                stack.enter_context(patched)
            if self.has_switch:
                switch = SimpleNamespace(CPUOffloadEnabled=False)
                stack.enter_context(patch(transformer_engine, "cpu_offload", switch))
            module.PipelineOffloadManager.reset_instance()
            yield


class NoGroup(contextlib.nullcontext):
    """What a group is without a handler."""

    def __init__(self, offload, tensor, name):
        super().__init__(tensor)

    def group_offload(self, tensor):
        return tensor

    init_chunk_handler = mark_not_offload = staticmethod(lambda *_: None)


class Without:
    """No handler."""

    name, interface = "without", NoGroup
    active = contextlib.nullcontext
    host_bytes = num_back = 0
    moved_bytes = 1

    def end_step(self):
        """Nothing to end."""


class Ours:
    """This package's, in the same place."""

    name = "ours"

    def __init__(self, *, is_late=True, **settings):
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

        from megatron_offload import OffloadConfig, PipelineOffloadManager
        from megatron_offload.integrations import megatron_core

        self.manager = PipelineOffloadManager.get_instance()
        timing = "late" if is_late else "eager"
        settings = {"host_slab_bytes": 64 * KIB, "min_tensor_bytes": 0, **settings}
        config = OffloadConfig(
            backend="simulated",
            simulated={"copy_timing": timing},
            recompute=(),
            **{"policy": {"kind": "modules"}, **settings},
        )
        self.manager.configure(config)
        megatron_core.install()
        self.interface = module.FineGrainedActivationOffloadingInterface
        self.active = contextlib.nullcontext
        self.num_back = 0
        backend, copy = self.manager.backend, self.manager.backend.copy

        def counted(pairs, stream, label):
            self.num_back += len(pairs) * (stream is backend.h2d_stream)
            return copy(pairs, stream, label)

        backend.copy = counted

    def end_step(self):
        self.interface.reset()

    host_bytes = property(lambda self: self.manager.host_pool.stats.peak_slab_bytes)
    moved_bytes = property(lambda self: self.manager.last_step.offloaded_bytes)


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


# The tests


@pytest.fixture(scope="module")
def findings():
    found = found_by(run_python("-W", "ignore", __file__, path=path_to("later")))
    assert found["version"].startswith("0.19."), "which has the faults"
    return found


RIGHT = {"equal": True, "error": ""}


def test_7398_an_inline_reload_does_not_race_its_own_copy(findings):
    """#7398, #7399: the same steps are right only where copies are done at once."""
    found = findings["inline_reload"]
    assert [run for run, is_right in found.items() if not is_right] == ["theirs, late"]
    assert len(found) == 4


def test_6783_a_chunk_of_one_layer_does_not_end_too_early(findings):
    """#6783, #7574: where a group is kept, the next one is taken for another microbatch's."""
    assert findings["early_end, two layers"]["theirs"] == RIGHT
    assert "Chunk mismatch" in findings["early_end"]["theirs"]["error"]
    assert findings["early_end"]["ours"] == RIGHT


def test_6553_inputs_of_recomputed_norms_are_offloaded(findings):
    """#6553: of six nothing is freed; here all but those that backward needs first."""
    found = findings["pinned_inputs"]
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["alive"]["theirs"] == found["alive"]["without"] == [6, 6, 6]
    assert found["alive"]["ours"] == [2, 2, 2]


def test_6429_segments_run_again_between_forwards(findings):
    """#6429, #6311: there recompute by segments under overlap is refused with offload."""
    assert findings["segments, not run again"]["theirs"] == RIGHT
    assert "Chunk mismatch" in findings["segments"]["theirs"]["error"]
    assert findings["segments"]["ours"] == RIGHT


def test_7237_a_discarded_output_is_not_moved(findings):
    """#7237: what the copy reads is gone, so the projection's weights get a wrong gradient."""
    assert findings["discarded_output, marked"]["theirs"] == RIGHT
    assert findings["discarded_output"]["theirs"] == {"equal": False, "error": ""}
    assert findings["discarded_output"]["ours"] == RIGHT


def test_5101_a_group_that_is_kept_reloads_no_other_early(findings):
    """#5101: when the third group's backward begins, all three that moved are back already."""
    found = findings["halves"]
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["found"]["theirs"]["back"] == 3
    assert found["found"]["ours"]["back"] <= 1, "prefetch_bytes has room for one"


def test_5101_a_share_counts_bytes(findings):
    """#5101: half of six groups is a ninth of the bytes; here half, to within a group."""
    found = findings["halves of the bytes"]
    largest = 8 / 27
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["found"]["theirs"]["share"] == pytest.approx(3 / 27)
    assert 0.5 - largest < found["found"]["ours"]["share"] <= 0.5


def test_4911_the_host_gives_no_more_than_its_cap(findings):
    """Megatron-Bridge #4911: fused experts pin all that they save; here the rest stays."""
    found = findings["host_memory"]
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["host_bytes"]["theirs"] > 700 * KIB
    assert 0 < found["host_bytes"]["ours"] <= 128 * KIB


def test_2279_no_variable_has_to_be_set(findings):
    """NeMo-RL #2279: what is missing is noticed by the first forward, if at all."""
    assert "TE CPU offload is not available" in findings["no_switch"]["theirs"]["error"]
    assert findings["no_switch"]["ours"] == RIGHT


def test_the_documents_name_every_test_of_a_fault():
    named = re.findall(r"`(test_\d+\w+)`", (ROOT / "docs" / "megatron.md").read_text())
    assert sorted(named) == sorted(name for name in globals() if re.match(r"test_\d", name))


if __name__ == "__main__":
    main(*sys.argv[1:])

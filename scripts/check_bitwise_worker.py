"""One rank of `check_bitwise.py`: all combinations, one after another, in one process.

    python check_bitwise_worker.py SPEC.json

`check_bitwise.py` starts it once per rank, with the rank in the environment. The first rank writes
the report. What fails while a model is built, on any rank, is a row, and all go on. What fails
inside a pipeline ends the process, because its neighbours may wait for what never comes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import math
import os
import platform
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from bench_peers_measure import reason_of, versions, write
from bench_peers_modes import MODES
from bench_peers_worker import Program, build_chunks, join_ranks, prepared_megatron
from check_bitwise import PAIRS, first_difference, judge, row_line
from check_bitwise_models import MIXTURES, left_out, options_of, parts_of, stand_in

from megatron_offload.machine.job_ranks import gather

STARTING_S = 180.0
ENDING_S = 30.0
NO_GRADIENT = "0" * 16


@contextlib.contextmanager
def deadline(seconds):
    """End the process where the body takes longer; its log says so, and where it was."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def open_ranks(spec):
    """Join all ranks, once for all combinations; yields this rank's device."""
    device = join_ranks(spec["device"], 1800)  # what is late ends by its deadline
    from megatron.core import parallel_state

    on_gpu = device.type == "cuda"
    for name in ("hybrid.hybrid_model", "hybrid.hybrid_layer_specs", "gpt.fine_grained_callables"):
        with contextlib.suppress(ImportError):  # bridges reach what is loaded
            importlib.import_module(f"megatron.core.models.{name}")
    for name in ("common", "gpt"):  # where it is, by version
        with contextlib.suppress(ImportError):
            importlib.import_module(f"megatron.core.models.{name}.model_chunk_schedule_plan")
    with prepared_megatron(on_gpu=on_gpu, is_deterministic=True):
        if not on_gpu:
            stand_in()
        # What is here now stays: the collections after each model need not look at it.
        gc.collect()
        gc.freeze()
        yield device
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Check:
    """What is kept from one combination to the next: the steps without offload."""

    def __init__(self, spec, device, report):
        self.spec, self.device, self.report = spec, device, report
        self.on_gpu = device.type == "cuda"
        self.references = {}
        self.joined = None

    def row(self, combination):
        """Check one combination; return its row, the same on every rank."""
        reason = left_out(combination, self.on_gpu)
        if reason is not None:
            return {**combination, "status": "left out", "reason": reason, "ranks": []}
        started = time.perf_counter()
        key = tuple(combination[name] for name in ("vpp", "dtype", "model"))
        if key not in self.references:
            self.references[key] = self.reference(combination)
            started = time.perf_counter()
        reference = self.references[key]
        if reference["error"] is None:
            reason = reference["empty"].get(combination["name"])
            if reason is not None:
                return {**combination, "status": "left out", "reason": reason, "ranks": []}
            found = self.train(combination, combination["modules"])
            error = found["error"]
        else:
            error = f"without offload: {reference['error']}"
        if error is not None:
            row = {**combination, "status": "failed", "reason": error, "ranks": []}
        else:
            found["first_difference"] = first_difference(reference["steps"], found["steps"])
            if found["first_difference"] is None:
                del found["steps"]
            row = judge(combination, gather(found))
        return row | {"seconds": round(time.perf_counter() - started, 2)}

    def reference(self, combination):
        """Take the steps without offload, and make a row of them."""
        started = time.perf_counter()
        found = self.train(combination, None)
        if found["error"] is None:
            bad = None if all(map(is_sound, found["steps"])) else "no finite loss, or no gradients"
            errors = [error for error in gather(bad) if error]
            found["error"] = errors[0] if errors else None
        row = {**combination, "name": "none", "modules": [], "budgets": None, "reason": None}
        row["id"] = row["id"].partition(":")[0] + ":none"
        row["status"] = "done" if found["error"] is None else "failed"
        row |= {"reason": found["error"], "ranks": []}
        row["steps"] = gather(found.get("steps"))
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.report.add(row)
        return found

    def repeat(self, combination):
        """After a difference: whether the steps without offload repeat themselves, as a row."""
        key = tuple(combination[name] for name in ("vpp", "dtype", "model"))
        reference = self.references[key]
        if reference.get("repeated"):
            return
        reference["repeated"] = True
        started = time.perf_counter()
        again = self.train(combination, None)
        difference = None
        if again["error"] is None:
            difference = first_difference(reference["steps"], again["steps"])
        row = {**combination, "name": "none, again", "modules": [], "budgets": None}
        row["id"] = row["id"].partition(":")[0] + ":none, again"
        nothing = {"reloaded_bytes": 0, "recomputed_bytes": 0}
        row["ranks"] = gather({"first_difference": difference, **nothing})
        same = all(rank["first_difference"] is None for rank in row["ranks"])
        row |= {"status": "equal" if same else "differs", "reason": again["error"]}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.report.add(row)

    def train(self, combination, modules):
        """Build the model and take the steps, with these modules or (None) without offload.

        Returns:
            What this rank saw, with ``error`` None, or the ``error`` of all ranks.
        """
        self.report.begin(combination, reference=modules is None)
        # The first steps of a kind of layer also load and choose its kernels.
        seconds = self.spec["deadline"] * (2 if modules is None else 1)
        with deadline(seconds):
            try:
                return self._train(combination, modules)
            finally:
                gc.collect()

    def _train(self, combination, modules):
        spec = self.spec_of(combination, modules)
        error = program = mode = None
        try:
            mode = self.mode_of(spec, combination)
            program = self.build(spec, mode, combination)
            if modules is None and spec["pair"] != "dp":  # which counts gradients
                try_layer(program)
        except Exception as exception:  # noqa: BLE001 - every failure is a row
            traceback.print_exc()
            error = reason_of(exception)
        errors = [f"rank {rank}: {e}" for rank, e in enumerate(gather(error)) if e]
        if errors:
            return {"error": errors[0]}
        found = {"error": None, "steps": []}
        names = ("offloaded", "reloaded", "recomputed", "refused", "externally_referenced")
        counters = dict.fromkeys((f"{name}_bytes" for name in names), 0)
        for number in range(self.spec["steps"]):
            evaluated = program.evaluate(number) if number == 1 else None
            program.choose_microbatches(number)
            _, loss, gradients = program.step(number)
            found["steps"].append([loss, gradients, evaluated])
            for name in counters if modules is not None else ():
                counters[name] += getattr(mode.manager.last_step, name)
        if modules is None:
            return found | {"empty": empty_groups(program.chunks)}
        left = {name: count for name, count in mode.manager.state_of().items() if count}
        mode.manager.close()
        return found | counters | {"left": left}

    def spec_of(self, combination, modules):
        """Return what the benchmark's parts want to know."""
        sizes = self.spec["sizes"]
        options = [f"host_memory_bytes={self.spec['host_memory']}"]
        options.append(f"host_slab_bytes={sizes['slab']}")
        options.append(f"recompute=[{', '.join(combination['recompute'])}]")
        options.append("policy.kind=modules")  # all of them move
        if combination["budgets"] != "auto":
            inflight, _, prefetch = combination["budgets"].partition("/")
            options += [f"max_inflight_bytes={inflight}", f"prefetch_bytes={prefetch}"]
        seq, microbatches = sizes["seq"], sizes["microbatches"]
        if self.on_gpu and combination["dtype"] == "fp32":
            seq = max(1, seq // 2)
        may_halve = microbatches % (2 * sizes["pp"]) == 0
        if self.on_gpu and combination["model"] in MIXTURES and may_halve:
            microbatches //= 2
        return {
            **sizes,
            "pp": combination["pp"],
            "pair": PAIRS.get(combination["model"]),
            "vpp": combination["vpp"],
            "dtype": combination["dtype"],
            "seq": seq,
            "microbatches": microbatches,
            "most": microbatches,
            "seed": self.spec["seed"],
            "deterministic": True,
            "mode": combination["id"],
            "modules": modules or [],
            "options": options,
        }

    def mode_of(self, spec, combination):
        """Return how the model runs: the benchmark's own modes, on this kind of layer."""
        from megatron_offload.integrations import megatron_core

        if not spec["modules"]:
            megatron_core.uninstall()
        mode = MODES["ours" if spec["modules"] else "none"]({**spec, "rank": dist.get_rank()})
        options = mode.transformer_options()
        options |= options_of(combination, spec, self.on_gpu)
        mode.transformer_options = lambda: options
        return mode

    def build(self, spec, mode, combination):
        """Build the model as if it were the first of its process."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        self.join(spec["pp"], spec["pair"])
        virtual = spec["vpp"] if spec["vpp"] > 1 else None
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(spec["seed"] + pp_rank)
        model_parallel_cuda_manual_seed(spec["seed"] + pp_rank, force_reset_rng=True)
        mode.prepare()
        chunks = build_chunks(spec, mode, self.device, **parts_of(combination, spec, self.on_gpu))
        mode.attach(chunks, pp_rank)
        make = Updates if spec["pair"] == "dp" else Steps
        return make(spec, mode, chunks, self.device)

    def join(self, pp, pair):
        """Join the ranks of a model's parallel groups, if they are not these already."""
        from megatron.core import parallel_state

        if self.joined == (pp, pair):
            return
        if self.joined is not None:
            dist.barrier()
            parallel_state.destroy_model_parallel()
        kinds = {"tp": "tensor_model", "ep": "expert_model", "cp": "context"}
        sizes = {f"{kinds[pair]}_parallel_size": 2} if pair in kinds else {}
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pp, create_gloo_process_groups=False, **sizes
        )
        self.joined = pp, pair


class Steps(Program):
    """Steps of different numbers of microbatches, and evaluations."""

    def choose_microbatches(self, number):
        """Take all of them in every other step, and else as near to half as the ranks allow."""
        most, pp = self.spec["most"], self.spec["pp"]
        self.spec["microbatches"] = max(pp, most // 2 // pp * pp) if number % 2 else most

    def evaluate(self, number):
        """Return the loss of a pass without backward (None but on the last stage)."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            _, loss, _ = self.step(number, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def own(self, part):
        """Return of a sequence what is this rank's: of context parallelism the first and last."""
        if self.spec["pair"] != "cp":
            return part.contiguous()
        from megatron.core import parallel_state

        rank, parts = parallel_state.get_context_parallel_rank(), part.chunk(4, 1)
        return torch.cat([parts[rank], parts[3 - rank]], 1)


class Updates(Steps):
    """Steps that end with Megatron's distributed optimizer, whose ranks have microbatches each."""

    def __init__(self, spec, mode, chunks, device):
        from megatron.core import distributed, optimizer

        config = chunks[0].config
        reduced = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.grad = None
        chunks = [distributed.DistributedDataParallel(config, reduced, one) for one in chunks]
        config.finalize_model_grads_func = distributed.finalize_model_grads
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        super().__init__(spec, mode, chunks, device)
        self.gradients = [buffer.grad_data for chunk in chunks for buffer in chunk.buffers]
        settings = optimizer.OptimizerConfig(
            lr=1e-3,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )
        self.optimizer = optimizer.get_megatron_optimizer(
            settings, chunks, use_gloo_process_groups=False
        )

    def step(self, number, *, forward_only=False):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        found = super().step(number, forward_only=forward_only)
        if not forward_only:
            is_updated, *_ = self.optimizer.step()
            assert is_updated
        return found

    def tokens(self, number):
        return super().tokens(2 * number + dist.get_rank() % 2)


def try_layer(program):
    """Run one layer alone, forward and backward.

    A kernel that does not exist for this kind of layer then fails on every rank at the same place,
    and not inside a pipeline.
    """
    layer = program.chunks[0].decoder.layers[0]
    spec, parameter = program.spec, next(layer.parameters())
    size = (spec["seq"], spec["mbs"], spec["hidden"])
    hidden = torch.randn(size, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
    output = layer(hidden_states=hidden, attention_mask=None)
    (output[0] if isinstance(output, tuple) else output).float().sum().backward()
    program.synchronize()


def empty_groups(chunks):
    """Return the groups in which this kind of layer has nothing, each with why."""
    from megatron.core.transformer.identity_op import IdentityOp

    layer = getattr(chunks[0], "module", chunks[0]).decoder.layers[0]
    norms = {"attn_norm": layer.input_layernorm, "mlp_norm": layer.pre_mlp_layernorm}
    why = "the norm is part of the linear layer behind it"
    return {name: why for name, norm in norms.items() if isinstance(norm, IdentityOp)}


def is_sound(step):
    loss, gradients, _ = step
    return gradients != NO_GRADIENT and (loss is None or math.isfinite(float.fromhex(loss)))


class Report:
    """The file with all rows, which the first rank writes; the others' do nothing."""

    def __init__(self, path, rank):
        self._path = path if rank == 0 else None
        self._data = json.loads(path.read_text())

    def describe(self, device):
        """Add where all this runs."""
        on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "CPU"
        self._data |= {"device_name": name, "versions": versions()}
        self._save()

    def begin(self, combination, *, reference):
        """Note what runs, in case this process dies."""
        self._data["running"] = {"combination": combination, "reference": reference}
        self._save()

    def add(self, row):
        self._data["running"] = None
        if row["id"] not in {known["id"] for known in self._data["rows"]}:
            self._data["rows"].append(row)
            if self._path is not None:
                print(row_line(row), flush=True)
        self._save()

    def _save(self):
        if self._path is not None:
            write(self._path, self._data)


def run(spec, rank):
    report = Report(Path(spec["report"]), rank)
    ranks = contextlib.ExitStack()
    with deadline(STARTING_S):
        device = ranks.enter_context(open_ranks(spec))
    report.describe(device)
    check = Check(spec, device, report)
    for combination in spec["todo"]:
        if gather(time.time() > spec["stop_at"])[0]:
            break
        row = check.row(combination)
        report.add(row)
        if row["status"] == "differs":
            check.repeat(combination)
    with deadline(ENDING_S):
        ranks.close()


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    faulthandler.enable()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")

    try:
        run(spec, rank)
    except BaseException as error:  # noqa: BLE001 - the row of what ran says why
        failure = {"rank": rank, "at": time.time(), "reason": reason_of(error)}
        write(Path(spec["failures"]) / f"rank{rank}.json", failure)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Leaving the communicators to their destructors could wait for ranks that wait for this.
        os._exit(1)


if __name__ == "__main__":
    main()

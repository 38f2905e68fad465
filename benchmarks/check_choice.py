"""How good the choice of what is kept, moved and recomputed is, held against more of them.

    python benchmarks/check_choice.py random --number 1000
    python benchmarks/check_choice.py exact --number 200
    python benchmarks/check_choice.py search --minutes 2 --output docs/benchmarks/choice.json

``random``: small pipelines with units of any cost; every plan keeps its targets as simulated, and
none is more than 0.05 % slower than the one that recomputes nothing. ``exact``: jobs of a few
groups, against all sets of groups and units in several rooms. ``search``: described and recorded
jobs with four targets each; a local search changes single groups, units and limits of the plan for
so many minutes a job, and says how much quicker a step it found that keeps the target.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_offload.core.machine import Machine
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.description import load_description
from megatron_offload.planning.files import load_profile
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork, UnitWork
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.profiled_job import job_of, profiles_of
from megatron_offload.planning.schedule import make_schedule
from megatron_offload.planning.simulate import Simulation, settings_of, simulate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "planning"))

from problems import MIB, random_job  # noqa: E402 - of the tests

SAME_SHARE = 5e-4
"""Steps that differ by less are alike to the choice: a slower link decides between them."""


def with_units(rng: random.Random, job: Job) -> Job:
    """Return a job of whose bytes some can be recomputed, quickly or not."""
    cost_of = {name: 10 ** rng.uniform(-6.5, -3.5) for name in ("norm", "mlp_act", "fc1")}

    def changed(work: GroupWork, order: int) -> GroupWork:
        units, left_bytes = [], work.num_bytes
        for name, us_per_byte in cost_of.items():
            if work.is_marked and left_bytes and rng.random() < 0.4:
                size = rng.randint(1, left_bytes)
                left_bytes -= size
                distance = rng.randint(0, min(order, 1))
                units.append(UnitWork(name, size, size * us_per_byte, (distance,)))
        return replace(work, units=tuple(units))

    def of_stage(stage: StageWork) -> StageWork:
        orders = itertools.accumulate((work.is_marked for work in stage.groups), initial=0)
        pairs = zip(stage.groups, orders, strict=False)
        return replace(stage, groups=tuple(changed(work, order) for work, order in pairs))

    return replace(job, stages=tuple(map(of_stage, job.stages)))


def targets_of(chooser: Chooser, number: int) -> list[int]:
    lowest, highest = chooser.lowest_bytes, chooser.highest_bytes
    return [
        lowest + (highest - lowest) * (2 * index + 1) // (2 * number) for index in range(number)
    ]


def step_us(plan: OffloadPlan) -> float:
    return max(rank.predicted_step_us or 0.0 for rank in plan.ranks)


def check_random(seed: int) -> list[str]:
    """Return what is wrong with plans for one random pipeline."""
    rng = random.Random(seed)
    job = with_units(rng, random_job(rng, most_ranks=3))
    profiles = profiles_of(job)
    chooser = Chooser(profiles, job)
    alone = Chooser(profiles, job, RankSettings(recompute=()))
    wrong = []
    num_ranks = job.schedule.num_ranks
    for target in targets_of(chooser, 3):
        plan = chooser.under((target,) * num_ranks)
        step = simulate(job, settings_of(plan))
        peak = max(rank.peak_reserved_bytes for rank in step.ranks)
        if peak > target or step.step_us != step_us(plan):
            wrong.append(f"seed {seed}: {peak} bytes for a target of {target}")
        if target >= alone.lowest_bytes:
            without = step_us(alone.under((target,) * num_ranks))
            if step.step_us > without * (1 + SAME_SHARE):
                wrong.append(f"seed {seed}: {step.step_us} us, {without} with nothing recomputed")
    return wrong


def small_job(rng: random.Random) -> Job:
    """Return a job of so few groups that all choices can be simulated."""
    groups = []
    for index in range(3):
        us, size = rng.uniform(1000, 8000), rng.randint(2, 8) * 16 * MIB
        groups.append(GroupWork(f"part{index}", size, us, 2 * us))
    narrow = Machine(both_gbps=8, d2h_gbps=10, h2d_gbps=10, node_gbps=20)
    return with_units(
        rng, Job(make_schedule("1f1b", 1, 2), (StageWork(tuple(groups)),), (0,), narrow)
    )


def all_steps(job: Job, chooser: Chooser) -> Iterator[Simulation]:
    """Yield every choice of groups and units of a job of one rank, in several rooms."""
    names = sorted({unit.unit for work in job.stages[0].groups for unit in work.units})
    everything = chooser.under((chooser.lowest_bytes,)).ranks[0]
    keys = [choice.key for choice in everything.choices]
    saved_bytes = 2 * sum(work.num_bytes for work in job.stages[0].groups)
    for number in range(len(names) + 1):
        for units in itertools.combinations(names, number):
            yield simulate(job, RankSettings(offloads=False, recompute=(frozenset(units),)))
            for room, split in itertools.product((0.2, 0.3, 0.45, 0.7, 1.0), (0.25, 0.5, 0.75)):
                for num_kept in range(len(keys)):
                    for kept in itertools.combinations(keys, num_kept):
                        back = int(saved_bytes * room * split)
                        out = int(saved_bytes * room) - back
                        yield simulate(
                            job,
                            RankSettings(
                                frozenset(kept),
                                out,
                                back,
                                recompute=(frozenset(units),),
                            ),
                        )


def check_exact(seed: int) -> float:
    """Return how much longer the worst plan's step is than the best one's, in per cent."""
    job = small_job(random.Random(seed))
    chooser = Chooser(profiles_of(job), job)
    steps = list(all_steps(job, chooser))
    worst = 0.0
    for target in targets_of(chooser, 4):
        found_us = step_us(chooser.under((target,)))
        fitting = [s.step_us for s in steps if s.ranks[0].peak_reserved_bytes <= target]
        worst = max(worst, 100 * (found_us / min(fitting, default=found_us) - 1))
    return worst


def jobs() -> Iterator[tuple[str, Job, list]]:
    """Yield what jobs are searched, with the profiles of their ranks."""
    model = ROOT / "configs" / "models" / "gpt_16x8192_pp4_vpp2.yaml"
    one = ("model.pipeline_parallel=1", "model.virtual_stages=1", "machine.gpus_per_node=1")
    small = ("model.hidden=4096", "model.ffn=16384", "model.heads=32")
    described = {
        "16 x 8192, PP=4, VPP=2": (),
        "16 x 8192, PP=4, 1f1b": ("model.virtual_stages=1",),
        "16 x 8192, PP=4, gpipe": ("model.virtual_stages=1", "model.schedule=gpipe"),
        "8 x 8192, PP=2, VPP=2": ("model.layers=8", "model.pipeline_parallel=2"),
        "16 x 4096, one GPU": (*one, *small),
        "6 x 8192, one GPU": (*one, "model.layers=6", "model.num_microbatches=2"),
        "16 x 4096, s 8192, one GPU": (*one, *small, "model.sequence=8192"),
        "32 x 4096, s 8192, PP=8": (
            *small,
            *("model.layers=32", "model.sequence=8192", "model.pipeline_parallel=8"),
            *("model.virtual_stages=1", "model.num_microbatches=16"),
        ),
        "16 x 8192, slow link": ("machine.both_gbps=12", "machine.node_gbps=50"),
    }
    for name, overrides in described.items():
        fixed = ("measured=null", "model.achieved_share=0.6")
        job = load_description(model, (*fixed, *overrides)).job()
        yield name, job, profiles_of(job)
    folder = ROOT / "docs" / "benchmarks" / "h200" / "profiles_c"
    profiles = [load_profile(folder / f"profile_{rank}.json") for rank in range(4)]
    yield (
        "recorded, four H200s",
        job_of(profiles, make_schedule("interleaved", 4, 8, 2), Machine()),
        profiles,
    )


def improve(
    job: Job, plan: OffloadPlan, target: int, seconds: float, seed: int
) -> tuple[float, int]:
    """Return the shortest step that a local search finds within a target, and how many it tried."""
    rng = random.Random(seed)
    best = settings_of(plan)
    step = simulate(job, best)
    best_us, tried, ends = step.step_us, 0, time.monotonic() + seconds
    keys = [[choice.key for choice in rank.choices if choice.identity[2]] for rank in plan.ranks]
    units = sorted({u.unit for stage in job.stages for work in stage.groups for u in work.units})
    num_virtual = len(job.schedule.stages_of(0))
    while time.monotonic() < ends:
        changed = list(best)
        for rank in rng.sample(range(len(best)), rng.choice([1, 1, 1, min(2, len(best))])):
            changed[rank] = mutated(rng, changed[rank], keys[rank], units, num_virtual, job)
        step = simulate(job, changed)
        tried += 1
        peak = max(rank.peak_reserved_bytes for rank in step.ranks)
        if peak <= target and step.step_us <= best_us:
            best, best_us = changed, step.step_us
    return best_us, tried


def mutated(
    rng, settings: RankSettings, keys: list, units: list, num_virtual: int, job: Job
) -> RankSettings:
    """Return settings of a rank with something else."""
    if not settings.offloads:
        room = 4 * max(work.num_bytes for stage in job.stages for work in stage.groups)
        settings = replace(
            settings,
            offloads=True,
            kept=frozenset(keys),
            max_inflight_bytes=room // 2,
            prefetch_bytes=room // 2,
        )
    what = rng.random()
    if what < 0.6:
        kept = set(settings.kept)
        for key in rng.sample(keys, min(len(keys), rng.choice([1, 1, 2, 4]))):
            kept ^= {key}
        return replace(settings, kept=frozenset(kept))
    if what < 0.8 or not units:
        out, back = settings.max_inflight_bytes or 0, settings.prefetch_bytes or 0
        shift = rng.choice([-1, 1]) * rng.choice([0.05, 0.2]) * (out + back)
        grow = rng.choice([0.9, 1.0, 1.0, 1.1])
        out, back = int(max(0, (out + shift) * grow)), int(max(0, (back - shift) * grow))
        return replace(settings, max_inflight_bytes=out, prefetch_bytes=back)
    recompute = [set(names) for names in settings.recompute or ()]
    recompute += [set() for _ in range(num_virtual - len(recompute))]
    recompute[rng.randrange(num_virtual)] ^= {rng.choice(units)}
    return replace(settings, recompute=tuple(map(frozenset, recompute)))


def search(minutes: float, only: str) -> Iterator[dict]:
    for name, job, profiles in jobs():
        if only not in name:
            continue
        began = time.process_time()
        chooser = Chooser(profiles, job)
        for target in targets_of(chooser, 4):
            plan = chooser.under((target,) * job.schedule.num_ranks)
            planning_s, began = time.process_time() - began, time.process_time()
            better_us, tried = improve(job, plan, target, 15 * minutes, seed=target % 1000)
            yield {
                "job": name,
                "target_gib": round(target / 2**30, 2),
                "added_percent": round(100 * (step_us(plan) / chooser.without.step_us - 1), 3),
                "recomputed_gib": round(
                    sum(rank.recomputed_bytes for rank in plan.ranks) / 2**30, 1
                ),
                "moved_gib": round(plan.moved_bytes / 2**30, 1),
                "planning_s": round(planning_s, 2),
                "found_quicker_percent": round(100 * (1 - better_us / step_us(plan)), 3),
                "steps_searched": tried,
            }
            began = time.process_time()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["random", "exact", "search"])
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0, help="of the search of each job")
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.number)
    if given.what == "search":
        rows = []
        for row in search(given.minutes, given.only):
            rows.append(row)
            print(json.dumps(row), flush=True)
        worst = max(row["found_quicker_percent"] for row in rows)
        print(f"at most {worst} % quicker was found")
        if given.output:
            command = "python benchmarks/check_choice.py " + " ".join(sys.argv[1:])
            given.output.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
        return int(worst > 1.0)
    if given.what == "exact":
        worst = sorted(((check_exact(seed), seed) for seed in seeds), reverse=True)
        print(f"{given.number} jobs: at most {worst[0][0]:.2f} % longer than the best; {worst[:5]}")
        return int(worst[0][0] > 5.0)
    wrong = [line for seed in seeds for line in check_random(seed)]
    print("\n".join([*wrong, f"{given.number} pipelines, {len(wrong)} things wrong"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

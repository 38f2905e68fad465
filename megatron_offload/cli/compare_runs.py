"""Trains twice, without and with offload, and says whether the two runs are the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_offload.cli.plan import make, policy_config, write
from megatron_offload.cli.report import write_page
from megatron_offload.cli.source import SourceOptions, find_profiles, load_source
from megatron_offload.core.policy_config import PlanFileConfig, PolicyConfig
from megatron_offload.core.profile import StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.planning.policy import PlanFilePolicy
from megatron_offload.report.console import console
from megatron_offload.report.plots import plot_comparison
from megatron_offload.report.tables import compare_table, group_table, memory_table, rank_table
from megatron_offload.train.comparison import FOLDERS, Comparison, compare_reports, write_comparison
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.launch import launch
from megatron_offload.train.records import RunReport
from megatron_offload.train.run_folder import plan_path, write_config

_NUM_TARGETS = 3
"""Points of the predicted trade-off curve, which a comparison should not wait long for."""

_DRAWN = {
    "peak_live_activation_bytes": "Peak live saved activations",
    "peak_reserved_bytes": "Peak reserved device memory",
}
"""What is drawn of each rank: the first that was measured."""


def compare(config: TrainConfig) -> int:
    """Run without and with offload, print and write the comparison.

    Returns:
        0 where the runs are bitwise identical, else 1; 0 on torchrun's ranks other than 0.
    """
    plain, offloaded = (_variant(config, folder) for folder in FOLDERS)
    folder = config.run.output
    runs = [("without offload", plain), ("with offload", offloaded)]
    with launch(runs, comparison=folder) as reports:
        if reports is None:
            return 0
        result = compare_reports(*reports)
        out = console()
        _print(out, config, reports, result)
        write_config(config, folder)
        out.print(f"numbers: {write_comparison(config, reports, result, folder)}")
        for line in (f"plot: {_plot(config, reports)}", *_plan(folder), _report(folder)):
            out.print(line)
    return 0 if result.identical else 1


def _variant(config: TrainConfig, folder: str) -> TrainConfig:
    """Return the same run with or without offload, whole, writing into a folder of its own."""
    is_offloaded = folder == FOLDERS[1]
    run = {
        "output": config.run.output / folder,
        "resume": False,
        "checkpoint_interval": 0,
        "max_restarts": 0,
    }
    if not is_offloaded:  # there are no groups to look at
        run |= {"trace_step": 0, "profile_step": 0}
    # Copies and not new objects: which offload settings were given must not change.
    return config.model_copy(
        update={
            "offload": config.offload.model_copy(update={"enabled": is_offloaded}),
            "run": config.run.model_copy(update=run),
        }
    )


def _print(out: Console, config: TrainConfig, reports: list[RunReport], result: Comparison) -> None:
    without, offloaded = reports
    rows = [
        {
            "step": a.step,
            "loss": (a.loss, b.loss),
            "grad_norm": (a.grad_norm, b.grad_norm),
            "equal": result.losses_equal[index] and result.grad_norms_equal[index],
        }
        for index, (a, b) in enumerate(zip(without.steps, offloaded.steps, strict=True))
    ]
    out.print(compare_table(rows))
    ranks = offloaded.peaks()
    out.print(rank_table(ranks, "With offload: bytes of the last step, peaks over usual steps"))
    out.print(group_table(ranks, "Groups of the last step"))
    if ranks[0]["peak_live_activation_bytes"] is not None:
        out.print(memory_table(without.peaks(), ranks))
    on_gpu = ranks[0]["peak_reserved_bytes"] is not None
    times = [report.median_step_time_s(without=config.traced_step) for report in reports]
    if times[0] and times[1]:
        out.print(
            f"median step time: {1e3 * times[0]:.1f} ms without, {1e3 * times[1]:.1f} ms with "
            f"offload ({100 * (times[1] / times[0] - 1):+.1f} %)"
            + ("" if on_gpu else "; on a CPU the device is simulated and its speed means nothing")
        )
    for name, equal in result.findings.items():
        out.print(f"{name}: {'equal' if equal else 'DIFFERENT'}")
    out.print(f"bitwise identical: {'yes' if result.identical else 'no'}", style="bold")


def _plot(config: TrainConfig, reports: list[RunReport]) -> str:
    """Draw both runs; return the file's path, or why there is none."""
    path = config.run.output / "compare.png"
    losses = [[step.loss for step in report.steps] for report in reports]
    peaks = [report.peaks() for report in reports]
    for key, title in _DRAWN.items():
        sizes = [[rank[key] for rank in ranks] for ranks in peaks]
        if sizes[0][0] is None:
            continue
        try:
            plot_comparison(path, (losses[0], losses[1]), (sizes[0], sizes[1]), title)
        except ConfigError as error:
            return f"left out: {error}"
        return str(path)
    return "left out: nothing was measured; set run.measure_live_bytes: true"


def _plan(folder: Path) -> list[str]:
    """Plan from the profiles that the run has left; return what became of it, line by line.

    A plan that fits the run stays, because it may have followed it.
    """
    try:
        if not find_profiles(folder):
            return []
        source = load_source(SourceOptions(folder=folder))
        places = (plan_path(folder / FOLDERS[1]), plan_path(folder))
        found = next((path for path in places if _fits(path, source.profiles)), None)
        config: PolicyConfig = policy_config(source)
        if found is not None:
            config = PlanFileConfig(kind="plan_file", path=str(found))
        outcome = make(source, config, _NUM_TARGETS)
        curve = write(outcome, plan_path(folder), only_curve=found is not None)
    except ConfigError as error:  # the extra ``plan`` may be missing
        return [f"plan: left out: {error}"]
    return [f"plan: {found or plan_path(folder)}", f"predicted trade-off: {curve}"]


def _fits(path: Path, profiles: Sequence[StepProfile]) -> bool:
    """Return whether there is a plan, and it is one for these profiles."""
    try:
        PlanFilePolicy(path).make_plan(profiles)
    except ConfigError:
        return False
    return True


def _report(folder: Path) -> str:
    """Write the HTML page; return where it is, or why there is none: the comparison stands."""
    try:
        return f"report, for a browser: {write_page(folder)}"
    except ConfigError as error:
        return f"report: left out: {error}"

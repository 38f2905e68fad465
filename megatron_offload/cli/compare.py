"""Train twice from the same seed, without and then with offload, and compare every step's bits.

reads    --config, a YAML file (or the name of one in configs/); flags win over the file, and
         whether offload is enabled there makes no difference
prints   every step with offload, and whether it is the same without; what was offloaded, peak
         memory, 'bitwise identical: yes' or 'no', and in the end what that showed and what to do
         next
writes   run.output: both runs in without_offload/ and with_offload/, compare.json and report.html
         (extra 'report'). A run that finds rows leaves frontier.json in with_offload/ (see
         'megatron-offload plan --from'). An earlier comparison in the same folder is replaced; one
         that holds another run is refused

exit status: 0 the same bits, 1 they differ or a rank failed, 2 bad input (nothing was started), 143
or 130 stopped by SIGTERM or SIGINT

example: megatron-offload compare --config quickstart
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_offload.cli.report import write_page
from megatron_offload.cli.train import Given, found_in, read_config
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import read_model
from megatron_offload.observe.run_report import RunFacts, write_config
from megatron_offload.report.console import console
from megatron_offload.report.report import Report
from megatron_offload.report.tables import rank_table
from megatron_offload.train import records
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.launch import launch


def run(given: Given) -> int:
    """Compare two runs; return 0 where their bits are the same, else 1."""
    config = read_config(given)
    folder = config.run.output
    plain, offloaded = (_variant(config, name) for name in records.FOLDERS)
    runs = [("without offload", plain), ("with offload", offloaded)]
    with launch(runs, comparison=folder) as facts:
        result = read_model(records.Comparison, folder / records.COMPARISON_NAME)
        out = console()
        title = "With offload: bytes of the last step, peaks over usual steps"
        out.print(rank_table(facts[1].by_rank, title))
        for name, equal in result.findings.items():
            out.print(f"{name}: {'equal' if equal else 'DIFFERENT'}")
        out.print(f"bitwise identical: {'yes' if result.is_identical else 'no'}", style="bold")
        write_config(config, folder)
        try:
            page = f"report, for a browser: {write_page(folder)}"
        except ConfigError as error:  # the comparison stands
            page = f"report: left out: {error}"
        files = f"findings: {folder / records.COMPARISON_NAME}", page
        for line in (*found_in(offloaded.run.output), *files, *_summary(config, facts, result)):
            out.print(line)
    return 0 if result.is_identical else 1


def _variant(config: TrainConfig, folder: str) -> TrainConfig:
    """Return the same run with or without offload, whole, writing into a folder of its own."""
    is_offloaded = folder == records.FOLDERS[1]
    run: dict[str, Any] = {"output": config.run.output / folder}
    if not is_offloaded:  # there are no groups to look at
        run |= {"trace_step": 0}
    # Copies and not new objects: which offload settings were given must not change.
    sections = {
        "offload": config.offload.model_copy(update={"enabled": is_offloaded}),
        "run": config.run.model_copy(update=run),
    }
    return config.model_copy(update=sections)


def _summary(
    config: TrainConfig, facts: Sequence[RunFacts], result: records.Comparison
) -> Iterator[str]:
    """Yield what two runs have shown: bits, memory, on a GPU time as well; and what to do next."""
    same = "the same bits come out" if result.is_identical else "NOT the same bits come out"
    if any(rank.offloaded_bytes or rank.recomputed_bytes for rank in facts[1].by_rank):
        yield f"Shown: {same} of {config.run.steps} training steps without offload and with it."
    else:
        yield f"Shown: {same}, but nothing was offloaded or recomputed in the last step."
    text = "The device is simulated, so speed is not judged."
    if not facts[1].is_simulated:
        off, on = (run.step_time_s or 0.0 for run in facts)
        text = f"Median step: {1e3 * on:.1f} ms, without {1e3 * off:.1f} ms."
    for kind in Report("", facts[1], facts[0]).memory[:1]:
        was, now = map(format_bytes, kind.highest)
        text = f"{now} of {kind.name} at the peak of the fullest rank, {was} without. {text}"
    yield f"Memory: {text}"
    yield (
        "Next: open the report; then put 'megatron-offload run' before a Megatron script, or "
        "'with OffloadActivations():' around the forward of any model."
    )

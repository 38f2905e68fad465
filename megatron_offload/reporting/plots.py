"""Plots of two runs: their losses, and the memory that each rank needed at most.

Owns the drawing, with matplotlib, which is optional (extra ``plots``). Must not know torch or the
trainer.

Invariant: without matplotlib a plot is left out, never an error. Read next:
`megatron_offload.train.compare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["plot_comparison"]

_MIB = 1024 * 1024


def plot_comparison(
    path: Path,
    losses: tuple[Sequence[float], Sequence[float]],
    memory_bytes: tuple[Sequence[int], Sequence[int]],
    memory_title: str,
) -> bool:
    """Draw two runs into a PNG file.

    Args:
        path: file to write.
        losses: loss of every step, without and with offload.
        memory_bytes: peak memory of every rank, without and with offload.
        memory_title: which memory that is.

    Returns:
        Whether the plot was drawn: False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    # No pyplot: it keeps global state and may look for a display.
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = range(1, len(losses[0]) + 1)
    left.plot(steps, losses[0], linewidth=4, alpha=0.4, label="without offload")
    left.plot(steps, losses[1], linewidth=1.5, linestyle="--", label="with offload")
    left.set(xlabel="step", ylabel="loss", title="Loss")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend()
    ranks = range(len(memory_bytes[0]))
    for offset, values, label in zip((-0.2, 0.2), memory_bytes, ("without", "with"), strict=True):
        places = [rank + offset for rank in ranks]
        bars = right.bar(places, [value / _MIB for value in values], 0.4, label=f"{label} offload")
        right.bar_label(bars, fmt="%.1f", fontsize=8)
    right.set(xlabel="rank", ylabel="MiB", title=memory_title)
    right.set_xticks(list(ranks))
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True

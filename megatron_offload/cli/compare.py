"""The command ``compare``, whose options are those of ``train`` but one."""

from __future__ import annotations

from megatron_offload.cli.train import RunOptions, read_config

ABOUT = """\
Train twice from the same seed, without and then with offload, and compare every step's bits.

reads    --config, a YAML file (or the name of one in configs/); flags win over the file, and
         whether offload is enabled there makes no difference
prints   losses and gradient norms of every step, what moved, peak memory, and in the end
         'bitwise identical: yes' or 'no'
writes   run.output: both runs in without_offload/ and with_offload/, compare.json, compare.png
         and report.html (extra 'report'); where the runs have left profiles, plan.json
         and tradeoff.json (extra 'plan'; see 'megatron-offload plan'). An earlier comparison in the
         same folder is replaced; one that holds another run is refused

exit status: 0 the same bits, 1 they differ or a rank failed, 2 bad input (nothing was started), 143
or 130 stopped by SIGTERM or SIGINT

example: megatron-offload compare --config quickstart
"""

Given = RunOptions


def run(given: RunOptions) -> int:
    """Compare two runs; return 0 where their bits are the same, else 1."""
    config = read_config(given)
    from megatron_offload.cli.compare_runs import compare  # imports torch

    return compare(config)

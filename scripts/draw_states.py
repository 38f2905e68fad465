"""Print the state table of a group as a Mermaid diagram; ``--write`` puts it into docs/design.md.

python scripts/draw_states.py --write
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megatron_offload.core.group import MOVES, GroupState

PAGE = Path(__file__).parent.parent / "docs" / "design.md"
BLOCK = re.compile(r"(?<=<!-- states -->\n).*?(?=<!-- end of states -->)", re.DOTALL)


def diagram() -> str:
    """Return the diagram and a table of what each state means."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {GroupState.RECORDING.name}"]
    for state in GroupState:
        targets = sorted(MOVES[state], key=list(GroupState).index)
        lines += [f"    {state.name} --> {target.name}" for target in targets]
    lines += [f"    {GroupState.DONE.name} --> [*]", "```", "", "| state | meaning |", "|---|---|"]
    lines += [f"| {state.name} | {state.value} |" for state in GroupState]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print or write the diagram."""
    parser = argparse.ArgumentParser(description="Draw the state table of a group.")
    parser.add_argument("--write", action="store_true", help="replace the diagram in the page")
    if not parser.parse_args().write:
        print(diagram(), end="")
        return
    PAGE.write_text(BLOCK.sub(lambda _: diagram(), PAGE.read_text()))


if __name__ == "__main__":
    main()

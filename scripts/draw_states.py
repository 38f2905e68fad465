"""Draw the states of a group from the engine's own table: a picture, and a table of docs/design.md.

python scripts/draw_states.py

Colours differ for colour-blind readers, each shape has its word in it, and what is no shape takes
the colour of the page's own text.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_offload.core.group import MOVES, GroupState

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"(?<=<!-- states -->\n).*?(?=<!-- end of states -->)", re.DOTALL)

DEVICE, OUT, BACK, HOST = "#56b4e9", "#e69f00", "#2fb890", "#c4c4c4"
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" viewBox="0 0 480 394">\
<title>The states of a group of saved tensors</title><style>
svg.drawing { --ink: #24292f; --faint: #6e7781; font: 14px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg.drawing { --ink: #d8dee4; --faint: #9ba3ac; } }
svg.drawing text { fill: var(--ink); }
svg.drawing .in { fill: #111; text-anchor: middle; }
svg.drawing .line { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg.drawing .thin { stroke: var(--faint); stroke-width: 1; }
svg.drawing .dashed { stroke-dasharray: 5 4; }
svg.drawing .head { fill: var(--ink); }
svg.drawing .small { font-size: 12px; }
</style><defs><marker id="states" viewBox="0 0 8 8" refX="7" refY="4" orient="auto" \
markerWidth="7" markerHeight="7"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>
"""
WIDTH, HEIGHT, DONE = 140, 44, GroupState.DONE
PLACES = {
    GroupState.RECORDING: (90, 10, DEVICE, "forward runs"),
    GroupState.RESIDENT: (90, 100, DEVICE, "kept on the device"),
    GroupState.OFFLOADING: (250, 100, OUT, "is copied out"),
    GroupState.ON_HOST: (250, 180, HOST, "only on the host"),
    GroupState.RELOADING: (250, 260, BACK, "is reloaded"),
    DONE: (10, 340, HOST, "backward has left it; from any state where a graph is dropped"),
}
"""Where a state stands, and what it is in three words; the engine's table has more of them."""


def box(state: GroupState) -> str:
    """Return a state with its name and words."""
    x, y, fill, words = PLACES[state]
    width = 460 if state is DONE else WIDTH
    middle, base = x + width / 2, y + HEIGHT / 2 - 2.5
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="3" fill="{fill}"/>\n'
        f'<text class="in" x="{middle:g}" y="{base:g}">{state.name}</text>\n'
        f'<text class="in small" x="{middle:g}" y="{base + 15:g}">{words}</text>\n'
    )


def arrow(state: GroupState, target: GroupState) -> str:
    """Return the arrow of a move."""
    (x1, y1), (x2, y2) = PLACES[state][:2], PLACES[target][:2]
    x1, x2 = x1 + WIDTH // 2, x1 + WIDTH // 2 if target is DONE else x2 + WIDTH // 2
    if y1 == y2:
        side = WIDTH // 2 if x2 > x1 else -WIDTH // 2
        x1, y1, x2, y2 = x1 + side, y1 + HEIGHT // 2, x2 - side, y2 + HEIGHT // 2
    else:
        y1, y2 = y1 + HEIGHT, y2 - 1
    return f'<path class="line" d="M{x1} {y1}L{x2} {y2}" marker-end="url(#states)"/>\n'


def picture() -> str:
    """Return the drawing of the states and their moves."""
    moves = []
    for state, targets in MOVES.items():
        assert state is DONE or DONE in targets
        shown = targets - {DONE} or targets  # the move to the end is shown where it is the only one
        moves += [arrow(state, one) for one in sorted(shown, key=list(GroupState).index)]
    return f"{HEAD}{''.join(map(box, PLACES))}{''.join(moves)}</svg>\n"


def files() -> dict[Path, str]:
    """Return the text of both files."""
    lines = ["![The states of a group](images/states.svg)", "", "| state | meaning |", "|---|---|"]
    lines += [f"| {state.name} | {state.value} |" for state in GroupState]
    table, page = "\n".join(lines) + "\n", DOCS / "design.md"
    return {
        DOCS / "images" / "states.svg": picture(),
        page: BLOCK.sub(lambda _: table, page.read_text()),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)

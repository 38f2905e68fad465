"""Draw the pictures of docs/concepts.md, and the table of states of docs/design.md.

python scripts/draw_concepts.py

The states come from the engine's own table. Colours differ for colour-blind readers, each
shape has its word in it, and what is no shape takes the colour of the page's own text.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_offload.core.group import MOVES, GroupState

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"(?<=<!-- states -->\n).*?(?=<!-- end of states -->)", re.DOTALL)

WIDTH = 480
DEVICE, OUT, BACK, MADE, HOST = "#56b4e9", "#e69f00", "#2fb890", "#d895bb", "#c4c4c4"
STYLE = """
svg.drawing { --ink: #24292f; --faint: #6e7781; font: 14px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg.drawing { --ink: #d8dee4; --faint: #9ba3ac; } }
svg.drawing text { fill: var(--ink); }
svg.drawing .in { fill: #111; text-anchor: middle; }
svg.drawing .line { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg.drawing .thin { stroke: var(--faint); stroke-width: 1; }
svg.drawing .dashed { stroke-dasharray: 5 4; }
svg.drawing .head { fill: var(--ink); }
svg.drawing .small { font-size: 12px; }
"""


class Drawing:
    """Shapes in the order in which they are drawn, each with the place that its text takes."""

    def __init__(self, name: str, height: int, about: str) -> None:
        self.name, self.height, self.about = name, height, about
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, *words: str) -> None:
        """Draw a box with words in it; without a fill it is an empty place."""
        look = f'fill="{fill}"' if fill else 'class="line dashed"'
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {look}/>'
        )
        for number, line in enumerate(words):
            base = y + height / 2 + 5 + 15 * (number - (len(words) - 1) / 2)
            size = " small" if number else ""
            kind = f"in{size}" if fill else f"{size}"
            anchor = "" if fill else ' text-anchor="middle"'
            self.parts.append(
                f'<text class="{kind}" x="{x + width / 2:g}" y="{base:g}"{anchor}>{line}</text>'
            )

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write words that begin at a point."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, label: str = "") -> None:
        """Draw an arrow, with a label in its middle."""
        self.parts.append(
            f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}" marker-end="url(#{self.name})"/>'
        )
        if label:
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            self.box(x - 15, y - 10, 30, 20, HOST, label)

    def path(self, points: list[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        places = "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="line {kind}" d="M{places}"/>')

    def svg(self) -> str:
        """Return the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" '
            f'viewBox="0 0 {WIDTH} {self.height}"><title>{self.about}</title>'
            f"<style>{STYLE}</style><defs>"
            f'<marker id="{self.name}" viewBox="0 0 8 8" refX="7" refY="4" orient="auto" '
            'markerWidth="7" markerHeight="7"><path class="head" d="M0 0L8 4L0 8z"/></marker>'
            "</defs>\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def step() -> Drawing:
    """Draw a step of five layers on its three streams, and the memory of what is saved."""
    drawing = Drawing("step", 336, "One step: compute, copies out, copies back, and memory")
    unit, left, layers, moved, copy = 30.0, 15.0, 5, 3, 1.25
    forward = {i: (i - 1.0, float(i)) for i in range(1, layers + 1)}
    backward = {i: (layers + 2.0 * (layers - i), layers + 2.0 * (layers - i + 1)) for i in forward}
    out = {i: (1 + copy * (i - 1), 1 + copy * i) for i in range(1, moved + 1)}
    back = {i: (backward[i][0] - copy - 0.3, backward[i][0] - 0.3) for i in out}
    lanes = [
        ("compute: forward (F), backward (B)", [(forward, "F", DEVICE), (backward, "B", DEVICE)]),
        ("copies out to the host", [(out, "", OUT)]),
        ("copies back to the device", [(back, "", BACK)]),
    ]
    for row, (title, rows) in enumerate(lanes):
        y = 8 + 62 * row
        drawing.text(left, y + 12, title)
        drawing.path([(left, y + 48.5), (left + 15 * unit, y + 48.5)], "thin")
        for spans, letter, fill in rows:
            for i, (begin, end) in spans.items():
                x = left + unit * begin
                drawing.box(x + 1, y + 19, unit * (end - begin) - 2, 29, fill, f"{letter}{i}")
    saved = [(forward[i][1], 1) for i in forward] + [(backward[i][1], -1) for i in forward]
    moves = [(out[i][1], -1) for i in out] + [(back[i][0], 1) for i in out]
    base, size = 324, 20
    drawing.text(left, 206, "device memory of what forward saves")
    for changes, kind in ((saved, "dashed"), (saved + moves, "")):
        level, points = 0, [(left, float(base))]
        for time, change in sorted(changes):
            points.append((left + unit * time, base - size * level))
            level += change
            points.append((left + unit * time, base - size * level))
        drawing.path(points, kind)
    drawing.path([(left, base + 0.5), (left + 15 * unit, base + 0.5)], "thin")
    drawing.text(left + 7.3 * unit, base - 5 * size + 9, "without offload: five layers")
    drawing.text(left + 7.3 * unit, base - 6, "with: two at most", "small")
    return drawing


def waits() -> Drawing:
    """Draw the six waits between the three streams."""
    drawing = Drawing("waits", 262, "The six waits between the streams")
    for y in (50, 140, 230):
        drawing.path([(10, y), (470, y)], "thin")
    drawing.text(10, 44, "copies back (H2D)")
    drawing.text(10, 114, "compute")
    drawing.text(182, 224, "copies out (D2H)")
    drawing.box(215, 30, 80, 40, BACK, "copy x", "back")
    drawing.box(400, 30, 72, 40, BACK, "next", "copy back")
    drawing.box(10, 120, 80, 40, DEVICE, "forward", "saves x")
    drawing.box(205, 120, 82, 40, DEVICE, "reuse of", "x's memory")
    drawing.box(330, 120, 82, 40, DEVICE, "backward", "reads x")
    drawing.box(92, 210, 76, 40, OUT, "copy x", "out")
    drawing.box(330, 210, 80, 40, OUT, "next", "copy out")
    drawing.arrow(70, 160, 112, 209, "W1")
    drawing.arrow(155, 210, 232, 161, "W2")
    drawing.arrow(128, 210, 226, 71, "W3")
    drawing.arrow(285, 70, 358, 119, "W4")
    drawing.arrow(266, 70, 352, 209, "W5")
    drawing.arrow(396, 120, 432, 71, "W6")
    return drawing


def recipe() -> Drawing:
    """Draw what becomes of four saved tensors of a layer."""
    drawing = Drawing("recipe", 292, "What is kept, offloaded and recomputed")
    places = {"x": 4, "n": 103, "h": 202, "g": 301, "s": 398}
    wide, high = 78, 40
    rows = [
        (26, "forward makes and saves them, on the device", dict.fromkeys(places, (DEVICE, ""))),
        (
            122,
            "until backward",
            {
                "x": (OUT, "on host"),
                "n": ("", "dropped"),
                "h": (OUT, "on host"),
                "g": ("", "dropped"),
                "s": (DEVICE, "kept"),
            },
        ),
        (
            218,
            "backward finds all of them again, bit for bit",
            {
                "x": (BACK, "reloaded"),
                "n": (MADE, "recomputed"),
                "h": (BACK, "reloaded"),
                "g": (MADE, "recomputed"),
                "s": (DEVICE, "kept"),
            },
        ),
    ]
    for y, title, looks in rows:
        drawing.text(4, y - 8, title)
        for name, (fill, word) in looks.items():
            words = ("small" if name == "s" else name, word)
            drawing.box(places[name], y, wide, high, fill, *filter(None, words))
    for y, functions in (
        (26, {"n": "norm", "h": "linear", "g": "GELU"}),
        (218, {"n": "norm", "g": "GELU"}),
    ):
        for name, function in functions.items():
            x = places[name]
            drawing.arrow(x - 21, y + high / 2, x - 1, y + high / 2)
            drawing.text(x - 28, y + high + 14, function, "small")
    return drawing


PLACES = {
    GroupState.RECORDING: (90, 10, DEVICE, "forward runs"),
    GroupState.RESIDENT: (90, 100, DEVICE, "kept on the device"),
    GroupState.OFFLOADING: (250, 100, OUT, "is copied out"),
    GroupState.ON_HOST: (250, 180, HOST, "only on the host"),
    GroupState.RELOADING: (250, 260, BACK, "is reloaded"),
    GroupState.RELOADED: (250, 340, DEVICE, "is back, in order"),
    GroupState.DONE: (
        10,
        420,
        HOST,
        "backward has left it; from any state where a graph is dropped",
    ),
}
"""Where a state stands, and what it is in three words; the engine's table has more of them."""


def states() -> Drawing:
    """Draw the states of a group, and its moves."""
    drawing = Drawing("states", 474, "The states of a group of saved tensors")
    width, height = 140, 44
    done = GroupState.DONE
    for state, (x, y, fill, words) in PLACES.items():
        drawing.box(x, y, 460 if state is done else width, height, fill, state.name, words)
    for state, targets in MOVES.items():
        x1, y1 = PLACES[state][0] + width / 2, PLACES[state][1]
        assert state is done or done in targets
        for target in sorted(targets - {done}, key=list(GroupState).index):
            x2, y2 = PLACES[target][0] + width / 2, PLACES[target][1]
            if y1 == y2:
                side = width / 2 if x2 > x1 else -width / 2
                drawing.arrow(x1 + side, y1 + height / 2, x2 - side, y2 + height / 2)
            else:
                drawing.arrow(x1, y1 + height, x2, y2 - 1)
        if targets == {done}:
            drawing.arrow(x1, y1 + height, x1, PLACES[done][1] - 1)
    return drawing


def table() -> str:
    """Return the states' picture and meanings, as docs/design.md has them."""
    lines = ["![The states of a group](images/states.svg)", "", "| state | meaning |", "|---|---|"]
    lines += [f"| {state.name} | {state.value} |" for state in GroupState]
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """Return the text of every file that is drawn."""
    drawings = (draw() for draw in (step, waits, recipe, states))
    page = DOCS / "design.md"
    return {
        **{DOCS / "images" / f"{drawing.name}.svg": drawing.svg() for drawing in drawings},
        page: BLOCK.sub(lambda _: table(), page.read_text()),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)

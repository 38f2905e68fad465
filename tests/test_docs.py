"""What the documents show is what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_state_diagram_is_drawn_from_the_table():
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_states.py"))["diagram"]()
    assert drawn in (ROOT / "docs" / "design.md").read_text()

"""One word for one thing: docs/glossary.md has what is written, this test what is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatron_offload

PACKAGE = Path(megatron_offload.__file__).parent
ROOT = Path(__file__).parent.parent
INSTEAD = {
    r"(made|makes?|making) (\S+ )?again|remade|remak(e|es|ing)": "recompute",
    r"recorded as one|joined group": "merged groups",
    r"stay(s|ed|ing)?|stands? aside": "keep, disable",
    r"away|(goes?|going|went) to the host": "offload",
    r"(comes?|came|coming|brings?|brought|bringing) (it |them )?back|early returns?": "reload",
    r"elsewhere": "externally referenced",
    r"tell(s|ing)?|told": "register, note, report",
    r"lends?|lent|(takes?|taken|gives?|given) (it |them )?back": "allocate, free",
    r"settled?|settles|settling": "resolve, synchronize, converge",
    r"dear|cheap(er|est)?": "expensive, inexpensive",
    r"deeds?": "decision",
    r"is led": "external plan",
    r"theirs|stand-?ins?|stand ins?|exchang(e|es|ed|ing)": "original, patch",
    r"whoever|nobody|somebody|no one": "the caller, by name",
    r"host is the limit": "CPU-bound",
    r"(lose|loses|lost|changes?) no bit|no bit changes": "bitwise identical",
}
"""By what is not written what is; of identifiers, too, whose underscores count as spaces."""

OLD = re.compile("|".join(rf"(?P<_{i}>\b(?:{one})\b)" for i, one in enumerate(INSTEAD)), re.I)
EXEMPT = ("/files/renames.py",)
"""What has the old names."""


def found_in(text):
    """Yield line number, what stands there, and what to write in its place."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := OLD.search(line.replace("_", " ")):
            yield number, match[0], list(INSTEAD.values())[int(match.lastgroup[1:])]


def files():
    """Return the package's sources and the pages, by names in the checkout."""
    found = (path for kind in ("*.py", "*.html", "*.js") for path in PACKAGE.rglob(kind))
    sources = [path for path in found if not any(one in path.as_posix() for one in EXEMPT)]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in (*sources, *pages))


@pytest.mark.parametrize("name", files())
def test_file_has_no_old_word(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = text.splitlines()
    wrong = [
        f"{name}:{number}: {word!r}, write {instead}: {lines[number - 1].strip()}"
        for number, word, instead in found_in(text)
    ]
    assert not wrong, "\n".join(wrong)

r"""Is this line a tqdm bar, and how far is it?

The trap: many bars in one output. A bar with a description ("Map:", "Loading weights:") is not the
training; one that ends by moving the cursor up is drawn below another bar, as evaluation is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BAR = re.compile(r"(\d{1,3})%\|[^|]{0,400}\| ?(\d{1,15})/(\d{1,15}) \[")
_CURSOR_UP = "\x1b[A"


@dataclass(frozen=True, slots=True)
class Bar:
    """A drawn bar: n of total."""

    n: int
    total: int
    described: bool
    nested: bool


def bar(text: str) -> Bar | None:
    """The bar drawn in this line, if there is one. A bar of a file's bytes is none."""
    if "%|" not in text:
        return None
    match = _BAR.search(text)
    if not match:
        return None
    described = any(letter.isalnum() for letter in text[: match.start()].replace("\x1b[A", ""))
    nested = text.rstrip().endswith(_CURSOR_UP)
    return Bar(int(match[2]), int(match[3]), described, nested)

r"""Is this line a tqdm bar, and how far is it?

The trap: many bars in one output. A bar with a description ("Map:", "Loading weights:") is not the
training; one that ends by moving the cursor up is drawn below another bar, as evaluation is. A bar
of epochs counts no steps, whatever loss it shows. And a bar may have no meter, where it is narrow,
or no total, where the loop does not know its end: `7/12 [00:01<00:02`, `7it [00:01`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BAR = re.compile(
    r"(?:\d{1,3}%\|[^|]{0,400}\| ?(\d{1,15})/(\d{1,15}) \["
    r"|(?<![\w./-])(\d{1,15})(?:/(\d{1,15})|it) \[(?:\d{1,4}:)?\d\d:\d\d(?:<[\d:?]{1,10})?,)"
)
_ELAPSED = re.compile(r"\[(?:(\d{1,5}):)?(\d\d):(\d\d)(?=[<,\]])")
_CURSOR_UP = "\x1b[A"
_OTHER = re.compile(
    r"\b(?:eval|valid|val\b|test|predict|infer|epochs)|\bepoch\W*$", re.IGNORECASE
)  # what a bar is about if it is not about training steps; "Epoch 3:" is
_OTHER_UNIT = re.compile(r"epochs?/s\b|s/epochs?\b")


@dataclass(frozen=True, slots=True)
class Bar:
    """A drawn bar: n of total, which a loop without a known end has not."""

    n: int
    total: int | None
    described: bool
    nested: bool
    of_steps: bool = True  # nothing says that it counts something else
    elapsed_s: float | None = None  # since it began, in whole seconds


def bar(text: str) -> Bar | None:
    """The bar drawn in this line, if there is one. A bar of a file's bytes is none."""
    if "%|" not in text and " [" not in text:
        return None
    match = _BAR.search(text)
    if not match:
        return None
    before, after = text[: match.start()].replace(_CURSOR_UP, ""), text[match.end() :]
    described = any(letter.isalnum() for letter in before)
    nested = text.rstrip().endswith(_CURSOR_UP)
    of_steps = not (_OTHER.search(before) or _OTHER_UNIT.search(after))
    n, total = match[1] or match[3], match[2] or match[4]
    elapsed_s = _elapsed_s(text, match.start())
    return Bar(int(n), int(total) if total else None, described, nested, of_steps, elapsed_s)


def _elapsed_s(text: str, start: int) -> float | None:
    """What stands before the "<" of `[02:59<58:44, ...`."""
    match = _ELAPSED.search(text, start)
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600.0 + minutes * 60 + seconds

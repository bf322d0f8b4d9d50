"""Is it certain what a printed count counts?

The trap: a line `step=20 tokens=4096` that comes every ten steps. Its tokens may be those of one
step or of all ten, and the figure made of it is ten times off if the guess is wrong. The importer
guesses and says so in a mark; where a line stands for several steps, what rests on that guess is
assumed. Where each line is one step the two meanings are one, and nothing is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.metrics.steps import Steps

# How the importers begin what they say of a count: its name as printed, then what they made of it.
_GUESS = re.compile(r"(?P<name>\S+)= (?P<made>read as|taken times|fell from)")
_OF_SAMPLES = ("sample", "batch_size")
# Lines that came in one read are one row of several steps too, but hardly ever of as many.
_REGULAR_FRAC = 0.8


def guessed(evidence: Evidence, rows: Steps, what: str) -> str:
    """What was guessed about the count of these "tokens" or "samples"; empty if nothing was."""
    if not evidence.from_output:
        return ""
    said = []
    for mark in evidence.run.marks:
        match = _GUESS.match(mark.detail) if mark.name == "assumed" else None
        if match and _counts(match["name"]) == what:
            said.append((match["made"], mark.detail))
    # A count that was taken back is uncertain whatever its lines stand for.
    if not any(made == "fell from" for made, _ in said) and not _stand_for_several(rows):
        return ""
    return "; ".join(dict.fromkeys(detail for _, detail in said))


def _counts(name: str) -> str:
    return "samples" if any(part in name for part in _OF_SAMPLES) else "tokens"


def _stand_for_several(rows: Steps) -> bool:
    """Whether the printed lines are of several steps each, or do not say of how many."""
    steps = rows["steps"]
    if np.isnan(steps).any() or steps.min() > 1:
        return True
    strides, times = np.unique(steps, return_counts=True)
    usual = strides[np.argmax(times)]
    return bool(usual > 1 and (steps % usual == 0).mean() >= _REGULAR_FRAC)

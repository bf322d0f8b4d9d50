"""Whose line is this, where the ranks of one training print into one output?

A rank names itself (`[rank1]:`, torchrun's `[default1]:`, mpirun's `[1,3]<stdout>:`, `rank=1`), or
srun put its number before the line (`3: step=..`). The trap: a number before a line may as well be
an epoch's. It is a rank's if two of them speak of the same step; until then every line is read.
"""

from __future__ import annotations

import re
from collections import deque

_NAMED = re.compile(
    r"\[(?:rank|default) ?(\d{1,6})\]"
    r"|(?<![\w/.\-])(?:global_|local_)?rank[\"']?\s?[=:]\s?(\d{1,6})\b"
    r"|^\[\d{1,6},(\d{1,6})\]<std(?:out|err)>",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\s{0,6}(\d{1,5}): ")
_RECENT = 8  # steps: ranks are hardly ever further apart


def rank_of(text: str) -> int | None:
    """The rank a line says it is of."""
    if "ank" not in text and "ANK" not in text and not text.startswith("[") and "[d" not in text:
        return None  # what most lines are spared: the full look
    match = _NAMED.search(text)
    return int(match[1] or match[2] or match[3]) if match else None


def label_of(text: str) -> int | None:
    """The number before a line, which may be a rank's."""
    match = _LABEL.match(text)
    return int(match[1]) if match else None


class Ranks:
    """Keeps the lines of the first rank that prints a step."""

    def __init__(self) -> None:
        self.kept: int | None = None
        self._label: int | None = None
        self.labelled = False  # numbers before lines are ranks
        self._recent: deque[tuple[int, int | None]] = deque(maxlen=_RECENT)

    def is_another(self, text: str, number: int | None) -> bool:
        """Whether this step line is of another rank than those that are kept."""
        rank = rank_of(text)
        if rank is None:
            return self._is_labelled(text, number)
        self.kept = rank if self.kept is None else self.kept
        return rank != self.kept

    def _is_labelled(self, text: str, number: int | None) -> bool:
        label = label_of(text)
        if label is None:
            return False
        self._label = label if self._label is None else self._label
        if not self.labelled and number is not None and label != number:
            # Of two ranks that speak of one step, the first to speak of it is kept.
            firsts = [other for other, of in self._recent if of == number and other != label]
            self.labelled = bool(firsts)
            self.kept = self._label = firsts[0] if firsts else self._label
        self._recent.append((label, number))
        return self.labelled and label != self._label

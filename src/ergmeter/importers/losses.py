"""Has the loss stopped being a number?

The trap: a column of floats keeps no difference between a loss that was not printed and one that
was `nan`, and of the two the second is what a reader must hear of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ergmeter.records import Mark


class Losses:
    """Watches the losses of steps, and says once that they are no numbers."""

    def __init__(self) -> None:
        self._since = ""  # where it began
        self._told = 0  # marks

    def is_news(self, loss: float | None) -> bool:
        """Whether there is something to say about it."""
        if loss is None or self._told > 1:
            return False
        return math.isfinite(loss) == bool(self._since)

    def watch(self, t_ns: int, loss: float | None, where: str) -> Iterator[Mark]:
        """Take the loss of the next line, and where in the training that is."""
        if not self.is_news(loss):
            return
        self._told += 1
        if self._since:
            said = f"loss is a number again from {where} on; it was none from {self._since} on"
        else:
            said, self._since = f"loss is not a number ({loss}) from {where} on", where
        yield Mark(t_ns, "value_refused", said)

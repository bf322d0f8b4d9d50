"""What did Megatron-LM, or a relative of it, print about its iterations?

The lines themselves are read in `iterations`, which others use too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ergmeter.importers.engine.dialect import Dialect
from ergmeter.importers.engine.iterations import WORDS, Iterations, is_iteration
from ergmeter.importers.engine.reading import OutputReader
from ergmeter.importers.logfile import LineHints
from ergmeter.ports import Line
from ergmeter.records import Record


class MegatronImporter:
    """The iteration lines of Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and DeepSpeed."""

    name = "megatron"
    looks_for = "Megatron-LM and DeepSpeed `iteration 10/ 500 | ... | lm loss: 2.1 | ...`"

    def recognises(self, head: Sequence[str]) -> bool:
        """Say whether one of these lines is Megatron's. One line alone decides."""
        return any(is_iteration(text) for text in reversed(head))

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come."""
        return OutputReader(self.dialect()).records(lines)

    def words(self, recognised: str) -> LineHints:  # noqa: ARG002
        """What to look for in a log after this line."""
        return LineHints(WORDS)

    def dialect(self) -> Dialect:
        """How its lines are read."""
        return Iterations()

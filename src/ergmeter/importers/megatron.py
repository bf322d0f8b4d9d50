"""Reads the iteration lines of Megatron-LM and its relatives, by `engine.iterations`."""

from __future__ import annotations

from collections.abc import Sequence

from ergmeter.importers.engine.iterations import WORDS, Iterations, is_iteration
from ergmeter.importers.engine.reading import StepLineImporter
from ergmeter.ports import LineHints


class MegatronImporter(StepLineImporter):
    """The iteration lines of Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and DeepSpeed."""

    name = "megatron"
    looks_for = "Megatron-LM and DeepSpeed `iteration 10/ 500 | ... | lm loss: 2.1 | ...`"
    hints = LineHints(WORDS)
    dialect = Iterations

    def recognises(self, head: Sequence[str]) -> bool:
        """True if one of these lines is Megatron's. One line is enough."""
        return any(is_iteration(text) for text in reversed(head))

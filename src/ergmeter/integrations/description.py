"""What a training says of its model: who trains, its parameters, the FLOPs of its steps.

The trap: making the training wait for it. A configuration is read on a thread of its own. What has
none must be run to be counted, and that saves and restores what the training draws its numbers
from: so it is done between two steps, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from ergmeter.flops.live import must_be_run
from ergmeter.integrations.world import training_identity

if TYPE_CHECKING:
    from ergmeter.integrations.batches import Counts
    from ergmeter.integrations.held import Seen
    from ergmeter.meter import Meter

# FLOPs are counted again at the end if sequences were this much longer or shorter than the first.
_LENGTHS_ALIKE_FRAC = 0.01
_AT_THE_END_S = 10.0  # that a training which was shorter waits for it, at most


class Description:
    """Of one training, told to its Meter."""

    def __init__(self, meter: Meter, model: object, fail: Callable[[Exception], None]) -> None:
        self.model = _weakly(model)  # not held: its memory is the program's
        self.to_run = 0  # how long a sequence is, of a model that must be run to be counted
        self._meter = meter
        self._fail = fail
        self._telling: threading.Thread | None = None
        self._told_length = 0.0
        self._is_padded = False
        self._no_flops = ""

    @property
    def has_begun(self) -> bool:
        """Whether the model was asked for already."""
        return self._telling is not None

    def is_part(self, why: str) -> None:
        """What was given is not all of the model: its FLOPs are not those of a step."""
        self.model, self._no_flops = _nothing, why

    def begin(self, counts: Counts | None) -> None:
        """A first batch has come, so how long a sequence is is known too: count, aside."""
        if counts is not None:
            rows = counts.samples if isinstance(counts.samples, int) and counts.samples else 1
            self._told_length = max(1.0, counts.computed / rows)
        length = round(self._told_length)
        self._telling = threading.Thread(
            target=self._tell, args=(length,), name="ergmeter-model", daemon=True
        )
        self._telling.start()

    def _tell(self, length: int) -> None:
        handover = self._meter._handover
        if handover is None:
            return
        try:
            model = self.model()
            handover.describe(training=training_identity(model))
            if model is not None and length and must_be_run(model, length):
                self.to_run = length
            elif model is not None:
                self._meter.describe(model, seq_len=length or None)
        except Exception as error:  # noqa: BLE001  never break training
            self._fail(error)

    def run(self) -> None:
        """Count what has to be run for it, while the training waits: once, after its first steps.

        On another thread all the same: what looks at calls of the model knows them by theirs.
        """
        length, self.to_run = self.to_run, 0
        model = self.model()
        if not length or model is None:
            return
        counting = threading.Thread(
            target=self._count, args=(model, length), name="ergmeter-model", daemon=True
        )
        counting.start()
        counting.join()

    def _count(self, model: object, length: int) -> None:
        try:
            self._meter.describe(model, seq_len=length, is_padded=self._is_padded)
        except Exception as error:  # noqa: BLE001  never break training
            self._fail(error)

    def finish(self, seen: Seen) -> None:
        """With the lengths that sequences had on average, as attention counts them."""
        if self._telling is not None:
            self._telling.join(_AT_THE_END_S)
        self.run()
        if seen.real:
            self._is_padded = seen.computed > seen.real
            is_alike = abs(seen.length - self._told_length) <= (
                _LENGTHS_ALIKE_FRAC * self._told_length
            )
            if not is_alike or self._is_padded:
                self.to_run = max(1, round(seen.length))
                self.run()
        if self._no_flops and self._meter._handover is not None:
            self._meter._handover.describe(flops=[], no_flops=self._no_flops)


def _nothing() -> None:
    """There is no model, as far as is known."""


def _weakly(model: object) -> Callable[[], object]:
    """The model as long as the program has it."""
    if model is None:
        return _nothing
    try:
        return ref(model)
    except TypeError:  # a tree of arrays
        return lambda: model

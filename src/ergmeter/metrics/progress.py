"""How far was a run at an instant: after how many steps, how many tokens, how much time?

The trap: two runs laid side by side by the clock on the wall, or each from where its own warm-up
ended. A loss after a million tokens is after all of them, so all three count from the start of the
run's first step, be it warm-up or not. (The other way, from the counted window on, would shift
losses of runs whose warm-ups differ.) What lies between steps, an evaluation say, takes time and is
no step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.tokens import need_all_rows, steps_in, tokens
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.metrics.steps import Steps
    from ergmeter.records import FloatArray

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")


class Progress:
    """A run from the start of its first step to the end of its last."""

    def __init__(self, evidence: Evidence) -> None:
        """Raises NotMeasurable for a run without steps."""
        self._evidence = evidence
        self.zero_ns = evidence.work.lowest("start_ns")
        self.end_ns = evidence.work.highest("end_ns")

    def at(self, axis: Axis, t_s: FloatArray) -> FloatArray:
        """Where the run was at these instants, which are seconds since its first step began.

        Within a step it is on its way. Raises NotMeasurable where the run can't tell.
        """
        if axis == "time":
            return t_s
        evidence = self._evidence
        if not evidence.trains:
            raise NotMeasurable("an inference run has requests and no steps")
        need_all_rows(evidence)
        if axis == "step":
            lane = evidence.work.longest
            return self._made(lane, steps_in(lane), t_s)
        amounts, _, _ = tokens(evidence, evidence.work)
        made = np.zeros(len(t_s))
        for lane, own in zip(evidence.work.lanes, amounts, strict=True):
            made += self._made(lane, own, t_s)
        return made

    def seconds(self, t_ns: FloatArray) -> FloatArray:
        """Instants of the run's clock, since the first step began."""
        return (t_ns - self.zero_ns) / NS_PER_S

    def _made(self, lane: Steps, amounts: FloatArray, t_s: FloatArray) -> FloatArray:
        """What the rows of a rank had amounted to at these instants."""
        edges_ns = np.stack([lane["start_ns"], lane["end_ns"]], axis=1).ravel()
        # Printed lines may begin before the one before them ended; what is made stays made.
        edges_s = np.maximum.accumulate(self.seconds(edges_ns))
        so_far = np.repeat(np.insert(np.cumsum(amounts), 0, 0.0), 2)[1:-1]
        return np.interp(t_s, edges_s, so_far)

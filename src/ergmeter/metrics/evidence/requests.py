"""The requests that `erg load` offered: answered, failed, or in flight when it was interrupted.

The window of a load run is from the first counted request offered to the last counted one settled
(answered or failed). A window of the answered ones alone leaves out the time that failures cost:
20 answers in 0.4 s and then ten time-outs of 2 s are 1.8 answers a second, not 46.

Each request is a row of `reported`, written when it is settled: at that time, by what became of it,
with the seconds since it was offered. So failures of a run that was killed are known as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.records import TimeArray, Window
from ergmeter.units import NS_PER_S, duration, number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.runlog.reader import Run

ANSWERED, UNSETTLED = "request_answered", "request_unsettled"
_FAILED = "request_failed: "
LOAD_MARK = "server"  # every run of `erg load` has it,
END_MARK = "load_client"  # and this one too where it came to its end
_NOT_MEASURED = "generate_not_measured"


def failed_as(kind: str) -> str:
    """The name of a failed request's row."""
    return f"{_FAILED}{kind}"


@dataclass(frozen=True)
class Offered:
    """The requests that count, by what became of them."""

    offered_ns: TimeArray
    end_ns: TimeArray  # when it was settled; of one that was not, when it was interrupted
    names: list[str]  # of their rows
    warmup: int = 0  # requests that were left out before them

    def __len__(self) -> int:
        return len(self.offered_ns)

    @cached_property
    def answered(self) -> int:
        """Requests that were answered whole."""
        return self.names.count(ANSWERED)

    @cached_property
    def unsettled(self) -> int:
        """Requests in flight when it was interrupted."""
        return self.names.count(UNSETTLED)

    @cached_property
    def failures(self) -> Counter[str]:
        """Requests that failed, by kind."""
        failed = (name for name in self.names if name.startswith(_FAILED))
        return Counter(name.removeprefix(_FAILED) for name in failed)

    @property
    def failed(self) -> int:
        """Requests without a whole answer."""
        return sum(self.failures.values())

    @property
    def settled(self) -> int:
        """Requests that were answered or failed."""
        return self.answered + self.failed

    @cached_property
    def window(self) -> Window:
        """From the first offered to the last settled. Raises NotMeasurable if none was settled."""
        if not len(self):
            raise NotMeasurable(
                f"no request after the warm-up, which has {number_of(self.warmup, 'request')}"
            )
        if not self.settled:
            raise NotMeasurable(
                f"{number_of(len(self), 'request')} offered, none answered or failed before the"
                " load was interrupted"
            )
        is_settled = np.array([name != UNSETTLED for name in self.names])
        return Window(int(self.offered_ns.min()), int(self.end_ns[is_settled].max()))

    @property
    def note(self) -> str:
        """What the window holds, in words."""
        if self.answered == len(self):
            what = number_of(self.answered, "answer")
        else:
            what = f"{number_of(len(self), 'request')} offered ({self.outcomes})"
        before = f", after {number_of(self.warmup, 'request')} of warm-up" if self.warmup else ""
        return f"over {what} in {duration(self.window.duration_s)}{before}"

    @property
    def outcomes(self) -> str:
        """How many were answered, how many not."""
        flying = f", {self.unsettled} in flight at the end" if self.unsettled else ""
        return f"{self.answered} answered, {self.failed} failed{flying}"

    def in_flight_mean(self, window: Window) -> float:
        """How many were under way, on average over a window."""
        ends = np.minimum(self.end_ns, window.end_ns)
        under_way_ns = np.maximum(ends - np.maximum(self.offered_ns, window.start_ns), 0).sum()
        return float(under_way_ns) / NS_PER_S / window.duration_s


def offered(run: Run, since_ns: int | None, until_ns: int | None) -> Offered | None:
    """The requests of a load, offered since a time and settled until another; None without rows.

    Where the run is a part of a longer one, those that were settled in that part.
    """
    part = run.between
    rows = [
        (reported.t_ns - round(reported.value * NS_PER_S), reported.t_ns, reported.name)
        for reported in run.reported()
        if _is_row(reported.name)
        if part is None or part.start_ns < reported.t_ns <= part.end_ns
        if until_ns is None or reported.t_ns <= until_ns
    ]
    if not rows:
        return None
    counted = [row for row in rows if since_ns is None or row[0] >= since_ns]
    starts, ends = (np.array([row[at] for row in counted], dtype=np.int64) for at in (0, 1))
    return Offered(starts, ends, [name for _, _, name in counted], len(rows) - len(counted))


def has_rows(run: Run) -> bool:
    """Whether a run has rows of offered requests, counted or not."""
    return any(_is_row(reported.name) for reported in run.reported())


def _is_row(name: str) -> bool:
    return name in (ANSWERED, UNSETTLED) or name.startswith(_FAILED)


def why_not_timed(evidence: Evidence) -> str:
    """Why a run has no timed generation, and what times it."""
    details = evidence.marked(_NOT_MEASURED)
    if details:
        return f"a call of `generate` was not timed ({details[-1]})"
    return "`erg load`, integrations.generate and meter.phase('prefill' or 'decode') time requests"


def failed_by_mark(run: Run) -> tuple[int, str] | None:
    """Failed requests and their kinds in a run that has no rows of them."""
    marks = [mark.detail for mark in run.marks if mark.name == "requests_failed"]
    if not marks:
        return None
    number, _, kinds = marks[-1].partition(": ")
    return int(number), kinds


def need_failures(evidence: Evidence) -> None:
    """Refuse rates of a run in which requests failed at times that it does not hold."""
    failed = None if evidence.offered else failed_by_mark(evidence.run)
    if failed and failed[0]:
        raise NotMeasurable(
            f"{number_of(failed[0], 'request')} failed, and an older `erg load` did not record"
            " when: measure again"
        )

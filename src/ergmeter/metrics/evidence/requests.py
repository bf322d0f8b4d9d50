"""The requests that `erg load` offered: answered, failed, or in flight when it was interrupted.

The window of a load run is from the first counted request offered to the last counted one settled
(answered or failed). A window of the answered ones alone leaves out the time that failures cost:
20 answers in 0.4 s and then ten time-outs of 2 s are 1.8 answers a second, not 46.

Each request is a row of the table `reported`, written when it is settled. The row's name is the
outcome, its value the seconds since the request was offered. So failures of a killed run are known.
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
LOAD_MARK = "server"  # every run of `erg load` has this mark,
END_MARK = "load_client"  # and this one if the load ended normally or was interrupted
_NOT_MEASURED = "generate_not_measured"


def failed_as(kind: str) -> str:
    """The name of the row of a failed request; `kind`: how it failed."""
    return f"{_FAILED}{kind}"


@dataclass(frozen=True)
class Offered:
    """The requests of `erg load` after the warm-up, with their outcomes."""

    offered_ns: TimeArray
    end_ns: TimeArray  # when each was settled; if it was not, when the load was interrupted
    names: list[str]  # the row's name, which is the outcome
    warmup: int = 0  # requests of the warm-up, which are left out

    def __len__(self) -> int:
        return len(self.offered_ns)

    @cached_property
    def answered(self) -> int:
        """The number of completely answered requests."""
        return self.names.count(ANSWERED)

    @cached_property
    def unsettled(self) -> int:
        """The number of requests in flight when the load was interrupted."""
        return self.names.count(UNSETTLED)

    @cached_property
    def failures(self) -> Counter[str]:
        """The number of failed requests, by kind of failure."""
        failed = (name for name in self.names if name.startswith(_FAILED))
        return Counter(name.removeprefix(_FAILED) for name in failed)

    @property
    def failed(self) -> int:
        """The number of failed requests."""
        return sum(self.failures.values())

    @property
    def settled(self) -> int:
        """The number of requests that were answered or failed."""
        return self.answered + self.failed

    @cached_property
    def window(self) -> Window:
        """From the first request offered to the last settled. NotMeasurable if none was settled."""
        if not len(self):
            raise NotMeasurable(
                f"no request after the warm-up of {number_of(self.warmup, 'request')}"
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
        """The window as text, such as "over 20 answers in 0.4 s"."""
        if self.answered == len(self):
            what = number_of(self.answered, "answer")
        else:
            what = f"{number_of(len(self), 'request')} offered ({self.outcomes})"
        before = f", after {number_of(self.warmup, 'request')} of warm-up" if self.warmup else ""
        return f"over {what} in {duration(self.window.duration_s)}{before}"

    @property
    def outcomes(self) -> str:
        """The outcomes as text, such as "18 answered, 2 failed"."""
        flying = f", {self.unsettled} in flight at the end" if self.unsettled else ""
        return f"{self.answered} answered, {self.failed} failed{flying}"

    def in_flight_mean(self, window: Window) -> float:
        """The mean number of requests in flight over a window."""
        ends = np.minimum(self.end_ns, window.end_ns)
        under_way_ns = np.maximum(ends - np.maximum(self.offered_ns, window.start_ns), 0).sum()
        return float(under_way_ns) / NS_PER_S / window.duration_s


def offered(run: Run, since_ns: int | None, until_ns: int | None) -> Offered | None:
    """Return the requests offered since `since_ns` and settled until `until_ns`; None without rows.

    If the run is a part of a longer one, only requests settled in that part.
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
    """True if a run has rows of offered requests, also if only of the warm-up."""
    return any(_is_row(reported.name) for reported in run.reported())


def _is_row(name: str) -> bool:
    return name in (ANSWERED, UNSETTLED) or name.startswith(_FAILED)


def why_not_timed(evidence: Evidence) -> str:
    """Why a run has no timed requests, or what would time them."""
    details = evidence.marked(_NOT_MEASURED)
    if details:
        return f"a call of `generate` was not timed ({details[-1]})"
    return "`erg load`, integrations.generate and meter.phase('prefill' or 'decode') time requests"


def failed_by_mark(run: Run) -> tuple[int, str] | None:
    """The number and kinds of failed requests, from the mark of an older `erg load`."""
    marks = [mark.detail for mark in run.marks if mark.name == "requests_failed"]
    if not marks:
        return None
    number, _, kinds = marks[-1].partition(": ")
    return int(number), kinds


def need_failures(evidence: Evidence) -> None:
    """Raise NotMeasurable if requests failed at unknown times, as in runs of older versions."""
    failed = None if evidence.offered else failed_by_mark(evidence.run)
    if failed and failed[0]:
        raise NotMeasurable(
            f"{number_of(failed[0], 'request')} failed, and an older `erg load` did not record"
            " when: measure again"
        )

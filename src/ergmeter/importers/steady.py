"""What was the throughput of a log once it had settled?

The rule. The first row of a log opens the window and is not counted: its steps hold the loading of
data and, on Trainium or with torch.compile, a compilation of minutes. Of ten and more rows, those
are left out as well that make the rest unsteady (MSER, White 1997). The trap: the mean
of printed rates. It weighs a slow step as much as a fast one, and a moving average still holds the
compile many steps later. Where a log has times, the figure is samples over time; only where it has
none is it the harmonic mean of what was printed, and it says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.records import Missing, Reading
from ergmeter.stats.intervals import MIN_BLOCKS, ratio_interval, settled_after

if TYPE_CHECKING:
    from ergmeter.importers.log import LogRun
    from ergmeter.records import Basis, FloatArray, Result

_SEQUENCES = ("sequences/s", "samples/s")


@dataclass(frozen=True)
class Steady:
    """The rows [first, last) that are counted, by which rule, and what they come to."""

    first: int
    last: int
    rule: str
    sequences_per_s: Result
    tokens_per_s: Result
    step_s: Result


def steady(run: LogRun, *, skip_rows: int | None = None) -> Steady:
    """The steady state of a run in a log."""
    first, rule = _first(run, skip_rows)
    window = _Window(run, first, rule)
    return Steady(
        first,
        len(run),
        rule,
        window.rate(run.samples, "sequences/s", _SEQUENCES),
        window.rate(run.tokens, "tokens/s", ("tokens/s",)),
        window.step_s(),
    )


def _first(run: LogRun, skip_rows: int | None) -> tuple[int, str]:
    """The first row that is counted, and why that one."""
    if skip_rows is not None:
        rows = "row" if skip_rows == 1 else f"{skip_rows} rows"
        return skip_rows, f"the first {rows} left out, as asked for"
    if len(run) < 2:
        return 0, "one row: nothing can be left out"
    is_timed = np.isfinite(run.step_time_s[0]) or run.clock in (None, "step times")
    starts = "" if is_timed else "it only starts the clock, and "
    opened = f"the first row left out: {starts}its steps hold the compile"
    periods = run.period_s[1:] / run.lines[1:]
    if len(periods) < 2 * MIN_BLOCKS or not np.isfinite(periods).all():
        return 1, opened
    settled = settled_after(periods)
    if settled is None:
        return 1, f"{opened}; the step time never settled (MSER)"
    if settled == 0:
        return 1, opened
    left_out = int(run.lines[: 1 + settled].sum())
    return 1 + settled, f"the first {left_out} rows left out, until the step time settled (MSER)"


class _Window:
    def __init__(self, run: LogRun, first: int, rule: str) -> None:
        self._run = run
        self._first = first
        self._rule = rule
        self._rows = slice(first, len(run))
        # A figure is as good as its weakest input: step times that were printed are one.
        self._basis: Basis = "reported" if run.clock == "step times" else "derived"

    def rate(self, amounts: FloatArray, unit: str, printed: tuple[str, ...]) -> Result:
        """Amounts over time; else the mean of the printed rates of these units."""
        amounts, periods = amounts[self._rows], self._durations_s()
        if periods is not None and len(amounts) and np.isfinite(amounts).all():
            value = float(amounts.sum() / periods.sum())
            low, high = self._interval(amounts, periods, float(periods.sum()))
            what = _of(float(amounts.sum()), unit.partition("/")[0])
            note = f"{what} in {periods.sum():.6g} s{self._clock}; {self._rule}"
            return Reading(value, unit, self._basis, low, high, note)
        return self._printed(unit, printed)

    def step_s(self) -> Result:
        """Time over steps; else the mean of the printed step times."""
        periods, steps = self._durations_s(), self._run.covered[self._rows]
        if periods is not None and len(steps) and np.isfinite(steps).all():
            low, high = self._interval(periods, steps, float(periods.sum()))
            over = _of(float(steps.sum()), "steps")
            note = f"{periods.sum():.6g} s{self._clock} over {over}; {self._rule}"
            return Reading(float(periods.sum() / steps.sum()), "s", self._basis, low, high, note)
        said = self._run.printed["step_time_s"].after(self._first)
        if not said.count:
            return Missing(self._why())
        many = f"mean of {said.count} printed step times"
        note = f"{'the one printed step time' if said.count == 1 else many}; {self._rule}"
        return Reading(said.mean, "s", "reported", note=note)

    def _interval(
        self, tops: FloatArray, bottoms: FloatArray, window_s: float
    ) -> tuple[float | None, float | None]:
        """The interval of a ratio. Where the log's times are whole seconds, so long a window is
        known to a second, and no better than that is the ratio."""
        low, high = ratio_interval(tops, bottoms) or (None, None)
        if not (self._run.t_s[self._rows] % 1 == 0).all() or window_s <= 1:
            return low, high
        value, known = float(tops.sum() / bottoms.sum()), 1 - 1 / window_s
        lowest, highest = value * known, value / known
        if low is None or high is None:
            return lowest, highest
        return min(low, lowest), max(high, highest)

    @property
    def _clock(self) -> str:
        clocks = {"step times": " of printed step times", "bar": " by the progress bar"}
        return clocks.get(self._run.clock or "", "")

    def _durations_s(self) -> FloatArray | None:
        """How long each row took, where that is known of all."""
        if self._first < 1 or self._first >= len(self._run):
            return None
        periods = self._run.period_s[self._rows]
        return periods if np.isfinite(periods).all() and periods.sum() > 0 else None

    def _printed(self, unit: str, printed: tuple[str, ...]) -> Result:
        column = next((self._run.printed[p] for p in printed if p in self._run.printed), None)
        if column is None:
            return Missing(f"{self._why()}, and the program printed no {' or '.join(printed)}")
        first = self._past_averages()
        said = column.after(first)
        if not said.count_positive:
            return Missing(f"no {unit} above 0 was printed after the warm-up: {self._rule}")
        row = int(self._run.lines[:first].sum())
        averaged = f", from row {row} on as each is a mean over {self._run.rate_steps} steps"
        count = said.count_positive
        many = f"harmonic mean of {count} printed figures"
        note = (
            f"{'the one printed figure' if count == 1 else many}, not samples over time;"
            f" {self._rule}{averaged if first > self._first else ''}"
        )
        return Reading(said.harmonic_mean, unit, "reported", note=note)

    def _past_averages(self) -> int:
        """The first row whose printed rate, a moving average, has nothing of the warm-up in it."""
        run, first = self._run, min(self._first, len(self._run) - 1)
        if run.rate_steps < 2 or not len(run) or not np.isfinite(run.step[first]):
            return self._first
        beyond = np.flatnonzero(run.step >= run.step[max(0, first - 1)] + run.rate_steps)
        if not len(beyond):
            return self._first
        # A row of several lines is beyond it from its first line on if the row before is.
        return min(int(beyond[0]) + (run.lines_per_row > 1), len(run) - 1)

    def _why(self) -> str:
        if len(self._run) < 2:
            return "the log has fewer than two step lines"
        if self._run.clock is None:
            return "the log has no timestamps, step times or bar to time its steps by"
        return "the log's step lines do not say how much was done"


def _of(amount: float, what: str) -> str:
    """So many of something, or one: `steps`, `step`."""
    return f"{amount:.0f} {what.removesuffix('s') if amount == 1 else what}"

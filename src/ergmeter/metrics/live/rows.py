"""New rows of a run as it is written, and running totals over them.

Live views and alerts use one set of totals: time, joules, and steps and tokens by rank. The cost is
proportional to the new rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.records import PHASES, Device, FloatArray, TimeArray
from ergmeter.units import NS_PER_S, significant

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ergmeter.metrics.evidence.steps import Steps

TRAIN = PHASES.index("train")


@dataclass
class LiveRows:
    """New rows of a run, on its clock. All rows before `until_ns` have been read.

    `steps`: columns by writer, ordered by end, absent numbers NaN. `loss_told` and `grad_norm_told`
    separate a recorded NaN from an absent value. `samples`: times and values by column and device.
    `printed`: columns of all printed lines, even if a Meter records the same steps: often only the
    lines have a loss.
    """

    until_ns: int
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    printed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def without(self, writers: Collection[str]) -> LiveRows:
        """A copy without the steps of these writers; all samples are kept."""
        if not writers:
            return self
        steps, printed = (
            {writer: columns for writer, columns in rows.items() if writer not in writers}
            for rows in (self.steps, self.printed)
        )
        return LiveRows(self.until_ns, steps, self.samples, printed)


def in_order(before: tuple[Any, Any] | None, new: tuple[Any, Any]) -> tuple[Any, Any]:
    """Join (times, values) of two batches, in order of time."""
    t_ns, values = new
    if before is not None:
        t_ns, values = np.concatenate([before[0], t_ns]), np.concatenate([before[1], values])
    if np.any(t_ns[1:] < t_ns[:-1]):
        order = np.argsort(t_ns, kind="stable")
        t_ns, values = t_ns[order], values[order]
    return t_ns, values


def joined_rows(first: LiveRows, second: LiveRows) -> LiveRows:
    """Join two batches of rows."""
    both = LiveRows(
        second.until_ns,
        _joined_steps(first.steps, second.steps),
        {n: dict(d) for n, d in first.samples.items()},
        _joined_steps(first.printed, second.printed),
    )
    for column, devices in second.samples.items():
        by_device = both.samples.setdefault(column, {})
        for device, readings in devices.items():
            by_device[device] = in_order(by_device.get(device), readings)
    return both


def _joined_steps(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for writer, new in second.items():
        before = both.get(writer)
        if before is not None:
            new = {name: np.concatenate([before[name], new[name]]) for name in new}
            order = np.argsort(new["end_ns"], kind="stable")
            new = {name: column[order] for name, column in new.items()}
        both[writer] = new
    return both


def split_rows(rows: LiveRows, until_ns: int) -> tuple[LiveRows, LiveRows]:
    """Split rows into those up to a time and the later ones."""
    early, late = LiveRows(until_ns), LiveRows(until_ns)
    early.steps, late.steps = _split_steps(rows.steps, until_ns)
    early.printed, late.printed = _split_steps(rows.printed, until_ns)
    for column, devices in rows.samples.items():
        for device, (t_ns, values) in devices.items():
            cut = int(np.searchsorted(t_ns, until_ns, side="right"))
            if cut:
                early.samples.setdefault(column, {})[device] = (t_ns[:cut], values[:cut])
            if cut < len(t_ns):
                late.samples.setdefault(column, {})[device] = (t_ns[cut:], values[cut:])
    return early, late


def _split_steps(
    by_writer: Mapping[str, Any], until_ns: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    early: dict[str, Any] = {}
    late: dict[str, Any] = {}
    for writer, steps in by_writer.items():
        cut = int(np.searchsorted(steps["end_ns"], until_ns, side="right"))
        if cut:
            early[writer] = {name: column[:cut] for name, column in steps.items()}
        if cut < len(steps["end_ns"]):
            late[writer] = {name: column[cut:] for name, column in steps.items()}
    return early, late


def real_tokens(steps: Mapping[str, Any] | Steps) -> FloatArray:
    """Tokens of each step, without padding if that is known."""
    real = steps["tokens_real"]
    return np.where(np.isnan(real), steps["tokens_computed"], real)


def steps_done(steps: Mapping[str, Any] | Steps, *, before: int = 0) -> int:
    """The number of steps done, steps before a resume included: the last step's index plus one.

    For steps without an index, their number plus `before`.
    """
    last = float(steps["index"][-1])
    many = float(np.nan_to_num(steps["steps"], nan=1.0).sum())
    return before + round(many) if np.isnan(last) else int(last) + 1


# As in `metrics.energy`: power is not interpolated across a longer gap.
_MAX_GAP_NS = 2 * NS_PER_S


class EnergyTotal:
    """Running total of joules of the GPUs, or of CPU and memory if there is no GPU."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = devices
        self._last: dict[str, tuple[int, float]] = {}  # last reading by device and column
        self._counted_ns: dict[str, int] = {}  # first reading of a device's energy counter
        self.joules = 0.0
        self.is_known = False  # True after the first interval
        self._apart_ns = 0  # the shortest of the gaps between power readings that are too long
        # Times of the last batch, and the total at each time.
        self.new = (np.empty(0, np.int64), np.empty(0))

    def feed(self, rows: LiveRows) -> None:
        """Add readings of energy counters and of power."""
        wanted = self._boundary()
        times, joules = [], []
        for column in ("energy_j", "power_w"):
            for device, (t_ns, values) in rows.samples.get(column, {}).items():
                if device not in wanted:
                    continue
                if column == "energy_j":
                    self._counted_ns.setdefault(device, int(t_ns[0]))
                when, increments_j = self._increments(device, column, t_ns, values)
                if column == "power_w" and device in self._counted_ns:
                    increments_j = np.where(when <= self._counted_ns[device], increments_j, 0.0)
                times.append(when)
                joules.append(increments_j)
        when = np.concatenate([np.empty(0, np.int64), *times])
        order = np.argsort(when, kind="stable")
        curve = self.joules + np.cumsum(np.concatenate([np.empty(0), *joules])[order])
        self.new = (when[order], curve)
        self.joules = float(curve[-1]) if len(curve) else self.joules

    @property
    def known_j(self) -> float | None:
        """The total; None if unknown."""
        return self.joules if self.is_known else None

    def reached(self, limit_j: float) -> tuple[int, float] | None:
        """Return when the total reached a limit in the last batch, and the total then; or None."""
        times, curve = self.new
        reached = np.flatnonzero(curve >= limit_j)
        return (int(times[reached[0]]), float(curve[reached[0]])) if len(reached) else None

    @property
    def is_hopeless(self) -> bool:
        """True if the run has devices, but none that can report energy."""
        return bool(self._devices) and not self._boundary()

    @property
    def lacks(self) -> str:
        """The reason why the total is unknown; empty if it is known."""
        if self.is_known:
            return ""
        if self._apart_ns:
            apart, limit = (significant(ns / NS_PER_S) for ns in (self._apart_ns, _MAX_GAP_NS))
            return f"power is read {apart} s apart (limit {limit} s)"
        return "no device reports its energy"

    def _boundary(self) -> set[str]:
        kinds = {device.kind for device in self._devices.values()}
        wanted = ("gpu",) if "gpu" in kinds else ("cpu", "dram")
        ids = {device.id for device in self._devices.values() if device.kind in wanted}
        twice = {i for i in ids if self._devices[i].facts.get("energy_counted_in") in ids}
        return ids - twice

    def _increments(
        self, device: str, column: str, t_ns: TimeArray, values: FloatArray
    ) -> tuple[Any, Any]:
        """Return times, and the joules since the previous reading at each."""
        key = f"{device} {column}"
        before_ns, before = self._last.get(key, (int(t_ns[0]), float(values[0])))
        self._last[key] = (int(t_ns[-1]), float(values[-1]))
        all_ns = np.concatenate([[before_ns], t_ns])
        readings = np.concatenate([[before], values])
        gaps_ns = np.diff(all_ns)
        if column == "energy_j":
            self.is_known |= bool((gaps_ns > 0).any())
            return t_ns, np.maximum(0.0, np.diff(readings))
        self.is_known |= bool(((gaps_ns > 0) & (gaps_ns <= _MAX_GAP_NS)).any())
        apart = gaps_ns[gaps_ns > _MAX_GAP_NS]
        if len(apart):
            self._apart_ns = min(int(apart.min()), self._apart_ns or int(apart.min()))
        increments_j = (readings[1:] + readings[:-1]) / 2 * gaps_ns / NS_PER_S
        return t_ns, np.where(gaps_ns > _MAX_GAP_NS, 0.0, increments_j)


class Elapsed:
    """Seconds since the run began."""

    def __init__(self, start_ns: int | None) -> None:
        self.start_ns = start_ns
        self.until_ns = 0

    def feed(self, rows: LiveRows) -> None:
        """Advance to the end of the rows."""
        starts = [
            int(steps["start_ns"].min()) for steps in rows.steps.values() if len(steps["start_ns"])
        ]
        starts += [int(t[0]) for by in rows.samples.values() for t, _ in by.values()]
        if self.start_ns is None and starts:
            self.start_ns = min(starts)
        self.until_ns = max(self.until_ns, rows.until_ns)

    def reached(self, limit_s: float) -> tuple[int, float] | None:
        """The time at which the limit was reached, and the limit; None if it was not."""
        if self.start_ns is None:
            return None
        at_ns = self.start_ns + round(limit_s * NS_PER_S)
        return (at_ns, limit_s) if self.until_ns >= at_ns else None


class LiveTotals:
    """Time, joules, and steps and tokens of a run so far."""

    def __init__(self, devices: Mapping[str, Device], *, start_ns: int | None = None) -> None:
        """`devices`: those of the run, which may grow; `start_ns`: the run's start."""
        self.energy = EnergyTotal(devices)
        self.elapsed = Elapsed(start_ns)
        self.rows = 0  # of steps, of any phase
        self.spans: dict[str, tuple[int, int]] = {}  # by writer: from its first step to its last
        self.ranks: dict[str, int] = {}  # by writer
        self.begin_training()

    def begin_training(self) -> None:
        """Reset the counts of steps and tokens, as a new training begins."""
        self.steps: dict[int, int] = {}  # optimizer steps done, by rank
        self.tokens: dict[int, float] = {}

    def feed(self, rows: LiveRows) -> None:
        """Add new rows."""
        self.elapsed.feed(rows)
        self.energy.feed(rows)
        for writer, steps in rows.steps.items():
            start_ns, end_ns = int(steps["start_ns"].min()), int(steps["end_ns"].max())
            first_ns, last_ns = self.spans.get(writer, (start_ns, end_ns))
            self.spans[writer] = (min(first_ns, start_ns), max(last_ns, end_ns))
            self.ranks[writer] = int(np.nan_to_num(steps["rank"][-1]))
            self.rows += len(steps["end_ns"])

    def add_training(self, rank: int, steps: Mapping[str, Any]) -> None:
        """Add training steps of one rank."""
        self.steps[rank] = steps_done(steps, before=self.steps.get(rank, 0))
        self.tokens[rank] = self.tokens.get(rank, 0.0) + float(np.nansum(real_tokens(steps)))

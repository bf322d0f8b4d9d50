"""How far off is each way of telling joules, on a recording of a real H200?

The GPU's energy counter is the best witness there is in the
recording, but it refreshes only every 100 ms. Over a whole phase that is about a per cent; over
0.2 s it is as large as the deviation one would like to judge. So the uncertainty of the reference
stands beside every deviation: how far it could move if each edge lay anywhere between the two
refreshes around it, plus or minus one refresh. A deviation within it says nothing.

The reference is the counter, interpolated between its refreshes. "As read" is what a tool gets that
reads the counter at both edges and subtracts: the last value shown before each edge. "Ours" is what
ergmeter makes of it: power at 10 Hz, the counter as often as 0.2 % of a core allows on an H200, and
the joules between two counter readings spread as the power says; or with the counter hidden. With
the counter it rests on the same sensor as the reference, so that column shows what sampling less
often costs, and not whether the counter is right. "Draw" integrates nvmlDeviceGetPowerUsage, an
average of about a second, which is what most tools do.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tables
from ergmeter.metrics.device_energy import counter_curve, power_curve
from ergmeter.probes.replay import recorded_samples, recorded_steps
from ergmeter.records import FloatArray, TimeArray, Window

RECORDING = Path(__file__).resolve().parent.parent / "tests" / "data" / "h200"
CUTS_S = (2.0, 1.0, 0.5, 0.2)
# Ergmeter's own; and what its 0.2 % of a core for the counter came to on an H200 (2026-11-15).
PERIOD_NS = {"power_w": 100_000_000, "energy_j": 1_700_000_000}
# When ergmeter's ticks fall is chance. Each of these is tried, and the worst is shown.
OFFSETS_NS = (0, 25_000_000, 50_000_000, 75_000_000)
SHORT_STEPS = "tiny_20ms"
WAYS = ("as read", "ours, counter", "ours, no counter", "draw")
HEADER = ("window", "s", "reference J", "its uncertainty %", *(f"{way} %" for way in WAYS))


class Recording:
    """The columns of the recording that tell energy, and the curves made from them."""

    def __init__(self, path: Path) -> None:
        samples = recorded_samples(path)
        self.columns: dict[str, tuple[TimeArray, FloatArray]] = {}
        for name in ("energy_j", "power_w", "power_average_w"):
            seen = [(s.t_ns, v) for s in samples if (v := getattr(s, name)) is not None]
            t_ns, values = zip(*seen, strict=True)
            self.columns[name] = (np.array(t_ns, dtype=np.int64), np.array(values, dtype=float))
        self.reference = counter_curve(*self.columns["energy_j"])
        self.draw = power_curve(*self.columns["power_average_w"])
        shapes = [power_curve(*self._sampled("power_w", offset)) for offset in OFFSETS_NS]
        counters = [
            counter_curve(*self._sampled("energy_j", 17 * offset), shape=shape)
            for offset, shape in zip(OFFSETS_NS, shapes, strict=True)
        ]
        self.ours = {"power_w": shapes, "energy_j": counters}
        phases = json.loads((path / "h200_trace.json").read_text())["phases"]
        self.phases = {each["name"]: Window(each["start_ns"], each["end_ns"]) for each in phases}
        self.steps = recorded_steps(path)

    def as_read(self, window: Window) -> float:
        """The counter's last value before each edge, subtracted."""
        t_ns, joules = self.columns["energy_j"]
        edges = np.searchsorted(t_ns, [window.start_ns, window.end_ns], side="right") - 1
        return float(joules[edges[1]] - joules[edges[0]])

    def _sampled(self, name: str, offset_ns: int) -> tuple[TimeArray, FloatArray]:
        """What ergmeter sees of a column at its own period; the first and the last in any case."""
        t_ns, values = self.columns[name]
        ticks = np.arange(int(t_ns[0]) + offset_ns, int(t_ns[-1]), PERIOD_NS[name])
        kept = np.unique([0, *np.searchsorted(t_ns, ticks), len(t_ns) - 1])
        return t_ns[kept], values[kept]

    def worst(self, name: str, window: Window, truth_j: float) -> float:
        """Ours over a window, by the offset that is furthest from the truth."""
        found = [curve.over(window).joules for curve in self.ours[name]]
        return max(found, key=lambda joules: abs(joules - truth_j))


def bench(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the ways over phases, over cut-outs, and step by step."""
    recording = Recording(RECORDING)
    rows = [compared(recording, name, window) for name, window in recording.phases.items()]
    tables.show("Whole phases of the H200 recording: deviation from the counter", HEADER, rows)
    cuts = [compared(recording, *cut) for cut in cut_outs(recording)]
    note = (
        "Cut from the first step of each phase, when power is still rising. The reference's"
        " uncertainty is one refresh at each edge:\na deviation inside it says nothing."
    )
    tables.show("Cut-outs at the start of each phase", HEADER, cuts, note=note)
    summary = summarised(cuts)
    names = (*HEADER[:1], "n", "its uncertainty %", *HEADER[4:])
    tables.show("Cut-outs: median size of the deviation", names, summary)
    return {"phases": rows, "cut_outs": cuts, "steps": steps(recording)}


def cut_outs(recording: Recording) -> Iterator[tuple[str, Window]]:
    """Windows of fixed lengths from the first step of each phase that has steps, else its start."""
    for name, phase in recording.phases.items():
        starts = [step.start_ns for of, step in recording.steps if of == name]
        start_ns = min(starts, default=phase.start_ns)
        for length_s in CUTS_S:
            window = Window(start_ns, start_ns + round(length_s * 1e9))
            if window.end_ns <= phase.end_ns:
                yield f"{name}, {length_s:g} s", window


def compared(recording: Recording, name: str, window: Window) -> tuple[object, ...]:
    """One row: the reference over a window, and how far each way is from it."""
    truth = recording.reference.over(window)
    found = (
        recording.as_read(window),
        recording.worst("energy_j", window, truth.joules),
        recording.worst("power_w", window, truth.joules),
        recording.draw.over(window).joules,
    )
    unsure = max(truth.high_j - truth.joules, truth.joules - truth.low_j) / truth.joules
    deviations = [f"{(joules / truth.joules - 1) * 100:+.1f}" for joules in found]
    return (
        name,
        f"{window.duration_s:.1f}",
        f"{truth.joules:.1f}",
        f"{unsure * 100:.1f}",
        *deviations,
    )


def summarised(cuts: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """The median size of the deviations, by length of the cut-out."""
    rows = []
    for length_s in CUTS_S:
        mine = [cut for cut in cuts if str(cut[0]).endswith(f", {length_s:g} s")]
        sizes = [
            f"{statistics.median(abs(float(str(cut[column]))) for cut in mine):.1f}"
            for column in range(3, len(HEADER))
        ]
        rows.append((f"{length_s:g} s", len(mine), *sizes))
    return rows


def steps(recording: Recording) -> dict[str, Any]:
    """Joules of every short step: by ours, and by subtracting the counter as it reads."""
    windows = [step.window for name, step in recording.steps if name == SHORT_STEPS]
    edges = np.array([(w.start_ns, w.end_ns) for w in windows], dtype=np.int64)
    ours = recording.ours["energy_j"][0]
    t_ns, joules = recording.columns["energy_j"]
    shown = joules[np.searchsorted(t_ns, edges, side="right") - 1]
    each = {
        "ours": np.diff(ours.at(edges.ravel()).reshape(edges.shape))[:, 0],
        "as read": np.diff(shown)[:, 0],
    }
    whole = Window(int(edges[0, 0]), int(edges[-1, 1]))
    gaps = ours.at(edges[1:, 0]) - ours.at(edges[:-1, 1])
    rows = [_step_row(way, found) for way, found in each.items()]
    total, apart = float(each["ours"].sum()), float(gaps.sum())
    span_j = ours.over(whole).joules
    note = (
        f"Ours, steps {total:.3f} J + gaps {apart:.3f} J = {total + apart:.3f} J; from the first"
        f" step's start to the last one's end\n{span_j:.3f} J; difference"
        f" {total + apart - span_j:+.1e} J."
        f" The reference over that span: {recording.reference.over(whole).joules:.1f} J."
    )
    title = f"The {len(windows)} steps of {SHORT_STEPS}, joules a step"
    header = ("way", "min", "median", "max", "sum", "steps of 0 J")
    tables.show(title, header, rows, note=note)
    return {"rows": rows, "steps_j": total, "gaps_j": apart, "span_j": span_j}


def _step_row(way: str, found: FloatArray) -> tuple[object, ...]:
    extremes = (f"{value:.2f}" for value in (found.min(), np.median(found), found.max()))
    return (way, *extremes, f"{found.sum():.1f}", int((found == 0).sum()))


def main() -> None:
    """Entry point."""
    tables.run(bench, tables.parser(__doc__).parse_args())


if __name__ == "__main__":
    main()

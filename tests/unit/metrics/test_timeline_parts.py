"""Parts of the time axis: uncounted time, phases as a whole, and a line between two times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ergmeter.metrics import timeline
from ergmeter.metrics.summarize import evidence_of
from ergmeter.runlog.settings import Settings
from tests.runs import even_steps, run_of


def test_time_before_the_counted_window_is_uncounted(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    evidence = evidence_of(run, Settings(warmup_steps=4))
    first, *_ = timeline.uncounted_s(evidence)
    span = evidence.span
    assert first == (0.0, timeline.seconds(evidence, span.start_ns))
    assert first[1] > 0


def test_a_run_that_is_all_warm_up_is_uncounted_as_a_whole(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(3))
    evidence = evidence_of(run, Settings(warmup_steps=5))
    assert timeline.uncounted_s(evidence) == [(0.0, evidence.watched.duration_s)]


def test_the_spans_of_a_phase_are_counted_before_merging() -> None:
    spans = timeline.PhaseSpans(
        "train", np.array([0.5, 2.0]), np.array([1.5, 4.0]), np.array([3, 4])
    )
    assert (spans.total, spans.first_s, spans.last_s) == (7, 0.5, 4.0)


def test_a_line_within_two_times_has_both_ends() -> None:
    line = timeline.BoundedSeries(np.arange(5.0), np.arange(5.0) * 10, readings=5)
    assert line.within(1.0, 3.0).values.tolist() == [10.0, 20.0, 30.0]
    assert line.within(1.0, 3.0).readings == 5

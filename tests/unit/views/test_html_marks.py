"""Of more marks than can be drawn the alerts are, and the page says how many are not."""

from __future__ import annotations

from pathlib import Path

from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Mark
from ergmeter.views.charts.time_charts import marks_of, phase_chart
from tests.runs import even_steps, run_of

S = 10**9


def test_a_late_alert_is_drawn_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    plain = [Mark(i * S // 100, f"epoch {i}") for i in range(210)]
    late = Mark(5 * S, "alert", "loss nan: loss nan at step 4")
    run = run_of(tmp_path / "run", steps=even_steps(10), marks=[*plain, late])
    shown = marks_of(evidence_of(run))
    assert len(shown) == 200
    assert [one["name"] for one in shown] == [*(f"epoch {i}" for i in range(199)), "alert"]
    assert phase_chart(evidence_of(run)).note == "11 more marks are not shown"


def test_where_all_marks_are_drawn_nothing_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10), marks=[Mark(S, "alert", "x")])
    assert phase_chart(evidence_of(run)).note == ""

"""JSON lines: a figure with all that is known of it."""

from __future__ import annotations

import json
from pathlib import Path

from ergmeter.sinks.jsonl import JsonLinesSink
from tests.unit.sinks.updates import GPU, NO_GRID, RUN, request, update, written


def test_a_line_says_unit_basis_bounds_note_and_why_a_figure_is_missing(tmp_path: Path) -> None:
    chosen = ["time.step_s", "energy.joules_per_token", "carbon.co2e_g", "energy.mean_w"]
    written(JsonLinesSink(request(tmp_path, metrics=chosen)), update(10))
    (line,) = (tmp_path / "figures.jsonl").read_text().splitlines()
    watts = {"unit": "W", "basis": "measured"}
    assert json.loads(line) == {
        "run": RUN,
        "scope": "window",
        "step": 10,
        "wall_s": 1_800_000_010.25,
        "window_s": 10.0,
        "window_kind": "training",
        "status": "running",
        "figures": {
            "time.step_s": {
                "value": 0.331,
                "unit": "s",
                "basis": "measured",
                "low": 0.3,
                "high": 0.4,
            },
            "energy.joules_per_token": {
                "value": 0.0251,
                "unit": "J/token",
                "basis": "derived",
                "note": "real",
            },
            "energy.mean_w": {"value": 310.25, **watts},
        },
        "devices": {
            GPU: {"energy.mean_w": {"value": 309.75, **watts}},
            "cpu-0": {"energy.mean_w": {"value": 80.125, **watts}},
        },
        "missing": {"carbon.co2e_g": NO_GRID},
        "notes": ["a note"],
    }


def test_lines_are_added_to_a_file_whose_last_one_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text('{"run": "an older')
    written(JsonLinesSink(request(tmp_path, path=path)), update(1), update(2))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == [1, 2]
    assert lines[0] == '{"run": "an older'

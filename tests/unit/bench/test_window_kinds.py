"""Rates over different kinds of window are not judged by each other."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.tables import as_table
from ergmeter.compare.pairing import CompareOptions, NotComparable
from ergmeter.records import Step
from tests.runs import add_writer, make_run
from tests.unit.bench.rows import change, compare, gate, repeats, row

S = 10**9
VALUES = [1000.0, 1004.0, 996.0]
CELL = Cell(0, "abc", "s", {"framework_config": "g"}, num_gpus=1, repeat=1, command=("x",))


def table(**fields: object) -> pa.Table:
    return as_table(repeats("g", "real_tokens_per_s", VALUES, rates_from="run", **fields))


def cell(path: Path) -> Path:
    """A cell whose run made 20 steps of 1 s with 1000 tokens, and an evaluation of 5 s."""
    path.mkdir(parents=True)
    (path / "cell.json").write_text(json.dumps(CELL.to_json()))
    (path / "status.json").write_text(json.dumps({"status": "ok"}))
    steps = [
        Step(t * S, (t + 1) * S, index=i, tokens_computed=1000, tokens_real=1000)
        for i, t in enumerate([*range(10), *range(15, 25)])
    ]
    run = make_run(path / "run")
    add_writer(run, steps=[*steps, Step(10 * S, 15 * S, phase="eval")])
    return path


def test_the_same_kind_is_judged() -> None:
    found = gate(table(window="training"), table(window="training"), ["tokens_per_s -3%"])
    assert found.state == "pass"
    old = gate(table(), table(), ["tokens_per_s -3%"])  # rows of earlier versions
    assert old.state == "pass"


def test_another_kind_is_refused_where_it_can_not_be_computed_anew() -> None:
    with pytest.raises(
        NotComparable, match=r"not comparable: kind of window differs \(unbroken / training\)"
    ):
        gate(table(window="training"), table(path="/gone"), ["tokens_per_s -3%"])
    with pytest.raises(NotComparable, match="not comparable"):
        compare(table(), table(window="training"))


def test_rows_of_another_kind_are_computed_anew_from_their_cells(tmp_path: Path) -> None:
    path = cell(tmp_path / "exp_0")
    fields = {"framework_config": "g", "group": CELL.group, "rates_from": "run", "scenario": "s"}
    # By the old window 20 steps took 25 s.
    stored = as_table([row(real_tokens_per_s=800.0, path=str(path), **fields)])
    new = as_table([row(real_tokens_per_s=1000.0, window="training", **fields)])
    found = compare(new, stored, options=CompareOptions(metrics=("tokens_per_s",)))
    (compared,) = found.pairs
    assert change(compared, "tokens_per_s").means[1] == pytest.approx(1000.0)
    assert change(compared, "tokens_per_s").value == pytest.approx(1.0)


def test_rates_that_a_trainer_printed_have_no_window_of_ours() -> None:
    printed = as_table(repeats("g", "real_tokens_per_s", VALUES, rates_from="trainer"))
    assert gate(table(window="training"), printed, ["tokens_per_s -3%"]).state == "pass"

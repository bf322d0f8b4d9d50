"""The cells of a bench as a matrix, and what a gate comes to for each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ergmeter.bench.overview import Configuration, Matrix, matrix, overview, report_of
from ergmeter.bench.tables import as_table
from ergmeter.views.bench import heat_map
from ergmeter.views.render.html import rendered
from tests.unit.bench.rows import repeats, row


def of(*rows: dict[str, Any]) -> Matrix:
    numbered = [{**one, "index": number} for number, one in enumerate(rows)]
    return matrix(overview(as_table(numbered)))


def members(found: Matrix) -> list[Configuration]:
    return [one for place in found.places.values() for one in place]


def drawn(found: Matrix, metric: str, links: Mapping[str, str] | None = None) -> str:
    return rendered("heat_map", heat_map(found, metric, links or {}))


def cell(framework: str, gpus: int, rate: float | None, **more: Any) -> dict[str, Any]:
    status = "ok" if rate is not None else "oom"
    return row(
        **{"framework_config": framework, "num_gpus": gpus, "tokens_per_s": rate, **more},
        status=status,
    )


def test_a_size_runs_across_in_its_order_and_the_rest_names_the_rows() -> None:
    found = of(*(cell(name, gpus, 1.0) for name in ("b", "a") for gpus in (8, 16, 1)))
    assert (found.down, found.across) == (("framework_config",), "num_gpus")
    assert found.columns == [1, 8, 16]
    assert found.rows == [("a",), ("b",)]
    assert all(len(place) == 1 for place in found.places.values())


def test_with_a_single_setting_there_is_one_column() -> None:
    found = of(cell("a", 1, 1.0), cell("b", 1, 2.0))
    assert (found.down, found.across, found.columns) == (("framework_config",), None, [None])


def test_settings_of_a_bench_of_its_own_tell_its_cells_apart() -> None:
    found = of(*(cell("a", 1, 1.0, settings={"layers": [n, n]}) for n in (1, 2)))
    assert found.down == ("layers",)
    assert found.rows == [("[1, 1]",), ("[2, 2]",)]


def test_a_failed_configuration_has_its_word_and_no_figure() -> None:
    found = of(cell("a", 1, 10.0), cell("a", 2, None, reason="too big"))
    ok, failed = members(found)
    assert (len(ok.ok), ok.mean("tokens_per_s"), ok.mean("loss")) == (1, 10.0, None)
    assert (failed.ok, failed.is_waiting, failed.mean("tokens_per_s")) == ([], False, None)
    assert (failed.status, failed.reason) == ("oom", "too big")
    assert found.figures == ("tokens_per_s",)


def test_repeats_are_averaged_and_one_that_failed_is_told() -> None:
    rows = repeats("g", "tokens_per_s", [10.0, 20.0, 0.0], num_gpus=1)
    rows[2] |= {"status": "timeout", "tokens_per_s": None}
    (one,) = members(of(*rows))
    assert one.mean("tokens_per_s") == pytest.approx(200**0.5)  # of 10 and 20
    # A mean of two, whatever became of the third; nobody told the loss.
    assert (one.runs("tokens_per_s"), one.runs("loss")) == (2, 0)
    assert "14.14 (2 runs)" in drawn(of(*rows), "tokens_per_s")
    assert one.status == "2 ok, 1 timeout"


def test_a_loss_that_is_no_number_is_told_and_is_not_in_the_scale() -> None:
    nan, inf = float("nan"), float("inf")
    found = of(*(cell("a", n, 1.0, loss=x) for n, x in enumerate((1.0, nan, 3.0, inf), start=1)))
    made = drawn(found, "loss")
    classes = re.findall(r'class="cell (\w+)"><span>(\w+)', made)
    assert classes == [("level0", "1"), ("none", "nan"), ("level4", "3"), ("none", "inf")]
    assert ">nan<" in drawn(of(cell("a", 1, 1.0, loss=nan)), "loss")


def test_a_long_reason_is_cut_and_says_so() -> None:
    made = drawn(of(cell("a", 1, 1.0), cell("b", 1, None, reason="x" * 161)), "tokens_per_s")
    assert f"<small>{'x' * 160}...</small>" in made


def test_a_hostile_setting_is_text_and_a_link_is_escaped() -> None:
    found = of(cell('<b onload="x">', 1, 1.0, path='/r/"exp_0'), cell("a", 1, 2.0, path="/r/exp_1"))
    made = drawn(found, "tokens_per_s", {'/r/"exp_0': 'x" onclick="y'})
    assert "<b " not in made
    assert "&lt;b onload=&#34;x&#34;&gt;" in made
    assert 'href="x&#34; onclick=&#34;y"' in made
    assert "<small>exp_1</small>" in made


def test_the_page_of_a_run_is_found_in_its_cell(tmp_path: Path) -> None:
    assert report_of(str(tmp_path)) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").touch()
    assert report_of(str(tmp_path)) == tmp_path / "run" / "report.html"


@pytest.mark.parametrize(("values", "across"), [(8, "num_gpus"), (9, None)])
def test_too_many_values_do_not_run_across(values: int, across: str | None) -> None:
    rows = [cell(name, gpus, 1.0) for name in ("a" * 20, "b" * 20) for gpus in range(values)]
    assert of(*rows).across == across

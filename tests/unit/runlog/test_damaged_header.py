"""Damaged FLOPs and results of `erg analyze` in the header of a run's writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Flops, Missing, Reading
from ergmeter.runlog.format import WRITER_FILE
from ergmeter.runlog.reader import Run
from ergmeter.runlog.writer import amend_header
from tests.runs import add_writer, even_steps, make_run

Erg = Callable[..., tuple[int, str, str]]
MFU = "utilization.mfu_frac"
READING = asdict(Reading(0.4, "frac", "derived", 0.3, 0.5))
FLOPS = asdict(Flops(1e15, "exact", "analytic"))
WRONG: list[dict[str, Any]] = [
    *({"value": value} for value in (None, "0.4", True, float("nan"))),
    *({"low": "0.3"}, {"high": [1]}, {"basis": "?"}, {"note": 1}),
]
RESULTS: list[Any] = [
    *(None, [1], {}, "text", 3),
    *(READING | wrong for wrong in WRONG),
    {"reason": None},
]
WRONG_FLOPS: list[Any] = [
    *({}, None, 3),
    FLOPS | {"model_per_step": "1e15"},
    FLOPS | {"assumptions": [1]},
    FLOPS | {"other_work": [{}]},
]
DAMAGED: list[dict[str, Any]] = [
    *({"analysis": {MFU: result}} for result in RESULTS),
    *({"flops": [flops]} for flops in WRONG_FLOPS),
    *({"analysis": [READING]}, {"analysis": "text"}, {"analysis": 3}),
    *({"flops": {}}, {"flops": "text"}),
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=str)
def test_a_damaged_part_is_named_and_left_out(
    tmp_path: Path, erg: Erg, damaged: dict[str, Any]
) -> None:
    paths = [make_run(tmp_path / name) for name in ("good", "bad")]
    headers = {"analysis": {MFU: READING}, "flops": [FLOPS]}
    for path, parts in zip(paths, (headers, headers | damaged), strict=True):
        amend_header(add_writer(path, steps=even_steps(20, tokens_computed=100)), **parts)
    assert Run.open(paths[0]).analysis == {MFU: Reading(**READING)}
    (part,) = damaged
    run = Run.open(paths[1])
    assert not getattr(run, part)
    assert (len(run.flops), len(run.analysis)) == ((0, 1) if part == "flops" else (1, 0))
    (line,) = run.damage
    (header,) = paths[1].glob(f"*/{WRITER_FILE}")
    assert line.startswith(f"{header}: {part} can't be read (")
    for command, code in (
        (("report", "--json", paths[1]), 1),
        (("export", paths[1], "--format", "json", "--out", tmp_path / "exported"), 1),
        (("gate", paths[0], paths[1]), 4),
        (("gate", paths[1], paths[0]), 4),
        (("compare", *paths, "--json"), 1),
    ):
        returned, out, error = erg(*command)
        assert returned == code, (command, out, error)
        assert line in f"{out}{error}".replace('\\"', '"')
        assert "Traceback" not in error


@pytest.mark.parametrize("stored", [{"flops": None, "analysis": None}, {}], ids=["null", "absent"])
def test_a_header_without_flops_and_analysis_is_not_damaged(
    tmp_path: Path, stored: dict[str, Any]
) -> None:
    path = make_run(tmp_path / "run")
    amend_header(add_writer(path, steps=even_steps(20, tokens_computed=100)), **stored)
    run = Run.open(path)
    assert (run.damage, run.flops, run.analysis, run.no_flops) == ([], (), {}, "")


@pytest.mark.parametrize("field", ["tokens_per_step", "samples_per_step"])
def test_a_whole_float_is_a_count(tmp_path: Path, field: str) -> None:
    path = make_run(tmp_path / "run")
    writer = add_writer(path, steps=even_steps(20, tokens_computed=100))
    amend_header(writer, flops=[FLOPS | {field: 4096.0}])
    run = Run.open(path)
    assert not run.damage
    count = getattr(run.flops[0], field)
    assert (count, type(count)) == (4096, int)


@pytest.mark.parametrize(
    "wrong",
    [{"bytes_per_step": float("inf")}, {"bytes_per_step": float("nan")}, {"tokens_per_step": 0.5}],
    ids=str,
)
def test_one_damaged_convention_leaves_the_others(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = make_run(tmp_path / "run")
    writer = add_writer(path, steps=even_steps(20, tokens_computed=100))
    palm, neuron = (FLOPS | {"convention": name} for name in ("palm", "neuron"))
    amend_header(writer, flops=[FLOPS, palm | wrong, neuron])
    run = Run.open(path)
    assert [flops.convention for flops in run.flops] == ["exact", "neuron"]
    (name,), (value,), (line,) = wrong, wrong.values(), run.damage
    assert line == f"{writer / WRITER_FILE}: flops can't be read (palm: {name} is {value!r})"


def test_metrics_of_damaged_flops_say_that_they_are_damaged(tmp_path: Path, erg: Erg) -> None:
    path = make_run(tmp_path / "run")
    writer = add_writer(path, steps=even_steps(20, tokens_computed=100))
    amend_header(writer, flops=[FLOPS | {"model_per_step": "1e15"}])
    readings = summarize(Run.open(path)).readings
    why = f"{writer / WRITER_FILE}: flops can't be read (exact: model_per_step is '1e15')"
    for key in (MFU, "compute.model_flops_per_token", "compute.model_flops_per_step"):
        assert readings[key] == Missing(why)
    assert "--model-config" not in " ".join(erg("explain", path)[1].split()).partition("record")[0]


@pytest.mark.parametrize("note", ["", "as given", "exact; of 95 TFLOP/s"])
def test_a_stored_mfu_has_any_note(tmp_path: Path, erg: Erg, note: str) -> None:
    path = make_run(tmp_path / "run")
    writer = add_writer(path, steps=even_steps(20, tokens_computed=100))
    amend_header(writer, analysis={MFU: READING | {"note": note}}, flops=[FLOPS])
    code, printed, error = erg("report", path, "--long")
    assert (code, error) == (0, "")
    assert f"! MFU: {note or 'derived'}" in printed

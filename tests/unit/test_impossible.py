"""An MFU of 336.64 %: marked wherever it is shown, and nothing is computed from it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ergmeter.bench.overview import Configuration
from ergmeter.bench.results import run_columns
from ergmeter.bench.tables import as_table
from ergmeter.compare.comparison import compare
from ergmeter.compare.entry import Entry, SourceEntries
from ergmeter.compare.ledgers import read_ledger
from ergmeter.compare.pairing import CompareOptions
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.definitions.compute import BANDWIDTH, HFU, MFU, MFU_BF16
from ergmeter.metrics.live.frame import RunWatcher
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Flops, Missing, Reading, Reported, is_above
from ergmeter.runlog.reader import Run
from ergmeter.sinks.console import line
from ergmeter.sinks.shared.updates import Names, SinkValue
from ergmeter.views import compare as compare_view
from ergmeter.views.bench import figure_in_words
from ergmeter.views.calculate.machine import _of_peak
from ergmeter.views.render.markdown import markdown
from ergmeter.views.run import watch
from ergmeter.views.run.model_card import badge
from ergmeter.views.serve import live
from ergmeter.views.serve import responses as serve_work
from tests.runs import add_writer, even_steps, make_run, reading, reason, report_page
from tests.unit.bench.rows import gate
from tests.unit.bench.rows import row as bench_row
from tests.unit.metrics.test_achievable import RATE as CALIBRATED
from tests.unit.sinks.readback import sink_of
from tests.unit.sinks.updates import update, written

Erg = Callable[..., tuple[int, str, str]]

H200 = Device("GPU-0", "gpu", "NVIDIA H200", "nvml")
PEAK = 989.5e12  # FLOP/s, dense bf16, of the datasheet
SHARE = 3.3664
# One step of a second with 100 tokens.
STEP = Flops(SHARE * PEAK, "exact", "analytic", SHARE * PEAK, tokens_per_step=100)
WHY = (
    "above 100 %: an input is wrong, likely the number of devices, the peak or its dtype, tokens"
    " counted twice, FLOPs of frozen weights or masked pairs, or a time that did not wait for the"
    " device"
)
SHOWN = "337 % (impossible)"


def made(path: Path, flops: Flops = STEP) -> Run:
    """Twenty steps of a second on an H200."""
    make_run(path)
    add_writer(
        path,
        steps=even_steps(20, tokens_computed=100),
        devices=[H200],
        settings={"dtype": "bf16"},
        header={"flops": [asdict(flops)]},
    )
    return Run.open(path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return made(tmp_path / "runs" / "wrong")


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "low", "high", "is_impossible"),
    [
        (1.0003, None, None, False),  # a timer's rounding
        (1.0099, None, None, False),
        (1.0101, None, None, True),
        (1.05, 0.98, 1.12, False),  # the interval includes the bound
        (1.005, 1.002, 1.008, True),  # the whole interval is above
        (3.0, 2.9, 3.1, True),
    ],
)
def test_a_value_is_impossible_if_its_whole_interval_is_above_the_bound(
    value: float, low: float | None, high: float | None, *, is_impossible: bool
) -> None:
    found = Reading(value, "frac", "measured", low, high)
    assert is_above(found, 1.0) is is_impossible
    marked = catalogue()["utilization.busy_frac"].checked(found)
    assert bool(marked.impossible) is is_impossible
    assert (marked.value, marked.low, marked.high) == (value, low, high)  # nothing is clamped


def test_every_share_of_the_catalogue_has_a_bound_but_those_that_may_exceed_1() -> None:
    free = {one.key for one in catalogue().values() if one.unit == "frac" and not one.upper_bound}
    # Of one core; products in fp8 against the bf16 peak; how far behind a rank is, in step times.
    assert free == {"overhead.cpu_frac", MFU_BF16, "ranks.spread_frac"}


# -- metrics ---------------------------------------------------------------------------------------


def test_mfu_and_hfu_are_marked_with_the_reason(run: Run) -> None:
    found = reading(run, MFU)
    assert found.value == pytest.approx(SHARE)
    assert found.impossible == WHY
    assert reading(run, HFU).impossible == WHY
    assert f"MFU, HFU, all work, of the peak are impossible: {WHY}" in summarize(run).notes


def test_a_possible_mfu_is_not_marked(tmp_path: Path) -> None:
    found = reading(made(tmp_path / "run", replace(STEP, model_per_step=0.4 * PEAK)), MFU)
    assert found.value == pytest.approx(0.4)
    assert found.impossible == ""


def test_an_impossible_bandwidth_is_marked(tmp_path: Path) -> None:
    # 60 TB/s of an H200's 4.8.
    flops = replace(STEP, model_per_step=0.1 * PEAK, bytes_per_step=60e12)
    found = reading(made(tmp_path / "run", flops), BANDWIDTH)
    assert found.value == pytest.approx(60 / 4.8)
    assert found.impossible.startswith("above 100 %: an input is wrong, likely the batch size")


def test_fp8_has_no_second_share_where_the_first_is_impossible(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    add_writer(
        tmp_path / "run",
        steps=even_steps(20, tokens_computed=100),
        devices=[H200],
        settings={"dtype": "fp8"},
        header={"flops": [asdict(STEP)]},
    )
    # 3331 TFLOP/s of 1979 in fp8.
    assert reason(Run.open(tmp_path / "run"), MFU_BF16).startswith("MFU 168 % is impossible: above")


def test_the_waterfall_and_the_roofline_do_not_use_it(run: Run, erg: Erg) -> None:
    code, out, _ = erg("explain", run.path, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["missing"]["mfu"] == f"MFU 337 % is impossible: {WHY}"
    assert found["achieved"] is None
    assert not any("--model-config" in line for line in found["record_next"])


def test_a_printed_mfu_above_1_is_not_explained(tmp_path: Path, erg: Erg) -> None:
    make_run(tmp_path / "run")
    printed = [Reported(i * 10**9, "mfu", 2.5, "frac") for i in range(1, 20)]
    add_writer(tmp_path / "run", steps=even_steps(20, tokens_computed=100), reported=printed)
    found = json.loads(erg("explain", tmp_path / "run", "--json")[1])
    assert found["missing"]["mfu"].startswith("MFU 250 % is impossible: above 100 %")


def test_estimate_does_not_take_it(run: Run, erg: Erg, config: Path) -> None:
    code, _, err = erg(
        *("estimate", config, "--seq-len", 64, "--device", "h200-sxm", "--dtype", "bf16"),
        *("--tokens", "1e9", "--mfu-from", run.path),
    )
    assert code == 1
    assert "MFU 337 % is impossible" in err


# -- what is printed -------------------------------------------------------------------------------


def the_line(text: str, beginning: str) -> str:
    (found,) = [one for one in text.splitlines() if one.strip(" │").startswith(beginning)]
    return found


def test_the_card_and_the_table_of_all_metrics(run: Run, erg: Erg) -> None:
    card = erg("report", run.path)[1]
    assert SHOWN in the_line(card, "MFU  ")
    assert SHOWN in the_line(erg("report", run.path, "--long")[1], "compute")
    every = erg("report", run.path, "--all")[1]
    assert SHOWN in the_line(every, MFU)
    assert " ".join(every.split()).count(WHY) >= 2  # below MFU and below HFU
    named = erg("report", run.path, "--metric", "mfu")[1]
    assert named.startswith(
        f"mfu 3.3664 frac [3.366, 3.366] (impossible) (reported; {WHY}; exact; of"
    )


def test_json_has_the_reason_in_a_field_of_its_own(run: Run, erg: Erg) -> None:
    found = json.loads(erg("report", run.path, "--json")[1])["readings"]
    assert found[MFU]["impossible"] == WHY
    assert found["throughput.tokens_per_s"]["impossible"] is None
    assert found[MFU_BF16]["missing"]


def test_the_page_marks_the_tile(run: Run) -> None:
    html = report_page(run)
    (tile,) = [one for one in html.split("<article ") if "<h3>MFU</h3>" in one]
    assert tile.startswith('class="card impossible"')
    assert f'<div class="value">{SHOWN}</div><div class="why">{WHY}</div>' in tile
    assert html.count('class="card impossible"') == 1
    assert "MFU has no bar: 337 % is impossible" in html
    assert f"MFU {SHOWN}" in html  # in the sentence to cite


def test_model_card_and_badge(run: Run, erg: Erg) -> None:
    page = erg("card", run.path)[1]
    assert f"| MFU | {SHOWN} |" in page
    assert f"an MFU of {SHOWN}" in page
    svg = badge(MFU, summarize(run).readings[MFU])
    assert f"{SHOWN}, " in svg
    assert "#b3261e" in svg


def test_the_live_views(run: Run) -> None:
    with closing(RunWatcher(run.path)) as watching:
        frame = watching.look(totals=True)
    mfu = frame.so_far[MFU]
    assert isinstance(mfu, Reading)
    assert mfu.impossible == WHY
    assert f"MFU so far {SHOWN}" in watch.line(frame)
    told = live.result_with_texts(mfu)
    assert (told["text"], told["impossible"]) == (SHOWN, WHY)
    row = json.loads(serve_work.row(str(run.path), str(run.path.parent)))
    assert row["readings"][MFU]["text"] == SHOWN
    assert row["readings"][MFU]["impossible"] == WHY


def test_erg_mfu_marks_the_line(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 64, "--tokens-per-s", 1e9, "--device", "h200-sxm")
    out = erg(*common)[1]
    assert "% (impossible)" in the_line(out, "MFU  ")
    assert "% (impossible)" in out.splitlines()[0]
    assert WHY in " ".join(out.split())
    assert json.loads(erg(*common, "--json")[1])["readings"][MFU]["impossible"] == WHY


# -- comparison and bench --------------------------------------------------------------------------


def entry(name: str, mfu: float) -> Entry:
    figures: dict[str, Reading | Missing] = {
        "throughput.tokens_per_s": Reading(100.0, "tokens/s", "measured"),
        MFU: catalogue()[MFU].checked(Reading(mfu, "frac", "derived")),
    }
    return Entry(name, name, {"backend": name}, figures)


def test_a_comparison_shows_it_and_gives_no_verdict() -> None:
    found = compare(
        SourceEntries((entry("a", SHARE), entry("b", 0.4))),
        CompareOptions(metrics=("tok_per_s", "mfu")),
    )
    measured_mfu = next(one for one in found.measures if one.key == MFU)
    cells = [compare_view.cell(found, group, measured_mfu)[0] for group in found.groups]
    assert cells == [SHOWN, "40 %"]
    (verdict,) = [one for one in found.pairs[0].verdicts if one.measure.key == MFU]
    assert verdict.state == "absent"
    assert verdict.contrast is None
    assert verdict.words == f"MFU: a: 337 % is impossible: {WHY}"
    document = compare_view.comparison_data(found)
    assert document["groups"][0]["means"][MFU] == {"missing": f"337 % is impossible: {WHY}"}
    assert document["groups"][0]["runs"][0]["readings"][MFU]["impossible"] == WHY
    assert f"| a | a | 100 tokens/s, measured | {SHOWN.replace('(', '(')}" in (
        markdown(compare_view.comparison_document(found))
    )


def test_one_impossible_repeat_takes_the_mean_with_it() -> None:
    entries = (entry("a", 0.4), entry("a", SHARE), entry("b", 0.4), entry("b", 0.41))
    found = compare(SourceEntries(entries), CompareOptions(group_by=("backend",), metrics=("mfu",)))
    (verdict,) = found.pairs[0].verdicts
    assert verdict.state == "absent"


def test_a_ledger_row_is_marked_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "energy_results.csv"
    path.write_text("tok_per_s,tokens_processed,wall_s,window_s,mfu\n100,1000,10,10,9.85\n")
    (found,) = read_ledger(path, argument="x").entries
    mfu = found.figures[MFU]
    assert isinstance(mfu, Reading)
    assert mfu.impossible == WHY
    assert found.value(MFU) is None


def test_a_bench_row_has_the_value_and_the_reason(run: Run) -> None:
    row = run_columns(run.path, {}, [], num_gpus=1)
    assert row["mfu_frac"] == pytest.approx(SHARE)
    assert json.loads(row["impossible"]) == {"mfu_frac": WHY}


def test_a_bench_marks_it_and_does_not_judge_it() -> None:
    wrong = {"mfu_frac": SHARE, "impossible": json.dumps({"mfu_frac": WHY})}
    new = as_table([bench_row(group="g", **wrong)])
    ref = as_table([bench_row(group="g", mfu_frac=0.4)])
    rows = new.to_pylist()
    assert figure_in_words(Configuration(rows), "mfu_frac") == SHOWN
    judged = gate(new, ref, ["mfu -3%"], allow_missing=True)
    (one,) = judged.verdicts
    assert one.contrast is None
    assert one.words == f"NEW does not have it: impossible: {WHY}"


# -- sinks -----------------------------------------------------------------------------------------

MARKED = Reading(SHARE, "frac", "assumed", impossible=WHY)


def test_sinks_carry_the_mark(tmp_path: Path) -> None:
    wrong = update(10, utilization__mfu_frac=MARKED)
    written(sink_of("csv", tmp_path), wrong)
    with (tmp_path / "figures.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row[MFU] == "3.3664 (impossible)"
    written(sink_of("jsonl", tmp_path), wrong)
    said = json.loads((tmp_path / "figures.jsonl").read_text())
    assert said["figures"][MFU]["impossible"] == WHY
    assert "impossible" not in said["figures"]["energy.mean_w"]
    figure = SinkValue(MFU, MARKED)
    assert Names().tagged([figure], is_final=False) == {f"ergmeter/{MFU}_impossible": SHARE}
    assert line("x", [figure], columns=None) == f"x | MFU {SHOWN} (assumed)"


def test_metrics_servers_carry_the_mark(tmp_path: Path) -> None:
    sink = sink_of("prometheus", tmp_path, port=0)
    try:
        sink.write(update(10, utilization__mfu_frac=MARKED))
        samples = [one for family in sink.collect() for one in family.samples]
        (mfu,) = [one for one in samples if one.name == "ergmeter_utilization_mfu_frac"]
        assert mfu.labels["impossible"] == "true"
        assert not any("impossible" in one.labels for one in samples if one is not mfu)
    finally:
        sink.close()


def test_a_calibration_above_the_peak_is_marked() -> None:
    assert _of_peak(replace(CALIBRATED, low=1.1e15, value=1.2e15), PEAK) == "121.3 % (impossible)"
    assert _of_peak(replace(CALIBRATED, low=0.98e15, value=1.0e15), PEAK) == "101.1 %"

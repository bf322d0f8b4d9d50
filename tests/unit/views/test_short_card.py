"""The card of a terminal: 16 lines and 79 columns at most, the answer and what to know."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ergmeter.metrics.summarize import evidence_of, summary_of
from ergmeter.records import Device, Mark, Sample
from ergmeter.runlog.reader import Run
from ergmeter.views.document import Table, TableColumn
from ergmeter.views.documents import report
from ergmeter.views.reading_text import column_text
from ergmeter.views.run.card import document
from tests.runs import even_steps, printed, run_of

S = 10**9
GOLDEN = Path(__file__).parents[2] / "golden" / "expected"
CARD = re.compile(r"^╭.*?^╰[^\n]*$", re.MULTILINE | re.DOTALL)


def lines_of(run: Run) -> list[str]:
    evidence = evidence_of(run)
    return printed(*document([(evidence, summary_of(evidence))]).parts).splitlines()


def rows_of(run: Run) -> dict[str, str]:
    """The card's rows by their label."""
    inside = (line.strip("│ ") for line in lines_of(run) if line.startswith("│"))
    rows = (re.split(r"  +", line, maxsplit=1) for line in inside)
    return {row[0]: row[1] for row in rows if len(row) == 2}


CARDS = [path for path in sorted(GOLDEN.glob("report-*-80.txt")) if "-memory-" not in path.name]


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_every_card_is_of_at_most_16_lines_and_79_columns(path: Path) -> None:
    text = path.read_text().partition("--- stdout\n")[2]
    cards = CARD.findall(text)
    assert cards
    for card in cards:
        lines = card.splitlines()
        assert len(lines) + 3 <= 16  # with the next commands
        assert {len(line) for line in lines} == {79}


def test_the_training_stands_beside_the_whole_run(tmp_path: Path) -> None:
    """20 steps of 100 tokens; the first 5 are warm-up of 2 s each: 15 x 100 tokens in 15 s."""
    slow = even_steps(5, seconds=2.0, tokens_real=100)
    fast = (
        replace(step, start_ns=step.start_ns + 10 * S, end_ns=step.end_ns + 10 * S)
        for step in even_steps(15, tokens_real=100)
    )
    gpu = Device("GPU-0", "gpu", "Test GPU", "nvml", {"memory_total_bytes": 80e9})
    samples = [
        Sample(i * S, "GPU-0", power_w=300.0, energy_j=300.0 * i, memory_bytes=4 * 10**9)
        for i in range(26)
    ]
    run = run_of(
        tmp_path / "run",
        steps=[*slow, *fast],
        samples=samples,
        devices=[gpu],
        settings={"warmup_steps": 5},
    )
    rows = rows_of(run)
    readings = summary_of(evidence_of(run)).readings
    assert rows["tokens/s"].split()[0] == "100"
    assert rows["J/token"].split()[0] == "3"  # 300 W over 100 tokens/s
    whole = column_text(readings["throughput.whole_run_tokens_per_s"])
    assert rows["tokens/s"].split()[-1] == whole != "100"
    assert rows["memory"] == "4 GB  of 80 GB"
    assert lines_of(run)[0].startswith("╭─ test · finished · ")
    assert lines_of(run)[0].endswith(" 1 x Test GPU ─╮")


def test_an_energy_that_was_not_measured_is_one_line(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_real=100))
    said = [line for line in lines_of(run) if line.startswith("│") and "energy" in line]
    assert len(said) == 1
    assert "- J/token, energy  no energy sensor was sampled in this run" in said[0]


def test_the_next_commands_have_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "runs" / "a run", steps=even_steps(20, tokens_real=100))
    monkeypatch.chdir(tmp_path)
    assert [" ".join(line.split("  ")[0].split()) for line in lines_of(run)[-3:]] == [
        "erg compare 'runs/a run' OTHER",
        "erg explain 'runs/a run'",
        "erg serve --open",
    ]


def test_a_warning_is_marked_apart_from_a_remark(tmp_path: Path) -> None:
    """Three steps are too few: a warning. A chip that warms up is a remark."""
    gpu = Device("GPU-0", "gpu", "Test GPU", "nvml")
    samples = [Sample(i * S, "GPU-0", power_w=300.0, temperature_c=40.0 + 5 * i) for i in range(4)]
    run = run_of(
        tmp_path / "run",
        steps=even_steps(3, tokens_real=100),
        samples=samples,
        devices=[gpu],
        settings={"warmup_steps": 0},
    )
    rows = rows_of(run)
    assert rows["! window"] == "the window is 3 s long, with 3 steps"
    assert rows["i temperature"].startswith("Test GPU: warmed from 40 to 55 °C")


def test_absences_never_displace_a_warning_and_what_has_no_room_is_counted(tmp_path: Path) -> None:
    """Neither tokens, energy nor MFU take six lines; four warnings are one more than three."""
    marks = [Mark(S, "probe_failed", f"number {n}") for n in range(4)]
    run = run_of(tmp_path / "run", steps=even_steps(20), marks=marks)
    lines = lines_of(run)
    labels = [line[2:4] for line in lines if line.startswith(("│ ! ", "│ - "))]
    assert labels == ["! "] * 3 + ["- "] * (len(labels) - 3)
    assert len(labels) > 3
    (below,) = (line for line in lines if line.startswith("╰"))
    assert re.search(r" [1-9]\d* more: erg report --long ─╯$", below)


def test_the_memory_of_unlike_gpus_has_no_size_beside_it(tmp_path: Path) -> None:
    gpus = [
        Device(f"GPU-{n}", "gpu", "Test GPU", "nvml", {"memory_total_bytes": size})
        for n, size in enumerate((24e9, 80e9))
    ]
    samples = [
        Sample(i * S, gpu.id, power_w=300.0, memory_bytes=60 * 10**9)
        for i in range(21)
        for gpu in gpus
    ]
    run = run_of(
        tmp_path / "run", steps=even_steps(20, tokens_real=1), samples=samples, devices=gpus
    )
    assert rows_of(run)["memory"] == "60 GB"


def test_a_long_remark_takes_no_room_from_the_numbers() -> None:
    table = Table(
        (TableColumn("", no_wrap=True), TableColumn("training", "number"),
         TableColumn("", is_one_line=True)),
        (("tokens/s", "1,824,327", "word " * 40),),
    )  # fmt: skip
    line = printed(table).splitlines()[-1]
    assert line.startswith("tokens/s  1,824,327  word word")
    assert line.rstrip().endswith("…")


def test_the_numbers_of_the_card_are_those_of_the_json(tmp_path: Path) -> None:
    gpu = Device("GPU-0", "gpu", "Test GPU", "nvml", {"memory_total_bytes": 80e9})
    samples = [
        Sample(i * S, "GPU-0", power_w=310.0, energy_j=310.0 * i, memory_bytes=4 * 10**9)
        for i in range(21)
    ]
    run = run_of(
        tmp_path / "run",
        steps=even_steps(20, tokens_real=123),
        samples=samples,
        devices=[gpu],
        settings={"warmup_steps": 0},
    )
    readings = report(run, summary_of(evidence_of(run)))["readings"]
    rows = rows_of(run)
    for label, key, scale in (
        ("tokens/s", "throughput.tokens_per_s", 1),
        ("J/token", "energy.joules_per_token", 1),
        ("step time", "time.step_s", 1),
        ("memory", "memory.device_peak_bytes", 1e-9),
    ):
        assert float(rows[label].split()[0]) == pytest.approx(
            readings[key]["value"] * scale, rel=1e-3
        ), label

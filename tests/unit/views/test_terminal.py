"""What a person sees: a card that fits 80 columns, says each thing once and leaves nothing out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from ergmeter.importers.importing import ImportRequest, import_log
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.summarize import evidence_of, summarize, summary_of
from ergmeter.records import (
    Device,
    Reading,
    Reported,
    Sample,
    Step,
    Summary,
    interval_text,
    value_text,
)
from ergmeter.runlog.identity import run_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.runlog.writer import create_run
from ergmeter.units import BARS
from ergmeter.views import documents, reading_text
from ergmeter.views.run import long_card
from ergmeter.views.run.card import _every_metric, document
from tests.runs import add_writer, even_steps, printed, printed_card, run_of

S = 10**9
WIDTH = 80


def shown(run: Run, *, width: int = WIDTH, **settings: Any) -> list[str]:
    evidence = evidence_of(run, Settings(**settings))
    cards = [(evidence, summary_of(evidence))]
    return printed(*document(cards, is_long=True).parts, width=width).splitlines()


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).replace("│", " ").split())


def steps_of(lengths_s: list[float]) -> list[Step]:
    ends = [sum(lengths_s[: i + 1]) for i in range(len(lengths_s))]
    return [
        Step(round((end - length) * S), round(end * S), index=i, tokens_computed=10)
        for i, (end, length) in enumerate(zip(ends, lengths_s, strict=True))
    ]


def test_no_line_of_the_card_is_wider_than_the_terminal(tmp_path: Path) -> None:
    steps = [
        Step(i * S, (i + 1) * S, index=i, tokens_computed=12_345, loss=1.234e-5 * (i + 1))
        for i in range(200)
    ]
    lines = shown(run_of(tmp_path / "run", steps=steps, stream="output"))
    frame = lines[: next(n for n, line in enumerate(lines) if line.startswith("╰")) + 1]
    assert {len(line) for line in frame} == {WIDTH}
    (curve,) = (line for line in frame if "loss  " in line)
    assert "1.234e-05 to 0.002468" in curve
    assert sum(character in BARS for character in curve) == long_card._CELLS


def test_the_path_of_the_run_stands_whole_on_its_line_however_long(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 90) / "with space"
    lines = shown(run_of(path, steps=even_steps(3)))
    assert lines[-2] == f"erg explain '{path}'"


def test_the_path_of_the_run_is_given_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path / "runs" / "one", steps=even_steps(3))
    assert shown(run)[-2].startswith("erg explain runs/one  ")


def test_a_long_command_is_one_line_that_says_it_goes_on(tmp_path: Path) -> None:
    path = create_run(
        tmp_path / "run", run_header("test", ["/opt/bin/python", "-c", "print(1)\n" + "x" * 200])
    )
    add_writer(path, steps=even_steps(3))
    command, machine = shown(Run.open(path))[1:3]
    assert command.startswith("│ python -c 'print(1) xxx")
    assert command.endswith("… │")
    assert machine.startswith("│ no accelerator on ")


def test_steps_are_called_steps_and_a_log_says_that_its_first_line_starts_the_clock(
    tmp_path: Path,
) -> None:
    told = words(shown(run_of(tmp_path / "told", steps=even_steps(29))))
    assert "over 29 steps in 29 s" in told
    assert "starts the clock" not in told
    printed = words(shown(run_of(tmp_path / "log", steps=even_steps(29), stream="output")))
    assert "over 29 steps in 29 s the first printed line only starts the clock" in printed


def test_a_line_that_stands_for_several_steps_is_told_from_a_step(tmp_path: Path) -> None:
    several = run_of(tmp_path / "ten", steps=even_steps(4, steps=10), stream="output")
    assert "over 40 steps (4 printed lines) in 4 s" in words(shown(several))
    unknown = run_of(tmp_path / "unknown", steps=even_steps(4, steps=None), stream="output")
    assert "over 4 printed lines in 4 s" in words(shown(unknown))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "over 20 steps in 20 s throughput"),
        ({"warmup_steps": 1}, "over 19 steps in 19 s, after 1 step of warm-up throughput"),
        ({"warmup_steps": 3}, "over 17 steps in 17 s, after 3 steps of warm-up throughput"),
        ({"warmup_s": 5}, "over 15 steps in 15 s, after 5 steps of warm-up (warm-up: 5 s)"),
    ],
)
def test_the_warm_up_is_said_once_and_its_rule_where_that_is_news(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    assert said in words(shown(run_of(tmp_path / "run", steps=even_steps(20)), **settings))


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (Reading(123.0, "tokens/s", "measured", 120.0, 125.0), "120 to 125 tokens/s"),
        (Reading(0.9, "s", "measured", 0.8, 1.1), "800 ms to 1.1 s"),
        (Reading(1.5e9, "B/h", "derived", -2e6, 3e9), "-0.002 to 3 GB/h"),
        (Reading(-711.3e6, "B/h", "derived", -3.249e9, 1.827e9), "-3249 to 1827 MB/h"),
        (Reading(0.0, "B/h", "derived", -2e6, 3e9), "-0.002 to 3 GB/h"),
        (Reading(7300.0, "s", "measured", 7260.0, 7380.0), "2 h 01 min to 2 h 03 min"),
        (Reading(1.0, "s", "measured"), ""),
    ],
)
def test_an_interval_repeats_no_unit_and_loses_none(reading: Reading, said: str) -> None:
    assert interval_text(reading) == said
    summary = Summary("run", "finished", {"time.step_s": reading}, {}, ())
    lines = printed(_every_metric(summary)).splitlines()
    assert lines[1:] == ([f"    {said}"] if said else [])


def test_a_bare_number_has_no_unit() -> None:
    """A loss is in nothing: its unit is called 1, and is not shown."""
    loss = Reading(2.34, "1", "reported", 2.25, 2.5, note="the last")
    assert (value_text(loss), interval_text(loss)) == ("2.34", "2.25 to 2.5")
    summary = Summary("run", "finished", {"training.loss": loss}, {}, ())
    assert printed(_every_metric(summary)).splitlines() == [
        "training.loss  2.34  reported",
        "    2.25 to 2.5; the last",
    ]
    (line,) = documents.metric_lines(summary, ["training.loss"])
    assert line == "training.loss 2.34 [2.25, 2.5] (reported; the last)"


def test_notes_end_where_their_words_do(tmp_path: Path) -> None:
    summary = summarize(run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=5)))
    lines = printed(_every_metric(summary)).splitlines()
    assert len(lines) > 2 * len(summary.readings)
    assert [line for line in lines if line != line.rstrip()] == []
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(
    ("half", "said"),
    [
        (0.0, "< 0.1 %"),
        (0.00066, "< 0.1 %"),
        (0.00124, "± 0.1 %"),
        (0.0472, "± 4.7 %"),
        (0.0997, "± 10 %"),
        (0.876, "± 88 %"),
        (0.99999, "± 100 %"),
    ],
)
def test_half_an_interval_has_two_digits_at_most(half: float, said: str) -> None:
    assert reading_text.spread(Reading(5, "W", "measured", 5 - 5 * half, 5 + 5 * half)) == said


def test_an_interval_that_is_wider_than_its_value_says_just_that() -> None:
    assert reading_text.spread(Reading(1, "s", "measured", 0.5, 40)) == "> 100 %"


def test_nothing_is_cut_off_at_80_columns_however_long_a_figure(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=5))
    summary = summarize(run)
    long = {
        "throughput.tokens_per_s": Reading(12_345_678, "tokens/s", "measured", 12.337e6, 12.353e6),
        "tokens.per_step": Reading(16_777_216, "tokens/step", "reported", 16e6, 17e6),
        "time.step_p95_s": Reading(86_400, "s", "measured", 86_300, 86_500),
        "time.data_s": Reading(1.0, "s", "measured"),
        "time.run_s": Reading(9e4, "s", "measured"),
        "overhead.cpu_frac": Reading(0.034, "frac", "measured"),
    }
    long_summary = dataclasses.replace(summary, readings={**summary.readings, **long})
    lines = printed_card(run, long_summary).splitlines()
    assert not any("…" in line for line in lines)
    assert {len(line) for line in lines} == {WIDTH}
    assert any("12,345,678 tokens/s  < 0.1 %  measured" in line for line in lines)
    assert any("16,777,216 tokens/step  ± 3.0 %  reported" in line for line in lines)
    # Titles go on in the next line of their column.
    titles = " ".join(" ".join(line[14:34] for line in lines).split())
    for key in ("time.step_p95_s", "time.data_s", "overhead.cpu_frac"):
        assert catalogue()[key].title in titles


@pytest.mark.parametrize(("lasted_s", "is_shown"), [(29.0, False), (31.0, True)])
def test_our_own_cost_is_on_the_card_of_a_run_that_is_not_just_start_up(
    tmp_path: Path, lasted_s: float, is_shown: bool
) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(5))
    summary = summarize(run)
    readings = {
        **summary.readings,
        "time.run_s": Reading(lasted_s, "s", "measured"),
        "overhead.cpu_frac": Reading(1.3, "frac", "measured"),
    }
    card = printed_card(run, dataclasses.replace(summary, readings=readings))
    assert ("130 %" in card) == is_shown


def test_phases_say_that_they_are_of_the_whole_run(tmp_path: Path) -> None:
    steps = [*even_steps(5), Step(5 * S, 6 * S, phase="eval"), Step(6 * S, 7 * S, phase="data")]
    card = words(shown(run_of(tmp_path / "run", steps=steps)))
    assert "evaluation, whole run 1 s" in card
    assert "waiting for data, whole run 1 s" in card


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("finished", "finished"),
        ("cut off", "cut off"),
        ("failed (exit code 2)", "failed (2)"),
        ("failed (ValueError: a (long) story\nof two lines)", "failed (ValueError)"),
        ("failed (KeyboardInterrupt)", "failed (KeyboardInterrupt)"),
        ("killed by SIGKILL", "SIGKILL"),
        ("killed by signal 40", "signal 40"),
    ],
)
def test_a_status_is_brief_in_a_list(status: str, said: str) -> None:
    assert reading_text.short_status(status) == said


def test_a_noisy_run_is_called_so_in_one_line_and_a_quiet_one_is_not(tmp_path: Path) -> None:
    noisy = shown(run_of(tmp_path / "noisy", steps=steps_of([1.0, 1.0, 1.0, 4.0] * 10)))
    line, stalls = (line for line in noisy if "! " in line)
    assert "! noisy: step time's 95th percentile is 4.0 times its median" in line
    assert "! 10 of 40 steps took twice the median or more" in stalls
    drifting = shown(run_of(tmp_path / "drifting", steps=steps_of([1.0] * 20 + [1.9] * 20)))
    fast, line = (line for line in drifting if "! " in line)
    assert "! the first 20 steps were 1.9 times as fast as those after, and counted" in fast
    assert "! noisy: steps/s ± 1" in line
    assert "! " not in words(shown(run_of(tmp_path / "quiet", steps=even_steps(40))))


@pytest.mark.parametrize(("steps", "is_said"), [(9, True), (10, False)])
def test_figures_of_few_steps_say_why_they_have_no_interval(
    tmp_path: Path, steps: int, is_said: bool
) -> None:
    card = words(shown(run_of(tmp_path / "run", steps=even_steps(steps))))
    assert ("fewer than ten steps or printed lines were timed" in card) == is_said
    assert ("< 0.1 %" in card) != is_said


def test_a_program_that_was_never_read_has_no_memory_for_that_reason(tmp_path: Path) -> None:
    program = Device("process:h:1", "process", "true", "process")
    run = run_of(
        tmp_path / "run",
        steps=even_steps(5, seconds=0.1),
        devices=[program],
        samples=[Sample(S // 10, "process:h:2", cpu_s=0.1)],
    )
    assert "no host memory, peak: true was not read once in a run of " in words(shown(run))


def test_a_column_of_a_list_leaves_the_unit_to_its_title() -> None:
    assert reading_text.column_text(Reading(36_981.0, "tokens/s", "measured")) == "36,981"
    assert reading_text.column_text(Reading(0.0031, "J/token", "measured")) == "0.0031"
    assert reading_text.column_text(Reading(0.111, "s", "measured")) == "111 ms"
    assert math.isnan(float(reading_text.column_text(Reading(math.nan, "tokens/s", "measured"))))


def test_the_card_of_a_log_offers_no_sensors_and_shows_every_loss(tmp_path: Path) -> None:
    timed = [f"2026-01-01 10:0{n}:00 step={n} loss={9 - n} tokens=64" for n in range(5)]
    untimed = [str({"loss": 9 - n, "learning_rate": 1e-4, "epoch": n / 10}) for n in range(1, 6)]
    for name, lines, ends in (("timed", timed, "9 to 5"), ("untimed", untimed, "8 to 4")):
        log = tmp_path / f"{name}.log"
        log.write_text("\n".join(lines), encoding="utf-8")
        (made,) = import_log(ImportRequest(log, tmp_path / name)).runs
        said = words(shown(Run.open(made.path)))
        assert "from a log, which holds no readings of energy, devices or host memory" in said
        assert "NVIDIA" not in said
        assert "µs" not in said
        assert ends in said
        assert ("a log without times has no duration" in said) == (name == "untimed")


def test_the_first_printed_loss_is_drawn_where_steps_tell_none(tmp_path: Path) -> None:
    """As minGPT prints: the first line begins the first printed span and is in none."""
    printed = [
        dataclasses.replace(one, loss=float(7 - number)) for number, one in enumerate(even_steps(7))
    ]
    first = Reported(printed[0].start_ns, "loss", 8.0, "")
    path = create_run(tmp_path / "run", run_header("test", ["train.py"]))
    add_writer(path, steps=even_steps(70))
    add_writer(path, steps=printed, reported=[first], stream="output")
    assert "│ loss, as printed  █▇▆▅▄▃▂▁ 8 to 1 " in printed_card(Run.open(path))


def test_the_loss_of_several_ranks_is_drawn_once(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", run_header("test", ["train.py"]))
    for rank in (1, 0):
        steps = [
            dataclasses.replace(one, loss=float(8 - number + rank), rank=rank)
            for number, one in enumerate(even_steps(8, tokens_computed=10))
        ]
        add_writer(path, steps=steps)
    assert "│ loss  █▇▆▅▄▃▂▁ 8 to 1 " in printed_card(Run.open(path))

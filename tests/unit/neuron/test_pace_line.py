"""The pace of a log row by row, and the interval of the figure that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.importers.log import ParsedLog, read_log
from ergmeter.neuron.training_log import pace_line, throughput
from ergmeter.records import Reading
from tests.unit.neuron.test_agreement import megatron
from tests.unit.neuron.test_mfu import job


def log_of(tmp_path: Path, *lines: str) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines) + "\n")
    return read_log(path)


def test_samples_over_time_are_drawn_by_step(tmp_path: Path) -> None:
    # 128 sequences a step of 5 s, a line every 10 steps; the YAML's 64 do not count.
    found = pace_line(
        log_of(tmp_path, *(megatron(10 * step) for step in range(1, 9))), job(4096), points=100
    )
    assert found.line.t_s.tolist() == [20, 30, 40, 50, 60, 70, 80]
    assert found.line.values.tolist() == pytest.approx([128 / 5] * 7)
    assert (found.over, found.counted_from, found.how) == ("step", 20, "sequences over time")


def test_printed_rates_are_drawn_with_those_that_are_not_counted(tmp_path: Path) -> None:
    rates = (0.1, 1.0, 4.0, 4.0, 1.0)
    log = log_of(tmp_path, *(f"loss: 2.3 throughput: {rate}" for rate in rates))
    found = pace_line(log, job(4096), points=100)
    assert found.line.values.tolist() == list(rates)
    assert (found.over, found.counted_from, found.how) == ("row", 1, "as printed")


def test_the_batch_over_a_step_s_time_is_the_last_resort(tmp_path: Path) -> None:
    log = log_of(tmp_path, *(f"step_time: {time_s}" for time_s in (600, 32, 64, 32, 32)))
    found = pace_line(log, job(4096), points=100)
    assert found.line.values[-4:].tolist() == [2.0, 1.0, 2.0, 2.0]


def test_a_log_of_losses_alone_has_no_pace(tmp_path: Path) -> None:
    log = log_of(tmp_path, *(f"step: {step} loss: 2.3" for step in range(1, 6)))
    with pytest.raises(NotMeasurable, match=r"train\.log has no pace of single steps"):
        pace_line(log, job(4096), points=100)


def test_a_long_log_is_bounded_and_its_slowest_row_stays(tmp_path: Path) -> None:
    rates = (0.01 if row == 3333 else 4.0 + row % 7 / 10 for row in range(6000))
    log = log_of(tmp_path, *(f"loss: 2.3 throughput: {rate}" for rate in rates))
    found = pace_line(log, job(4096), points=200)
    assert len(found.line.t_s) <= 200
    assert found.line.lowest == (0.01, 3333.0)


def test_a_pace_by_the_batch_has_the_interval_of_the_step_time_turned_round(
    tmp_path: Path,
) -> None:
    # 20 steps of 32 s: 640 s by a clock of whole seconds, so known to one in 640.
    log = log_of(tmp_path, *(f"step_time: {time_s}" for time_s in (600, *[32] * 20)))
    found = throughput(None, log, job(4096))
    assert found.seq_per_s == pytest.approx(2.0)
    assert isinstance(found.result, Reading)
    assert found.result.low == pytest.approx(2 * (1 - 1 / 640))
    assert found.result.high == pytest.approx(2 / (1 - 1 / 640))


def test_a_pace_that_was_given_or_printed_has_no_interval(tmp_path: Path) -> None:
    log = log_of(tmp_path, *(f"loss: 2.3 throughput: {rate}" for rate in (0.1, 1.0, 4.0)))
    for given in (2.1, None):
        found = throughput(given, log, job(4096)).result
        assert isinstance(found, Reading)
        assert (found.low, found.high) == (None, None)

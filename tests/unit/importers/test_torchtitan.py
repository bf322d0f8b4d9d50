"""torchtitan's step lines."""

from __future__ import annotations

import pytest

from ergmeter.importers.torchtitan import TorchTitanImporter
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.programs import TITAN_STARTS, from_file, live, titan

TITAN = TorchTitanImporter()


def test_a_line_gives_its_figures_and_the_rates_are_one_devices() -> None:
    records = from_file(TITAN, titan(200, 50.322), titan(210, 64.970))
    (step,) = steps(records)
    assert (step.index, step.steps, step.loss, step.grad_norm) == (210, 10, 6.1384, 1.25)
    assert step.window.duration_s == pytest.approx(14.648)
    assert [(r.name, r.value, r.unit) for r in reported(records)[:4]] == [
        ("memory", 49.66 * 2**30, "B"),
        ("tps", 5856, "tokens/s/device"),
        ("tflops", 339.16, "TFLOP/s/device"),
        ("mfu", pytest.approx(0.3429), "frac"),
    ]
    assert step.tokens_computed is None


def test_the_batch_named_at_the_start_gives_tokens_and_samples() -> None:
    records = from_file(TITAN, TITAN_STARTS, *[titan(n, n) for n in (1, 10, 20)])
    assert [(s.steps, s.samples, s.tokens_computed) for s in steps(records)] == [
        (9, 9 * 64, 9 * 64 * 8192),
        (10, 640, 640 * 8192),
    ]
    assert "64 times sequence length 8192" in marks(records, "assumed")[0]


def test_older_lines_say_wps() -> None:
    old = (
        "2024-07-01 10:00:{0:02d},000 - root - INFO - step: {0}  loss: 10.1234  memory: "
        "47.25GiB(59.71%)  wps: 5,123  mfu: 12.50%"
    )
    records = from_file(TITAN, old.format(1), old.format(2))
    assert [(s.index, s.loss) for s in steps(records)] == [(2, 10.1234)]
    assert {(r.name, r.value, r.unit) for r in reported(records)} >= {
        ("wps", 5123, "tokens/s/device")
    }


def test_ranks_that_do_not_name_themselves_are_one_training() -> None:
    """As with every rank's output in one file; now and then one of them is late."""
    plain = [(n, titan(n, n).partition(":")[2]) for n in range(4, 12)]
    lines = [text for _, text in plain for _ in range(7)]
    lines[13], lines[14] = lines[14], lines[13]  # the last line of step 5 after the first of 6
    records = from_file(TITAN, *lines)
    assert [s.index for s in steps(records)] == list(range(5, 12))
    assert marks(records, "several_programs") == marks(records, "restarted") == []


def test_a_validation_line_is_no_step_and_has_the_time_before_it() -> None:
    text = titan(9, 10).replace("step: ", "validate step: ")
    records = from_file(TITAN, titan(9, 1), text, titan(10, 12))
    assert [(s.index, s.window.duration_s) for s in steps(records)] == [(10, 2)]
    assert [s.window.duration_s for s in steps(records, "eval")] == [9]


def test_live_lines_are_timed_by_their_arrival() -> None:
    records = live(TITAN, *[(n / 8, titan(n, n)) for n in range(1, 5)])
    assert {s.window.duration_s for s in steps(records)} == {0.125}


def test_a_line_of_torchtitans_is_left_to_its_importer() -> None:
    assert TITAN.recognises([titan(1, 1)])
    assert TITAN.recognises([TITAN_STARTS])
    assert not TITAN.recognises(["step: 3 loss: 2.5 memory: 5 tps: 3"])


def test_of_several_ranks_one_is_read_and_its_tokens_are_those_of_all() -> None:
    lines = [titan(n, n, rank=rank) for n in (1, 10, 20) for rank in range(4)]
    records = from_file(TITAN, TITAN_STARTS, *lines)
    assert [s.tokens_computed for s in steps(records)] == [9 * 64 * 8192, 10 * 64 * 8192]
    said = [one for one in marks(records, "assumed") if "ranks" in one]
    assert said == ["of the step lines of several ranks, only those of rank 0 are read"]

"""The blocks of EfficientLLM's metrics."""

from __future__ import annotations

import pytest

from ergmeter.importers.megatron import EfficientLlmImporter
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.programs import S, efficientllm, from_file, live, megatron

IMPORTER = EfficientLlmImporter()
FIGURES = [
    ("AMU (GB)", 45.23 * 2**30, "B"),
    ("PCU (Ratio)", 0.987, "frac"),
    ("AL (Seconds)", 0.1234, "s"),
    ("TT (Tokens/Param/Sec)", 1.23e-6, "tokens/s/param"),
    ("ST (Samples/Param/Sec)", 4.56e-9, "samples/s/param"),
    ("AEC (Watts)", 342.5, "W"),
]


def test_the_block_of_the_document_gives_its_figures_exactly() -> None:
    records = from_file(IMPORTER, *efficientllm(100))
    assert [(r.name, r.value, r.unit) for r in reported(records)] == FIGURES
    (step,) = steps(records)
    assert (step.index, step.loss) == (100, 3.245678)
    assert step.window.duration_s == pytest.approx(0.1234)


def test_the_mean_latency_stands_for_the_iterations_of_a_block_and_that_is_said() -> None:
    records = from_file(IMPORTER, *efficientllm(10), *efficientllm(20), *efficientllm(30))
    assert [s.steps for s in steps(records)] == [1, 10, 10]
    assert [s.window.duration_s for s in steps(records)] == pytest.approx([0.1234, 1.234, 1.234])
    assert "AL is the mean time" in marks(records, "assumed")[0]


def test_beside_megatrons_lines_a_block_is_no_second_step() -> None:
    lines = []
    for n in (10, 20, 30):
        lines += [*efficientllm(n), megatron(n, 6 * n)]  # a block before the line it belongs to
    records = from_file(IMPORTER, *lines)
    assert [(s.index, s.steps, s.samples, s.window.duration_s) for s in steps(records)] == [
        (20, 10, 1280, 60),
        (30, 10, 1280, 60),
    ]
    assert [(r.name, r.value, r.unit) for r in reported(records) if "AEC" in r.name] == (
        [FIGURES[-1]] * 3
    )


def test_a_block_is_read_through_a_logger_and_among_other_lines() -> None:
    prefix = "[INFO|2026-11-15 10:00:{0:02d}] efficientllm_callback:88 >> "
    lines = []
    for n in (1, 2, 3):
        for line in efficientllm(n):
            lines += [prefix.format(n) + line.replace("Iteration", "Step"), "some other line"]
    found = steps(from_file(IMPORTER, *lines))
    assert [(s.index, s.loss, s.window.duration_s) for s in found] == [
        (1, 3.245678, pytest.approx(0.1234)),
        (2, 3.245678, 1),
        (3, 3.245678, 1),
    ]


def test_live_a_block_has_the_time_of_its_first_line() -> None:
    timed = [(n + k / 100, line) for n in (1, 2, 4) for k, line in enumerate(efficientllm(n))]
    found = steps(live(IMPORTER, *timed))
    assert [s.end_ns for s in found] == [1 * S, 2 * S, 4 * S]


def test_it_is_known_by_its_first_message() -> None:
    text = "[EfficientLLM] Metrics collection initialized for model with 7615616512 parameters"
    assert IMPORTER.recognises([text])
    assert not IMPORTER.recognises([megatron(1, 1), "AMU (GB): 3"])


def test_a_block_that_ergmeter_printed_has_energy_and_decimal_gigabytes() -> None:
    lines = [*efficientllm(100), "  Energy (J): 5120.5", "done", *efficientllm(110)]
    told = [(r.name, r.value) for r in reported(from_file(IMPORTER, *lines))]
    amu = [value for name, value in told if name == "AMU (GB)"]
    assert amu == [pytest.approx(45.23e9), pytest.approx(45.23 * 2**30)]
    assert [value for name, value in told if name == "Energy (J)"] == [5120.5]

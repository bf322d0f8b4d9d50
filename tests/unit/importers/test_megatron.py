"""Iteration lines of Megatron-LM and its relatives."""

from __future__ import annotations

import math

import pytest

from ergmeter.importers.megatron import MegatronImporter
from ergmeter.records import Reported
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.programs import from_file, live, megatron

MEGATRON = MegatronImporter()
SEQ_LENGTH = "  seq_length ...................................... 4096"


def test_a_line_gives_its_figures_exactly() -> None:
    records = from_file(MEGATRON, megatron(43, 10), megatron(44, 16))
    (step,) = steps(records)
    assert (step.index, step.steps, step.samples, step.tokens_computed) == (44, 1, 128, None)
    assert (step.loss, step.learning_rate, step.grad_norm) == (1.825991, 8.6e-6, 1.426)
    assert step.window.duration_s == 6
    assert [(r.name, r.value, r.unit) for r in reported(records)[:2]] == [
        ("elapsed time per iteration (ms)", 5444.9, "ms"),
        ("throughput per GPU (TFLOP/s/GPU)", 239.8, "TFLOP/s/device"),
    ]


def test_the_length_of_a_sample_among_the_arguments_gives_tokens() -> None:
    records = from_file(MEGATRON, SEQ_LENGTH, megatron(10, 10), megatron(20, 60))
    (step,) = steps(records)
    assert (step.steps, step.samples, step.tokens_computed) == (10, 1280, 1280 * 4096)
    assert "seq_length 4096" in marks(records, "assumed")[0]


def test_the_first_iteration_lasts_as_long_as_it_says() -> None:
    records = from_file(MEGATRON, megatron(1, 100, ms=60_000.0), megatron(2, 106))
    assert [(s.index, s.samples, s.window.duration_s) for s in steps(records)] == [
        (1, 128, 60),
        (2, 128, 6),
    ]


def test_without_a_stamp_the_printed_times_count() -> None:
    lines = [megatron(n, 0, ms=250.0).partition("] ")[2] for n in (10, 20, 30)]
    found = steps(from_file(MEGATRON, *lines))
    assert [(s.index, s.steps, s.samples, s.window.duration_s) for s in found] == [
        (20, 10, 1280, 2.5),
        (30, 10, 1280, 2.5),
    ]


@pytest.mark.parametrize(("text", "loss"), [("NAN", math.nan), ("-1.5E-03", -1.5e-3)])
def test_a_loss_is_read_whole(text: str, loss: float) -> None:
    (step,) = steps(from_file(MEGATRON, megatron(1, 1, ms=1.0), megatron(2, 2, loss=text)))[-1:]
    assert step.loss == pytest.approx(loss, nan_ok=True)


DEEPSPEED = (
    "[default7]: iteration {0:8d}/ 95367 | consumed samples: {1:12d} | consumed tokens: {2:14d} | "
    "elapsed time per iteration (ms): 1234.5 | learning rate: 1.000E-04 | global batch size: 256 | "
    "lm loss: 2.3E+00 | loss scale: 1.0 | grad norm: 0.231 | actual seqlen: 2048 | number of "
    "skipped iterations: 0 | number of nan iterations: 0 | samples per second: 207.371 | tokens "
    "per gpu per second (tgs): 5302.1 | TFLOPs: 123.45 |"
)
NEOX = (
    " samples/sec: 5.400 | iteration {0:8d}/  320000 | elapsed time per iteration (ms): 2000.0 | "
    "learning rate: 6.000E-05 | approx flops per GPU: 50.5TFLOPS | lm_loss: 5.5E+00 | "
)
PIPE = "steps: {0} loss: 2.3110 iter time (s): 0.512 samples/sec: 500.0"


def test_relatives_of_megatron_have_their_own_fields() -> None:
    lines = [DEEPSPEED.format(n, n * 256, n * 256 * 2048) for n in (10, 20)]
    records = from_file(MEGATRON, *lines)
    (step,) = steps(records)
    assert (step.samples, step.tokens_computed, step.window.duration_s) == (2560, 5242880, 12.345)
    assert [(r.value, r.unit) for r in reported(records)[:4]] == [
        (1234.5, "ms"), (207.371, "samples/s"), (5302.1, "tokens/s/device"),
        (123.45, "TFLOP/s/device"),
    ]  # fmt: skip
    (step,) = steps(from_file(MEGATRON, NEOX.format(3), NEOX.format(4)))[1:]
    assert (step.index, step.loss, step.window.duration_s) == (4, 5.5, 2)
    records = from_file(MEGATRON, PIPE.format(10), PIPE.format(20))
    assert [(s.index, s.steps, s.loss, s.window.duration_s) for s in steps(records)][1:] == [
        (20, 10, 2.311, 5.12)
    ]


def test_memory_is_reported_in_bytes_by_megatrons_mib() -> None:
    text = (
        "[Rank 0] (after 10 iterations) memory (MB) | allocated: 18.5 | max allocated: 30.25 | "
        "reserved: 31.0 | max reserved: 32.0"
    )
    records = [r for r in from_file(MEGATRON, text) if isinstance(r, Reported)]
    assert [(r.name, r.value / 2**20, r.unit) for r in records] == [
        ("memory allocated", 18.5, "B"), ("memory max allocated", 30.25, "B"),
        ("memory reserved", 31, "B"), ("memory max reserved", 32, "B"),
    ]  # fmt: skip


def test_restarts_from_checkpoints_are_runs_of_one_program() -> None:
    """The third goes on exactly where the first one stopped: two programs in turn do that too."""
    runs = [range(10, 101, 10), range(60, 121, 10), range(110, 151, 10)]
    lines, t = [], 0
    for run in runs:
        t += 500
        for n in run:
            t += 50
            lines.append(megatron(n, t))
    records = from_file(MEGATRON, *lines)
    assert marks(records, "several_programs") == []
    assert len(marks(records, "restarted")) == 2
    assert [s.index for s in steps(records)] == [n for run in runs for n in run[1:]]
    assert {s.window.duration_s for s in steps(records)} == {50}


def test_of_ranks_that_all_print_one_counts() -> None:
    lines = [
        f"[rank{rank}]:{megatron(n, 6 * n)}"
        for n in range(1, 6)
        for rank in ((3, 0), (0, 3))[n % 2]
    ]
    records = from_file(MEGATRON, *lines)
    assert [(s.index, s.samples) for s in steps(records)] == [(n, 128) for n in range(1, 6)]


def test_live_lines_are_timed_by_their_arrival() -> None:
    records = live(MEGATRON, *[(n / 4, megatron(n, 6 * n)) for n in range(10, 15)])
    assert {s.window.duration_s for s in steps(records)} == {0.25}


def test_a_line_of_megatrons_is_left_to_its_importer() -> None:
    for text in (megatron(1, 1), PIPE.format(3), SEQ_LENGTH, NEOX.format(3)):
        assert MEGATRON.recognises([text]), text
    for text in (" validation loss at iteration 100 | lm loss value: 2.1E+00 |", "x | y | z"):
        assert not MEGATRON.recognises([text])

"""A log that speaks of another training than the YAML or the command line: each case is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ergmeter.importers.log import ParsedLog, read_log
from ergmeter.neuron.training_job import NeuronJob
from ergmeter.neuron.training_log import Throughput, about_log, is_printed, reconcile, throughput
from ergmeter.records import Reading
from tests.unit.neuron.test_mfu import job

BARS = Path(__file__).parents[2] / "data" / "logs" / "nxdt_bars.log"


def megatron(step: int, *, seconds: float = 5.0) -> str:
    minutes, over = divmod(round(step * seconds), 60)
    return (
        f" [2026-01-01 10:{minutes:02d}:{over:02d}] iteration {step:8d}/     500 |"
        f" consumed samples: {128 * step:12d} | elapsed time per iteration (ms): {1000 * seconds} |"
        " learning rate: 1.5E-04 | global batch size:   128 | lm loss: 6.9E+00 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def log_of(tmp_path: Path, lines: list[str]) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines) + "\n")
    return read_log(path)


def come_to(
    log: ParsedLog, what: NeuronJob, given: float | None = None
) -> tuple[NeuronJob, Throughput, list[str]]:
    """What is taken of a job and a log, its throughput, and what is said of it."""
    taken, findings = reconcile(what, log)
    pace = throughput(given, log, taken)
    texts = [*findings, *about_log(log, taken, pace)]
    return taken, pace, texts


def said(log: ParsedLog, *, batch: int, seq_len: int, given: float | None = None) -> list[str]:
    return come_to(log, replace(job(seq_len), batch_size=batch), given)[2]


@pytest.fixture
def of_2048(tmp_path: Path) -> ParsedLog:
    """128 sequences of 2048 in 5 s a step: 25.6 a second."""
    head = ["  seq_length ......... 2048", "  global_batch_size .......... 128"]
    return log_of(tmp_path, head + [megatron(10 * step) for step in range(1, 9)])


def test_another_length_and_another_batch_are_said(of_2048: ParsedLog) -> None:
    length, batch = said(of_2048, batch=64, seq_len=4096)
    assert length.startswith("the log says 2,048 tokens a sequence, the YAML 4,096:")
    assert batch.startswith("the log says 128 sequences a step, the YAML 64:")
    assert said(of_2048, batch=128, seq_len=2048) == []


def test_what_was_measured_beats_what_was_configured(of_2048: ParsedLog) -> None:
    taken, pace, texts = come_to(of_2048, replace(job(4096), batch_size=64, at_once=32))
    assert (taken.seq_len, taken.seq_len_from) == (2048, "the log")
    assert (taken.batch_size, taken.batch_from) == (128, "the log")
    assert taken.micro_batches == 4  # 128 sequences, 32 at once
    assert pace.seq_per_s == pytest.approx(25.6)
    assert all("the log's is taken, as what was measured" in text for text in texts)


def test_an_option_beats_the_log(of_2048: ParsedLog) -> None:
    given = replace(job(4096), batch_size=64, batch_from="--batch-size", seq_len_from="--seq-len")
    taken, pace, texts = come_to(of_2048, given)
    assert (taken.seq_len, taken.batch_size) == (4096, 64)
    assert pace.seq_per_s == pytest.approx(64 / 5)  # the log's 5 s a step are not disputed
    assert "with 64 sequences a step (--batch-size)" in pace.source
    assert len(texts) == 2
    assert all("what was given is taken" in text for text in texts)


def test_lengths_that_vary_are_no_sequence_length(tmp_path: Path) -> None:
    lines = [
        f"2026-01-01 10:00:{3 * step:02d} step: {step}, loss: 3.9, samples: 4,"
        f" tokens: {4 * (1000 + 300 * (step % 2))}"
        for step in range(1, 20)
    ]
    taken, _, texts = come_to(log_of(tmp_path, lines), replace(job(4096), batch_size=4))
    assert (taken.seq_len, taken.seq_len_from) == (4096, "the YAML")
    assert "the YAML's is taken, as the log's vary from line to line" in texts[0]


def test_a_given_throughput_is_held_against_the_log(of_2048: ParsedLog) -> None:
    assert said(of_2048, batch=128, seq_len=2048, given=12.8) == [
        "--throughput is 12.8 sequences/s and is taken; the log comes to 25.6"
    ]
    assert said(of_2048, batch=128, seq_len=2048, given=25.0) == []


def test_tokens_of_one_rank_are_recognised(tmp_path: Path) -> None:
    lines = [
        f"2026-01-01 10:00:{3 * step:02d} step: {step}, loss: 3.9, tokens: 8192"
        for step in range(1, 20)
    ]
    taken, pace, (text,) = come_to(log_of(tmp_path, lines), job(4096))
    assert (taken.batch_size, taken.batch_from) == (2, "the log")
    assert pace.seq_per_s == pytest.approx(2 / 3)
    assert "8,192 tokens a step, while 64 sequences of 4,096 (the YAML, the YAML) make" in text
    assert "one of 32 ranks?" in text
    assert said(log_of(tmp_path, lines), batch=2, seq_len=4096) == []


def test_a_printed_throughput_is_held_against_the_batch_and_the_step_time(tmp_path: Path) -> None:
    log = log_of(tmp_path, ["step_time: 1.234", "throughput: 150.5", "seq/s: 150.5", "loss: 2.345"])
    (text,) = said(log, batch=64, seq_len=4096)
    assert "prints 150.5 sequences/s, while 64 sequences (the YAML) in its 1.234 s" in text
    assert "make 51.86:" in text  # 64 / 1.234
    assert said(log, batch=186, seq_len=4096) == []  # 150.7 a second


def test_rates_of_tokens_and_sequences_give_a_length(tmp_path: Path) -> None:
    lines = ["throughput: 2.1", "tokens/sec: 8601.6", "loss: 2.5"] * 12
    (text,) = said(log_of(tmp_path, lines), batch=64, seq_len=2048)
    assert text.startswith("the log says 4,096 tokens a sequence, the YAML 2,048")


def test_a_clock_that_contradicts_the_printed_throughput_is_said(tmp_path: Path) -> None:
    lines = [
        f"Epoch 0:  {step}%|▍    | {step}/99 [{step // 2:02d}:{step % 2 * 30:02d}<58:44, v_num=8,"
        f" reduced_train_loss=7.0, global_step={step}.0, consumed_samples={64 * step}.0,"
        " throughput=32.0]"
        for step in range(1, 21)
    ]
    (text,) = said(log_of(tmp_path, lines), batch=64, seq_len=4096)
    assert text.startswith("the log prints 32 sequences/s on average")
    assert "come to 2.133" in text  # 64 in 30 s


def test_an_option_beats_a_printed_throughput_and_the_finding_says_who_won(tmp_path: Path) -> None:
    lines = ["step_time: 30.0", "throughput: 2.133", "loss: 2.345"] * 12  # 64 sequences in 30 s
    log = log_of(tmp_path, lines)
    configured = replace(job(4096), batch_size=32)
    _, pace, (text,) = come_to(log, configured)
    assert pace.seq_per_s == pytest.approx(2.133)
    assert text.endswith("make 1.067: what it prints is taken; --batch-size or --throughput"
                         " takes another")  # fmt: skip
    _, pace, (text,) = come_to(log, replace(configured, batch_from="--batch-size"))
    assert pace.seq_per_s == pytest.approx(32 / 30)
    assert text.endswith("make 1.067, which is taken, as --batch-size was given; --throughput"
                         " takes another")  # fmt: skip
    _, pace, texts = come_to(log, replace(configured, batch_from="--batch-size"), 2.1)
    assert pace.seq_per_s == 2.1
    assert texts == ["--throughput is 2.1 sequences/s and is taken; the log comes to 1.067"]
    agreeing = replace(job(4096), batch_size=64, batch_from="--batch-size")
    _, pace, texts = come_to(log, agreeing)
    assert pace.seq_per_s == pytest.approx(2.133)
    assert texts == []


def test_a_finding_names_the_throughput_that_was_taken() -> None:
    log = read_log(BARS)  # counts 32 sequences a step
    given = replace(job(4096), batch_size=64, batch_from="--batch-size")
    _, pace, texts = come_to(log, given)
    assert pace.seq_per_s == pytest.approx(3.143, abs=5e-4)
    taken = [text for text in texts if "come to 1.571" in text]
    assert all("which is taken" not in text for text in taken)
    assert len(taken) == 1
    assert "3.143 is taken, as --batch-size was given" in taken[0]


def test_whether_a_throughput_was_printed_is_known(tmp_path: Path, of_2048: ParsedLog) -> None:
    of_lines = log_of(tmp_path, ["throughput: 2.1", "loss: 2.5"] * 12)
    for log, is_read in ((of_lines, True), (of_2048, False)):
        taken, pace, _ = come_to(log, job(4096))
        assert is_printed(log, taken, pace) is is_read
        assert is_printed(log, taken, Throughput(Reading(2.1, "samples/s", "reported"))) is True


def test_tokens_of_a_rank_that_names_itself_are_no_batch(tmp_path: Path) -> None:
    lines = [
        f"[rank{rank}]: 2026-01-01 10:00:{3 * step:02d} step: {step} loss: 3.9 tokens: 8192"
        for step in range(1, 20)
        for rank in range(4)
    ]
    log = log_of(tmp_path, lines)
    taken, pace, texts = come_to(log, job(4096))
    assert (taken.batch_size, taken.batch_from) == (64, "the YAML")
    assert pace.seq_per_s == pytest.approx(64 / 3)
    assert texts == []
    assert any("only those of rank 0 are read: tokens are of one rank" in n for n in log.notes)

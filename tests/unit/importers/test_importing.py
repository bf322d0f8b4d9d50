"""A log becomes a run, or several: what the run then says of it."""

from __future__ import annotations

import gzip
import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ergmeter.cli.main import main
from ergmeter.errors import FormatError, UsageError
from ergmeter.importers.importing import ImportRequest, import_log
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading, Summary
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.unit.importers.captured import LOGS
from tests.unit.importers.programs import TITAN_STARTS, megatron, nxdt, titan
from tests.unit.importers.trained import printed

SEQ_LENGTH = "  seq_length ...................................... 4096"


def log_of(tmp_path: Path, *texts: str) -> Path:
    path = tmp_path / "train.log"
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def summary_of(run: Path) -> Summary:
    opened = Run.open(run)
    assert opened.damage == []
    return summarize(opened)


def reading(summary: Summary, key: str) -> Reading:
    found = summary.readings[key]
    assert isinstance(found, Reading), found
    return found


def value(summary: Summary, key: str) -> float:
    return reading(summary, key).value


def test_the_run_of_a_log_has_its_rates_by_time_and_its_losses(tmp_path: Path) -> None:
    log = log_of(tmp_path, SEQ_LENGTH, *[megatron(n, 50 * n / 10) for n in range(10, 130, 10)])
    imported = import_log(ImportRequest(log, tmp_path / "run"))
    (run,) = imported.runs
    assert (imported.choice.importer.name, run.steps, run.first_step, run.last_step) == (
        "megatron",
        11,
        20,
        120,
    )
    summary = summary_of(run.path)
    # 11 lines of 10 iterations in 50 s each, of 128 samples of 4096 tokens.
    assert value(summary, "throughput.samples_per_s") == pytest.approx(25.6)
    assert value(summary, "throughput.tokens_per_s") == pytest.approx(25.6 * 4096)
    assert value(summary, "time.step_s") == pytest.approx(5)
    assert value(summary, "time.run_s") == pytest.approx(550, abs=1)
    for key in ("throughput.samples_per_s", "throughput.tokens_per_s", "time.step_s"):
        assert reading(summary, key).basis == "derived"
    assert summary.status == "imported"
    steps = Run.open(run.path).steps("output")
    assert set(steps["loss"]) == {1.825991}
    energies = [found for key, found in summary.readings.items() if key.startswith("energy.")]
    assert energies
    assert all(isinstance(found, Missing) for found in energies)


def test_a_trainers_output_without_times_is_timed_by_its_bar(tmp_path: Path) -> None:
    lines = []
    for n in range(1, 13):
        bar = f" 10%|█         | {n}/12 [01:{2 * n:02d}<00:00, 9.0it/s]"
        lines += [bar, printed(n / 4), bar]
    (run,) = import_log(ImportRequest(log_of(tmp_path, *lines), tmp_path / "run")).runs
    assert (run.steps, run.first_step, run.last_step) == (11, 2, 12)
    assert value(summary_of(run.path), "time.step_s") == pytest.approx(2)
    assert any("its progress bar's own, in whole seconds" in note for note in run.notes)


def test_the_wall_clock_of_the_run_is_the_logs(tmp_path: Path) -> None:
    log = log_of(tmp_path, *[titan(n, 3600 + n) for n in range(1, 5)])
    (run,) = import_log(ImportRequest(log, tmp_path / "run")).runs
    times = Run.open(run.path).to_arrow()["time"].to_pylist()
    assert times[0] == datetime(2025, 6, 16, 1, 0, 1, tzinfo=timezone.utc)


def test_a_log_of_two_runs_makes_two_and_the_time_between_is_in_none(tmp_path: Path) -> None:
    lines = [TITAN_STARTS, *(titan(n, n) for n in range(10, 60, 10))]
    lines += [titan(n, 5000 + n) for n in range(30, 80, 10)]
    imported = import_log(ImportRequest(log_of(tmp_path, *lines), tmp_path / "run"))
    assert [run.path.name for run in imported.runs] == ["run", "run-2"]
    assert [(run.first_step, run.last_step) for run in imported.runs] == [(20, 50), (40, 70)]
    for run in imported.runs:
        assert value(summary_of(run.path), "throughput.tokens_per_s") == pytest.approx(64 * 8192)


def test_a_log_that_has_no_times_makes_a_run_that_says_so(tmp_path: Path) -> None:
    log = log_of(tmp_path, *[f"step={n} loss={n}.5 tok/s=1200" for n in range(5)])
    (run,) = import_log(ImportRequest(log, tmp_path / "run")).runs
    summary = summary_of(run.path)
    step = summary.readings["time.step_s"]
    assert isinstance(step, Missing)
    assert "nothing in the log says how long a step took" in step.reason
    rate = reading(summary, "throughput.tokens_per_s")
    assert (rate.value, rate.basis) == (1200, "reported")
    losses = [r.value for r in Run.open(run.path).reported() if r.name == "loss"]
    assert losses == [0.5, 1.5, 2.5, 3.5, 4.5]


def test_nothing_is_left_behind_where_a_run_is_there_already(tmp_path: Path) -> None:
    log = log_of(tmp_path, *[nxdt(n, 20 * n) for n in range(1, 5)])
    import_log(ImportRequest(log, tmp_path / "run"))
    with pytest.raises(UsageError, match="exists and is not empty"):
        import_log(ImportRequest(log, tmp_path / "run"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "train.log"]


SAMPLES = {
    "nki_llama_plain.log": ("nxdt", 1),
    "nxdt_bars.log": ("nxdt", 1),
    "nemo_lines.log": ("nxdt", 1),
    "megatron.log": ("megatron", 1),
    "torchtitan.log": ("torchtitan", 2),
    "efficientllm.log": ("efficientllm", 1),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_command_says_what_it_found_and_what_it_made(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / f"{name}.gz"
    log.write_bytes(gzip.compress((LOGS / name).read_bytes()))
    with pytest.raises(SystemExit) as ended:
        main(["import", str(log), "--out", str(tmp_path / "run"), "--json"])
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], len(said["runs"])) == SAMPLES[name]
    for run in said["runs"]:
        assert run["step_lines"] > 3
        assert isinstance(summary_of(Path(run["run"])).readings["time.step_s"], Reading)


@pytest.mark.parametrize("warmup", [0, 1])
def test_printed_rates_and_the_steps_of_a_card_are_of_one_window(
    tmp_path: Path, warmup: int
) -> None:
    # 64 sequences in 128 s, then in 1, 2 and 1 s.
    took_s = (128, 1, 2, 1)
    lines = [line for s in took_s for line in (f"step_time: {s}", f"throughput: {64 / s}")]
    settings = Settings(warmup_steps=warmup)
    import_log(ImportRequest(log_of(tmp_path, *lines), tmp_path / "run", settings=settings))
    summary = summary_of(tmp_path / "run")
    counted_s = took_s[warmup:]
    assert value(summary, "throughput.steps_per_s") == len(counted_s) / sum(counted_s)
    found = reading(summary, "throughput.samples_per_s")
    assert found.value == pytest.approx(64 * len(counted_s) / sum(counted_s))
    assert f"{len(counted_s)} 'throughput' that the program printed" in found.note


def test_the_command_says_why_there_are_no_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untimed = log_of(tmp_path, "step: 0 | loss: 3.0", "step: 1 | loss: 3.0")
    with pytest.raises(SystemExit):
        main(["import", str(untimed), "--out", str(tmp_path / "run")])
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == f"{tmp_path / 'run'}: 0 timed step lines"
    assert shown[2].startswith("no steps: nothing in the log says how long a step took")
    lines = [f"[10:00:00.{n:03d}] step={n + k * 1000} loss=2" for n in range(30) for k in (0, 1)]
    mixed = log_of(tmp_path, *lines)
    with pytest.raises(FormatError, match="no step: step lines of several programs, ranks or"):
        import_log(ImportRequest(mixed, tmp_path / "mixed"))


def test_a_first_step_of_number_0_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"step={n} loss=2 step_time=1.0" for n in range(4)]
    with pytest.raises(SystemExit):
        main(["import", str(log_of(tmp_path, *lines)), "--out", str(tmp_path / "run")])
    assert ": 4 timed step lines, steps 0 to 3" in capsys.readouterr().out


def test_the_command_tells_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of(tmp_path, *[nxdt(n, 20 * n) for n in range(1, 5)])
    with pytest.raises(SystemExit):
        main(["import", str(log), "--out", str(tmp_path / "run"), "--warmup-steps", "1"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{log}: nxdt, by 'Epoch 0: 5%|")
    assert said[1] == f"{tmp_path / 'run'}: 3 timed step lines, steps 2 to 4"
    assert said[-1] == f"erg report {tmp_path / 'run'}"
    assert value(summary_of(tmp_path / "run"), "time.warmup_steps") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.log"], 1, "none.log can't be read: No such file"),
        (["some.txt"], 1, "no training step recognised in 1 line;"),
        (["some.txt", "--format", "what"], 2, "no format 'what'; there are efficientllm"),
    ],
)
def test_a_users_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("hello\n")
    with pytest.raises(SystemExit) as ended:
        main(["import", *arguments])
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "runs").exists()


def test_each_run_of_a_log_has_the_notes_that_its_figures_rest_on(tmp_path: Path) -> None:
    first = [SEQ_LENGTH, *[megatron(n, 5 * n) for n in (10, 20, 30)]]
    second = [SEQ_LENGTH.replace("4096", "2048"), *[megatron(n, 900 + 5 * n) for n in (20, 30, 40)]]
    imported = import_log(ImportRequest(log_of(tmp_path, *first, *second), tmp_path / "run"))
    lengths = [[n for n in (2048, 4096) if f"seq_length {n}" in " ".join(run.notes)]
               for run in imported.runs]  # fmt: skip
    assert lengths == [[4096], [2048]]
    assert all("times are the log's own timestamps" in run.notes for run in imported.runs)
    assert [run.began for run in imported.runs] == ["", "the step number went from 30 back to 20"]


def test_a_compressed_log_that_ends_half_way_is_said_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = "".join(f"2026-01-01 10:{n:02d}:00 step={n} loss={n**0.5}\n" for n in range(60))
    log = tmp_path / "half.log.gz"
    log.write_bytes(gzip.compress(whole.encode())[:-200])
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["import", str(log), "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert said.err == f"erg: {log}: the compressed log is incomplete; its first part was read\n"
    assert "timed step lines" in said.out


def test_what_rests_on_printed_step_times_is_reported_and_the_compile_is_warm_up(
    tmp_path: Path,
) -> None:
    log = log_of(
        tmp_path, *[f"step={n} loss=2 step_time={9 if n == 1 else 1}" for n in range(1, 9)]
    )
    summary = summary_of(import_log(ImportRequest(log, tmp_path / "run")).runs[0].path)
    assert (value(summary, "time.step_s"), value(summary, "time.step_median_s")) == (1, 1)
    for key in ("time.step_s", "time.step_median_s", "throughput.steps_per_s", "time.window_s"):
        assert reading(summary, key).basis == "reported"
    assert "after 1 step of warm-up" in reading(summary, "time.window_s").note


def test_a_step_time_that_is_none_is_refused_aloud_and_once(tmp_path: Path) -> None:
    log = log_of(tmp_path, *[f"step={n} loss=2 step_time={t}" for n, t in enumerate([1, -1, 0, 1])])
    (run,) = import_log(ImportRequest(log, tmp_path / "run")).runs
    assert [note for note in run.notes if "can't be" in note] == [
        "step_time=-1 of step 1 can't be how long a step took: it is left out, and so are others"
        " like it"
    ]


def test_an_evaluation_between_lines_of_even_pace_makes_no_step_longer(tmp_path: Path) -> None:
    lines = [f"2026-01-01 10:{n:02d}:00 epoch: {n // 5} step: {n % 5 + 1} loss: 2 tokens: 100"
             for n in range(15)]  # fmt: skip
    for n in (4, 9):
        at = next(i for i, line in enumerate(lines) if f"10:{n:02d}:00" in line)
        lines.insert(at + 1, f"2026-01-01 10:{n:02d}:30 epoch: 0 eval step: 5 eval_loss: 2.0")
    summary = summary_of(
        import_log(ImportRequest(log_of(tmp_path, *lines), tmp_path / "run")).runs[0].path
    )
    for key in ("time.step_median_s", "time.step_p95_s"):
        assert value(summary, key) == pytest.approx(60)
    # Both evaluations, of 30 s each, are cut: 12 steps of 60 s and the 2 after them of 30 s.
    assert value(summary, "time.step_s") == pytest.approx((12 * 60 + 2 * 30) / 14)


def test_the_samples_per_second_of_an_evaluation_are_not_the_trainings(tmp_path: Path) -> None:
    evaluation = (
        "{'eval_loss': 2.1, 'eval_runtime': 2.0, 'eval_samples_per_second': 8.0, 'epoch': 1}"
    )
    lines = [printed(i / 10) for i in range(1, 5)]
    (run,) = import_log(ImportRequest(log_of(tmp_path, *lines, evaluation), tmp_path / "run")).runs
    assert isinstance(summary_of(run.path).readings["throughput.samples_per_s"], Missing)

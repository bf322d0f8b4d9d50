"""Facts in one spelling, and which runs are not compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.compare.entry import EVAL_LOSS, fact, why_left_out
from ergmeter.compare.sources import read_entries
from ergmeter.compare.time_to_loss import ENERGY, TIME, to_target
from ergmeter.errors import FormatError, UsageError
from ergmeter.records import Mark, Missing, Reading, Reported, Sample, Step
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run

S = 10**9


@pytest.mark.parametrize(
    ("said", "spelled"),
    [
        (1024, "1024"),
        ("1024.0", "1024"),
        (1024.0, "1024"),
        (" a  b ", "a b"),
        (True, "yes"),
        ("False", "no"),
        ("", None),
        ("nan", None),
        (None, None),
        (["v_proj", "q_proj"], "q_proj v_proj"),
        ("2.10", "2.10"),  # a version, and not 2.1
        ("12e4567", "12e4567"),  # a commit, and not infinity
    ],
)
def test_a_fact_has_one_spelling(said: object, spelled: str | None) -> None:
    assert fact(said) == spelled


@pytest.mark.parametrize(
    "status", ["failed", "interrupted", "stopped", "diverged", "cut off", "running"]
)
def test_a_run_that_did_not_finish_is_left_out(status: str) -> None:
    assert why_left_out(status)


@pytest.mark.parametrize("status", ["finished", "imported", "exit code 0", None])
def test_a_run_that_did_is_not(status: str | None) -> None:
    assert why_left_out(status) is None


def written(path: Path, *, ended: str | None = None, **facts: object) -> Path:
    """Twenty steps of a second with 100 tokens each, on a GPU that draws 250 W."""
    run = make_run(path)
    add_writer(
        run,
        steps=[
            Step(i * S, (i + 1) * S, index=i, tokens_computed=100, loss=3.0 - 0.1 * i)
            for i in range(20)
        ],
        samples=[
            Sample(t * S // 10, GPU.id, power_w=250.0, memory_bytes=2 * 10**9)
            for t in range(-10, 211)
        ],
        devices=[GPU],
        reported=[Reported(19 * S, "eval_loss", 1.25, "")],
        marks=[Mark(20 * S, "ended", ended)] if ended else [],
        header={"workload": {"backend": "torch", "seq_len": 512, **facts}},
    )
    return run


def test_a_run_directory_says_what_it_was_and_what_it_came_to(tmp_path: Path) -> None:
    (entry,) = read_entries([written(tmp_path / "a")]).entries
    assert entry.facts["backend"] == "torch"
    assert entry.facts["seq_len"] == "512"
    assert entry.facts["device"] == "Test GPU"
    assert entry.value("throughput.tokens_per_s") == pytest.approx(100)
    assert entry.value("energy.joules_per_token") == pytest.approx(2.5, rel=0.01)
    assert entry.value(EVAL_LOSS) == 1.25


def test_a_folder_gives_its_runs_and_says_which_failed(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "a")
    written(tmp_path / "runs" / "b", ended="exit code 1")
    found = read_entries([tmp_path / "runs"])
    assert [Path(entry.source).name for entry in found.ended_well] == ["a"]
    assert found.unused == (f"{tmp_path / 'runs' / 'b'}: it did not finish (exit code 1)",)


def test_a_run_that_says_it_failed_is_left_out_though_its_files_are_whole(tmp_path: Path) -> None:
    found = read_entries([written(tmp_path / "a", status="failed")])
    assert not found.ended_well
    assert "failed" in found.unused[0]


def test_a_run_named_twice_counts_once(tmp_path: Path) -> None:
    run = written(tmp_path / "a")
    ledger = tmp_path / "energy_results.csv"
    ledger.write_text(
        "model,backend,wall_s,warmup_s,tokens_processed,tok_per_s,window_s,run\n"
        "m,torch,21,0,2000,100,20,a\n"
    )
    found = read_entries([ledger, run])
    (entry,) = found.entries
    assert entry.source == str(run)
    assert "named twice" in found.left_out[0]


def test_a_ledger_and_its_copy_are_no_repeats(tmp_path: Path) -> None:
    text = (
        "model,backend,seed,wall_s,warmup_s,tokens_processed,tok_per_s,window_s\n"
        "m,torch,1,21,0,2000,100,20\nm,torch,2,21,0,2020,101,20\n"
    )
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(text)
    found = read_entries([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert [entry.facts["seed"] for entry in found.entries] == ["1", "2"]
    assert len(found.left_out) == 2


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no run, folder or ledger"):
        read_entries([tmp_path / "absent"])
    with pytest.raises(FormatError, match="no run and no energy ledger"):
        read_entries([tmp_path])


def test_the_target_is_reached_where_the_mean_of_five_is(tmp_path: Path) -> None:
    """Losses 3.0, 2.9, ..: the mean of five is 2.0 at steps 9 to 13, which end at 13 s."""
    found = to_target(written(tmp_path / "a"), 2.0 + 1e-9)
    time_s, energy_j = found[TIME], found[ENERGY]
    assert isinstance(time_s, Reading)
    assert isinstance(energy_j, Reading)
    assert time_s.value == pytest.approx(13.0)
    assert energy_j.value == pytest.approx(13 * 250, rel=0.01)


def test_a_single_low_loss_is_not_the_target(tmp_path: Path) -> None:
    run = make_run(tmp_path / "lucky")
    losses = [3.0] * 5 + [0.1] + [3.0] * 14
    rows = [
        Step(i * S, (i + 1) * S, index=i, tokens_computed=1, loss=loss)
        for i, loss in enumerate(losses)
    ]
    add_writer(run, steps=rows)
    assert isinstance(to_target(run, 2.0)[TIME], Missing)


def two_trainings(path: Path) -> Path:
    """Of one command: ten steps of 100 tokens a second, twenty of 10 in half of one."""
    run = make_run(path)
    for name, steps in (
        ("A", even_steps(10, tokens_computed=100)),
        ("B", even_steps(20, seconds=0.5, tokens_computed=10)),
    ):
        header = {"training": {"id": name, "world": 1, "model": f"Model{name}"}}
        add_writer(run, steps=steps, header=header, settings={"warmup_steps": 0})
    return run


def test_two_trainings_in_a_run_are_two_sources_and_no_repeats(tmp_path: Path) -> None:
    run = two_trainings(tmp_path / "both")
    found = read_entries([run])
    assert [entry.argument for entry in found.entries] == [f"{run}:1", f"{run}:2"]
    rates = [entry.value("throughput.tokens_per_s") for entry in found.entries]
    names = [entry.facts["name"] for entry in found.entries]
    assert dict(zip(names, rates, strict=True)) == {"test, ModelA": 100.0, "test, ModelB": 20.0}
    note = found.entries[0].remarks[0]
    assert note.startswith("2 trainings in this run; name the one to compare: ")
    assert f"{run}:2 ({names[1]})" in note


def test_one_of_several_trainings_can_be_named(tmp_path: Path) -> None:
    run = two_trainings(tmp_path / "both")
    (second,) = read_entries([tmp_path / "both:2"]).entries
    assert second.source == second.argument == f"{run}:2"
    assert second.value("steps.count") == Run.open(run).training(2).count("steps")
    assert second.training == 2  # which the curves and the target ask for
    again = read_entries([run, tmp_path / "both:2"])
    assert len(again.entries) == 2
    assert "the same run, named twice" in again.left_out[0]
    with pytest.raises(UsageError, match=r"no training 3 .*1 to 2"):
        read_entries([tmp_path / "both:3"])


def test_the_only_training_of_a_run_is_that_run_by_either_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    steps = even_steps(10, tokens_computed=100)
    add_writer(run, steps=steps, header={"training": {"id": "A", "world": 1}})
    found = read_entries([run, tmp_path / "one:1"])
    assert len(found.entries) == 1
    assert "the same run, named twice" in found.left_out[0]


def test_a_named_training_of_a_damaged_run_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    two_trainings(tmp_path / "both")
    (tmp_path / "both" / "run.json").write_text("{")
    found = read_entries([written(tmp_path / "whole"), tmp_path / "both:2"])
    assert len(found.entries) == 1
    assert "run.json" in found.left_out[0]


def test_a_folder_whose_name_ends_in_a_number_is_that_folder(tmp_path: Path) -> None:
    (entry,) = read_entries([written(tmp_path / "lr:2")]).entries
    assert entry.value("throughput.tokens_per_s") == pytest.approx(100)


def test_just_the_figures_that_are_asked_for_are_made_and_they_are_the_same(tmp_path: Path) -> None:
    run = written(tmp_path / "a")
    told: list[tuple[int, int]] = []
    keys = ("energy.joules_per_token",)
    (some,) = read_entries([run], keys=keys, on_progress=lambda *said: told.append(said)).entries
    (whole,) = read_entries([run]).entries
    assert told == [(0, 1)]
    wanted = {*keys, EVAL_LOSS, "training.loss", "time.window_s", "steps.count"}
    assert set(some.figures) == wanted
    assert all(some.figures[key] == whole.figures[key] for key in wanted)
    assert some.remarks == whole.remarks

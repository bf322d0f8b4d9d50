"""Jobs of several runs in comparisons and gates: one entry each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.bench.plan.cells import Cell
from ergmeter.compare.entry import Group, read_side
from ergmeter.compare.grouping import mixed_facts
from ergmeter.compare.sources import read_entries
from ergmeter.metrics.catalog import every_metric
from ergmeter.records import Reading
from ergmeter.runlog.settings import Settings
from tests.unit.metrics.test_jobs import part

Erg = Callable[..., tuple[int, str, str]]
KEYS = ("job.tokens_per_s", "throughput.tokens_per_s")


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """10 s of steps, a minute of nothing, and on from step 8 to 19."""
    part(tmp_path / "jobs" / "a", began_s=0, steps=range(10))  # 0 to 16 s
    part(tmp_path / "jobs" / "b", began_s=76, steps=range(8, 20))  # 76 to 94 s
    return tmp_path / "jobs"


def test_the_runs_of_a_resumed_job_are_one_entry_with_its_metrics(resumed: Path) -> None:
    (entry,) = read_side(resumed, KEYS).entries
    assert (entry.kind, entry.status, entry.facts["steps"]) == ("job", "ok", "20")
    for key, metric in every_metric().items():
        if metric.scope == "job":
            reading = entry.figures[key]
            assert isinstance(reading, Reading)
            assert (reading.unit, bool(reading.note)) == (metric.unit, True)
    assert entry.value("job.wall_s") == pytest.approx(94)
    assert entry.value("job.tokens_per_s") == pytest.approx(200 / 94)
    assert "has 2 runs: compare by job.tokens_per_s" in entry.why_not("throughput.tokens_per_s")


def test_repeats_within_one_allocation_stay_repeats(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        part(tmp_path / name, began_s=100.0 * number, steps=range(10), job=None)
    assert [entry.kind for entry in read_side(tmp_path, KEYS).entries] == ["run", "run"]


def test_a_requeued_job_of_a_scheduler_is_one_entry(tmp_path: Path) -> None:
    part(tmp_path / "a", began_s=0, steps=range(10), job=None)
    part(tmp_path / "b", began_s=100, steps=range(8, 20), job=None)
    assert [entry.kind for entry in read_side(tmp_path, KEYS).entries] == ["job"]


def test_a_gate_takes_a_job_as_one_repeat_beside_a_run(
    resumed: Path, tmp_path: Path, erg: Erg
) -> None:
    part(tmp_path / "whole" / "c", began_s=0, steps=range(20), job="other")
    rule = ("--rule", "job.tokens_per_s -3%", "--json")
    code, out, err = erg("gate", resumed, tmp_path / "whole", *rule)
    assert code == 0, err
    assert "2 runs of one job, counted once: a, b" in out
    (verdict,) = json.loads(out)["judgements"]
    assert verdict["figure"]["repeats"] == [1, 1]


def test_compare_shows_jobs_by_their_metrics(resumed: Path, tmp_path: Path, erg: Erg) -> None:
    part(tmp_path / "whole" / "c", began_s=0, steps=range(20), job="other")
    code, out, err = erg("compare", tmp_path / "whole", resumed, "--anyway")
    assert code == 0, err
    assert "2 runs of one job, counted once: a, b" in " ".join(out.split())
    assert "goodput" in out


def test_runs_of_a_job_that_are_named_apart_are_no_repeats_of_a_group(resumed: Path) -> None:
    entries = read_entries([resumed / "a", resumed / "b"]).entries
    assert [entry.kind for entry in entries] == ["run", "run"]
    assert tuple(mixed_facts(Group("both", entries), ())) == (
        "both has 2 runs of the job pretrain, which are not repeats",
    )


def test_repeats_in_folders_of_one_allocation_pass_a_gate(tmp_path: Path, erg: Erg) -> None:
    """All runs have the id of one scheduler's job, and each begins at step 0."""
    for number, name in enumerate(("new/1", "ref/1", "new/2", "ref/2")):
        part(tmp_path / name, began_s=100.0 * number, steps=range(10), job=None)
    entries = read_entries([tmp_path / name for name in ("new/1", "new/2")]).entries
    assert not any(mixed_facts(Group("new", entries), ()))
    code, out, err = erg("gate", tmp_path / "new", tmp_path / "ref", "--rule", "step_s +3%")
    assert code == 0, out + err


def test_repeats_and_a_resumed_job_of_one_allocation_are_told_apart(tmp_path: Path) -> None:
    part(tmp_path / "a", began_s=0, steps=range(10), job=None)
    part(tmp_path / "b", began_s=100, steps=range(10), job=None)
    part(tmp_path / "c", began_s=200, steps=range(8, 20), job=None)
    part(tmp_path / "d", began_s=300, steps=range(10), job=None)
    entries = read_side(tmp_path, KEYS).entries
    assert [(entry.kind, entry.remarks[:1]) for entry in entries] == [
        ("run", ()),
        ("job", (f"job 17/train in {tmp_path}: 2 runs of one job, counted once: b, c",)),
        ("run", ()),
    ]


@pytest.mark.parametrize("side", ["jobs", "whole"])
def test_without_rules_a_gate_judges_jobs_by_their_tokens_per_second(
    resumed: Path, tmp_path: Path, erg: Erg, side: str
) -> None:
    part(tmp_path / "whole" / "c", began_s=0, steps=range(20), job="other")
    sides = [resumed, tmp_path / "whole"] if side == "jobs" else [tmp_path / "whole", resumed]
    code, out, _ = erg("gate", *sides, "--noise", "1%", "--json")
    (verdict,) = [v for v in json.loads(out)["judgements"] if v["figure"] is not None]
    assert verdict["rule"].startswith("job.tokens_per_s")
    assert code == (1 if side == "jobs" else 0)  # a minute lost, or won


def test_a_job_with_a_damaged_run_is_not_computed_from_the_rest(
    resumed: Path, tmp_path: Path, erg: Erg
) -> None:
    part(tmp_path / "whole" / "c", began_s=0, steps=range(20), job="other")
    part(resumed / "c", began_s=200, steps=range(20, 30))
    next((resumed / "b").rglob("writer.json")).write_text("{")
    code, _, err = erg("gate", resumed, tmp_path / "whole", "--rule", "job.tokens_per_s -3%")
    assert code == 4
    assert f"job pretrain in {resumed} can't be read whole: " in err
    assert "writer.json" in err
    code, _, err = erg("job", "--runs", resumed)
    assert code == 1
    assert str(resumed / "b") in err


def test_steps_of_a_job_that_are_damaged_leave_it_out(resumed: Path) -> None:
    segment = next((resumed / "a").rglob("steps*"))
    segment.write_bytes(b"no Arrow file")
    source = read_side(resumed, KEYS)
    assert source.entries == ()
    (line,) = [line for line in source.left_out if line.startswith("job pretrain")]
    assert str(segment) in line


def test_a_job_is_counted_once_however_often_it_is_named(resumed: Path) -> None:
    source = read_entries([resumed, resumed, resumed / "b"])
    (job,) = [entry for entry in source.entries if entry.kind == "job"]
    assert job.value("job.steps") == 20
    assert job.remarks[0].endswith("counted once: a, b")
    assert sum("the same run, named twice" in line for line in source.left_out) == 3


def test_facts_of_a_job_are_those_of_all_its_runs(tmp_path: Path) -> None:
    """The last run ended before a step; an earlier one did other work."""
    part(tmp_path / "a", began_s=0, steps=range(10), model_name="m", seq_len=2048)
    part(tmp_path / "b", began_s=76, steps=range(8, 20), model_name="m", seq_len=512)
    part(tmp_path / "c", began_s=200, steps=range(0))
    (job,) = read_side(tmp_path, KEYS).entries
    assert (job.facts["model_name"], job.facts["seq_len"]) == ("m", "2048, 512")


def test_options_reach_the_metrics_of_jobs(tmp_path: Path) -> None:
    for name in "ab":
        part(tmp_path / name, began_s=0, steps=range(20), job="j", tokens=None)
    settings = Settings(tokens_per_step=1000)
    for entry in read_entries([tmp_path / "a"], settings, keys=KEYS).entries:
        assert entry.value("job.tokens_per_s") == pytest.approx(20_000 / 26)


def test_a_metric_of_zero_is_shown(resumed: Path, tmp_path: Path, erg: Erg) -> None:
    part(tmp_path / "whole" / "c", began_s=0, steps=range(20), job="other")
    only = ("--metric", "job.lost_steps", "--json")
    code, out, _ = erg("compare", tmp_path / "whole", resumed, *only)
    assert code == 0
    means = [group["means"]["job.lost_steps"]["value"] for group in json.loads(out)["groups"]]
    assert means == [0.0, 2.0]


def _differs(path: Path, case: str) -> None:
    part(path / "a", began_s=0, steps=range(10), job=None, model="m")  # 0 to 16 s
    if case == "another model":
        part(path / "b", began_s=100, steps=range(8, 20), job=None, model="n")
    elif case == "steps far behind":
        part(path / "b", began_s=100, steps=range(1000, 1010), job=None, model="m")
    else:  # at the same time
        part(path / "b", began_s=3, steps=range(8, 20), job=None, model="m")


@pytest.mark.parametrize("case", ["another model", "steps far behind", "at the same time"])
def test_runs_that_can_not_have_resumed_are_no_job(tmp_path: Path, case: str) -> None:
    _differs(tmp_path, case)
    assert [entry.kind for entry in read_side(tmp_path, KEYS).entries] == ["run", "run"]


def test_a_log_of_every_tenth_step_goes_on_one_row_later(tmp_path: Path) -> None:
    part(tmp_path / "a", began_s=0, steps=range(9, 100, 10), job=None, steps_each=10)
    part(tmp_path / "b", began_s=100, steps=range(109, 150, 10), job=None, steps_each=10)
    (job,) = read_side(tmp_path, KEYS).entries
    assert (job.kind, job.value("job.steps")) == ("job", 150)


def test_damage_in_a_folder_of_a_longer_name_is_not_that_of_the_job(resumed: Path) -> None:
    older = resumed.parent / "jobs-old"
    part(older / "c", began_s=200, steps=range(5))
    next(older.rglob("writer.json")).write_text("{")
    source = read_entries([resumed, older])
    assert [entry.kind for entry in source.entries] == ["job"]
    assert any("jobs-old" in line for line in source.left_out)


def test_a_job_has_no_loss_for_the_reason_of_its_runs(resumed: Path) -> None:
    (job,) = read_side(resumed, ("training.loss",)).entries
    (run, _) = read_entries([resumed / "a", resumed / "b"], keys=("training.loss",)).entries
    assert job.why_not("training.loss") == run.why_not("training.loss")
    assert "compare by job." not in job.why_not("training.loss")


def test_cells_of_one_allocation_pass_a_gate_against_runs(tmp_path: Path, erg: Erg) -> None:
    """The cells' runs have the id of one scheduler's job, and are repeats all the same."""
    for number in range(2):
        place = tmp_path / "results" / f"exp_{number}"
        place.mkdir(parents=True)
        cell = Cell(number, f"c{number}", "s", {}, num_gpus=1, repeat=number + 1, command=("x",))
        (place / "cell.json").write_text(json.dumps(cell.to_json()))
        (place / "status.json").write_text(json.dumps({"status": "ok"}))
        part(place / "run", began_s=100.0 * number, steps=range(10), job=None)
        part(tmp_path / "runs" / str(number), began_s=300.0 + 100 * number, steps=range(10))
    rule = ("--rule", "tokens_per_s -3%")
    for sides in (
        (tmp_path / "results", tmp_path / "runs" / "0"),
        (tmp_path / "runs" / "0", tmp_path / "results"),
    ):
        code, out, err = erg("gate", *sides, *rule, "--noise", "1%")
        assert code == 0, out + err


def test_a_note_on_both_sides_is_printed_once(resumed: Path, erg: Erg) -> None:
    _, out, err = erg("gate", resumed, resumed, "--rule", "job.tokens_per_s -3%", "--json")
    assert (out + err).count("2 runs of one job, counted once: a, b") == 1

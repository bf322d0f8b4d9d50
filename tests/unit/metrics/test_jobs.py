"""A job of several runs: what was kept, what was made again, what lay between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.compare.jobs import JobRun, job_id, job_results, jobs
from ergmeter.records import Mark, Missing, Reading, Sample, Step
from ergmeter.runlog.identity import job_of, run_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.writer import create_run
from tests.runs import GPU, add_writer

S = 10**9
WALL_S = 1_800_000_000


def part(
    path: Path,
    *,
    began_s: float,
    steps: range,
    job: str | None = "pretrain",
    watts: float = 100.0,
    tokens: int | None = 10,
    settings: dict[str, Any] | None = None,
    steps_each: int | None = 1,
    **workload: Any,
) -> Run:
    """A run that loads for 5 s, makes steps of a second, and ends a second later.

    `steps_each`: optimizer steps in each of its rows.
    """
    run = create_run(path, {**run_header("train", ["train.py"]), "job": {"SLURM_JOB_ID": "17"}})
    life_s = 5 + len(steps) + 1
    rows = [
        Step((5 + i) * S, (6 + i) * S, index=index, steps=steps_each, tokens_computed=tokens)
        for i, index in enumerate(steps)
    ]
    directory = add_writer(
        run,
        steps=rows,
        samples=[
            Sample(round(t * S / 10), GPU.id, power_w=watts) for t in range(-20, life_s * 10 + 20)
        ],
        devices=[GPU],
        settings={**({"job": job} if job else {}), **(settings or {})},
        header={
            "clock": {"monotonic_ns": 0, "wall_ns": round((WALL_S + began_s) * S)},
            "workload": workload,
        },
        closed=False,
    )
    # The marks that a writer makes itself are of now; these runs are of another day.
    marks = [Mark(0, "opened"), Mark(life_s * S, "closed")]
    lines = [json.dumps({"t_ns": m.t_ns, "name": m.name, "detail": ""}) for m in marks]
    (directory / "marks.jsonl").write_text("\n".join(lines) + "\n")
    return Run.open(run)


@pytest.fixture
def resumed(tmp_path: Path) -> list[Run]:
    """Steps 0 to 99 and killed; a minute later on from 80 to 139; at once on from 140 to 149."""
    return [
        part(tmp_path / "a", began_s=0, steps=range(100)),  # 0 to 106 s
        part(tmp_path / "b", began_s=166, steps=range(80, 140), watts=200.0),  # 166 to 232 s
        part(tmp_path / "c", began_s=232, steps=range(140, 150)),  # 232 to 248 s
    ]


def value(results: dict[str, Any], key: str) -> float:
    found = results[key]
    assert isinstance(found, Reading), found
    return found.value


def test_what_was_kept_lost_and_drawn_over_all_runs(resumed: list[Run]) -> None:
    found = job_results([JobRun.of(run) for run in resumed])
    assert value(found, "job.wall_s") == pytest.approx(248)
    assert value(found, "job.down_s") == pytest.approx(60)
    assert value(found, "job.steps") == 150
    assert value(found, "job.lost_steps") == 20
    assert value(found, "job.goodput_frac") == pytest.approx(150 / 248)
    assert value(found, "job.tokens") == 1500
    assert value(found, "job.energy_j") == pytest.approx(106 * 100 + 66 * 200 + 16 * 100, rel=0.01)


def test_a_run_that_went_back_behind_two_loses_what_both_made(tmp_path: Path) -> None:
    runs = [
        part(tmp_path / "a", began_s=0, steps=range(30)),
        part(tmp_path / "b", began_s=100, steps=range(20, 50)),
        part(tmp_path / "c", began_s=200, steps=range(10, 60)),
    ]
    found = job_results([JobRun.of(run) for run in runs])
    assert value(found, "job.lost_steps") == 20 + 30
    assert value(found, "job.steps") == 60


def test_an_attempt_that_made_no_step_is_time_lost_and_blanks_nothing(tmp_path: Path) -> None:
    """10 s of steps, an attempt that fails while it loads, and on from step 8 to 19."""
    runs = [
        part(tmp_path / "a", began_s=0, steps=range(10)),  # 0 to 16 s
        part(tmp_path / "b", began_s=20, steps=range(0)),  # 20 to 26 s
        part(tmp_path / "c", began_s=30, steps=range(8, 20)),  # 30 to 48 s
    ]
    found = job_results([JobRun.of(run) for run in runs])
    assert value(found, "job.steps") == 20
    assert value(found, "job.lost_steps") == 2
    assert value(found, "job.tokens") == 200
    assert value(found, "job.goodput_frac") == pytest.approx(20 / 48)
    assert value(found, "job.down_s") == pytest.approx(8)
    assert "b made no step" in found["job.goodput_frac"].note  # type: ignore[union-attr]
    assert value(found, "job.energy_j") == pytest.approx((16 + 6 + 18) * 100, rel=0.01)


def test_a_job_of_which_no_run_made_a_step_says_so(tmp_path: Path) -> None:
    runs = [part(tmp_path / n, began_s=50 * i, steps=range(0)) for i, n in enumerate("ab")]
    found = job_results([JobRun.of(run) for run in runs])["job.goodput_frac"]
    assert isinstance(found, Missing)
    assert found.reason.startswith("a: no steps were recorded")


def test_an_attempt_that_was_cut_off_before_it_wrote_anything_has_no_length(tmp_path: Path) -> None:
    run = create_run(tmp_path / "b", run_header("train", ["train.py"]))
    clock = {"monotonic_ns": 0, "wall_ns": (WALL_S + 20) * S}
    directory = add_writer(run, settings={"job": "pretrain"}, header={"clock": clock}, closed=False)
    (directory / "marks.jsonl").write_text("")
    runs = [part(tmp_path / "a", began_s=0, steps=range(10)), Run.open(run),
            part(tmp_path / "c", began_s=30, steps=range(10, 20))]  # fmt: skip
    found = job_results([JobRun.of(one) for one in runs])
    assert value(found, "job.steps") == 20
    assert value(found, "job.wall_s") == pytest.approx(46)
    assert value(found, "job.down_s") == pytest.approx(46 - 16 - 16)


def test_a_reason_names_the_run_it_is_of(tmp_path: Path) -> None:
    untold = create_run(tmp_path / "b", run_header("train", ["train.py"]))
    rows = [Step(i * S, (i + 1) * S, index=i + 10, tokens_computed=i or None) for i in range(5)]
    add_writer(untold, steps=rows, settings={"job": "pretrain"})
    runs = [part(tmp_path / "a", began_s=0, steps=range(10)), Run.open(untold)]
    found = job_results([JobRun.of(run) for run in runs])["job.tokens"]
    assert isinstance(found, Missing)
    assert found.reason == "b: 1 of 5 steps have no count of computed tokens"


def test_runs_that_all_count_from_0_do_not_say_what_was_lost(tmp_path: Path) -> None:
    runs = [part(tmp_path / n, began_s=50 * i, steps=range(10)) for i, n in enumerate("ab")]
    found = job_results([JobRun.of(run) for run in runs])
    said = found["job.lost_steps"]
    assert isinstance(said, Missing)
    assert "meter.continue_from" in said.reason
    assert value(found, "job.wall_s") == pytest.approx(66)


def test_runs_are_one_job_by_declared_name_or_by_the_schedulers_number(tmp_path: Path) -> None:
    named = part(tmp_path / "a", began_s=50, steps=range(5))
    earlier = part(tmp_path / "b", began_s=0, steps=range(5))
    other = part(tmp_path / "c", began_s=0, steps=range(5), job=None)
    found = jobs([named, earlier, other])
    assert {name: [run.path.name for run in runs] for name, runs in found.items()} == {
        "pretrain": ["b", "a"], "17/train": ["c"],
    }  # fmt: skip
    assert job_id(other) == "17/train"


@pytest.mark.parametrize(
    ("told", "job"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),  # what torchrun calls a launch without a name
        ({"TORCHELASTIC_RUN_ID": "abc"}, "abc"),
        ({"TORCHELASTIC_RUN_ID": "abc", "SLURM_JOB_ID": "17"}, "17"),  # kept over a requeue
    ],
)
def test_whose_word_a_jobs_name_is(told: dict[str, str], job: str | None) -> None:
    assert job_of(None, {"job": told}) == job
    assert job_of("mine", {"job": told}) == "mine"


def test_the_command_shows_the_newest_job_and_names_those_there_are(
    resumed: list[Run], tmp_path: Path, erg: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = erg("job", "--runs", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["job"] == "pretrain"
    assert [Path(one["run"]).name for one in found["runs"]] == ["a", "b", "c"]
    assert found["readings"]["job.lost_steps"]["value"] == 20
    assert "81 to 140" in erg("job", "pretrain", "--runs", tmp_path)[1]
    code, _, said = erg("job", "other", "--runs", tmp_path)
    assert code == 2
    assert "there are: pretrain" in said


def test_goodput_is_the_time_in_steps_and_not_between_them(tmp_path: Path) -> None:
    """20 steps of a second, half a second apart, in a run of 40 s; five are made again."""
    run = create_run(tmp_path / "a", run_header("train", ["train.py"]))
    rows = [Step(5 * S + i * 3 * S // 2, 6 * S + i * 3 * S // 2, index=i) for i in range(20)]
    clock = {"monotonic_ns": 0, "wall_ns": WALL_S * S}
    directory = add_writer(run, steps=rows, header={"clock": clock}, closed=False)
    marks = [Mark(0, "opened"), Mark(40 * S, "closed")]
    lines = [json.dumps({"t_ns": m.t_ns, "name": m.name, "detail": ""}) for m in marks]
    (directory / "marks.jsonl").write_text("\n".join(lines) + "\n")
    later = part(tmp_path / "b", began_s=40, steps=range(15, 25))  # 40 to 56 s
    found = job_results([JobRun.of(Run.open(run)), JobRun.of(later)])
    assert value(found, "job.goodput_frac") == pytest.approx((15 + 10) / 56)
    alone = job_results([JobRun.of(Run.open(run))])
    assert value(alone, "job.goodput_frac") == pytest.approx(20 / 40)


def test_rows_of_several_steps_count_as_many(tmp_path: Path) -> None:
    """A log of every tenth step: 100 steps, and 40 of which 20 were made again."""
    told: dict[str, Any] = {
        "steps_each": 10,
        "tokens": None,
        "settings": {"tokens_per_step": 100},
    }
    runs = [
        part(tmp_path / "a", began_s=0, steps=range(9, 100, 10), **told),  # 0 to 16 s
        part(tmp_path / "b", began_s=30, steps=range(89, 130, 10), **told),  # 30 to 41 s
    ]
    found = job_results([JobRun.of(runs[0])])
    assert value(found, "job.steps") == 100
    assert value(found, "job.tokens") == 10_000
    assert value(found, "job.tokens_per_s") == pytest.approx(10_000 / 16)
    found = job_results([JobRun.of(run) for run in runs])
    assert value(found, "job.lost_steps") == 20
    assert value(found, "job.steps") == 130
    assert value(found, "job.tokens") == 13_000


def test_a_log_that_does_not_say_how_many_steps_a_line_has_counts_none(tmp_path: Path) -> None:
    found = job_results(
        [JobRun.of(part(tmp_path / "a", began_s=0, steps=range(10), steps_each=None))]
    )
    for key in ("job.steps", "job.lost_steps"):
        said = found[key]
        assert isinstance(said, Missing)
        assert "how many steps a printed line covers" in said.reason


def test_damage_of_another_job_is_no_failure_of_the_one_asked_for(
    resumed: list[Run], tmp_path: Path, erg: Callable[..., tuple[int, str, str]]
) -> None:
    other = part(tmp_path / "d", began_s=500, steps=range(10), job="other")
    next(other.path.rglob("marks.jsonl")).write_text("no JSON\n{}\n")
    code, _, err = erg("job", "pretrain", "--runs", tmp_path)
    assert (code, err) == (0, "")
    code, _, err = erg("job", "other", "--runs", tmp_path)
    assert code == 1
    assert "marks.jsonl" in err

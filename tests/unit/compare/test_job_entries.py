"""Jobs of several runs in comparisons and gates: one entry each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.compare.entry import Group, read_side
from ergmeter.compare.grouping import mixed_facts
from ergmeter.compare.sources import read_entries
from ergmeter.metrics.catalog import every_metric
from ergmeter.records import Reading
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
    assert mixed_facts(Group("both", entries), ()) == (
        "both has 2 runs of the job pretrain, which are no repeats",
    )

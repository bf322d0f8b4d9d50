"""Trainings that one command ran are told apart, and never taken for ranks of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.errors import UsageError
from ergmeter.records import Sample
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run, reading, reason

S = 10**9
SAMPLES = [Sample(round(t * S / 10), GPU.id, power_w=100.0) for t in range(-20, 400)]


def training(name: str, world: int = 1) -> dict[str, object]:
    """What a writer says of its training. They begin in the order of their names."""
    began_ns = ord(name) - ord("A")
    clock = {"monotonic_ns": began_ns, "wall_ns": 1_800_000_000 * 10**9 + began_ns}
    told = {"id": name, "world": world, "model": f"Model{name}"}
    return {"training": told, "clock": clock}


def test_two_side_by_side_have_figures_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(10, tokens_computed=100), header=training("A"))
    add_writer(run, steps=even_steps(20, seconds=0.5, tokens_computed=10), header=training("B"))
    whole = Run.open(run)
    assert "2 trainings in this run" in reason(whole, "throughput.tokens_per_s")
    assert "--training 1 (to 2)" in reason(whole, "steps.count")
    rates = [reading(whole.training(n), "throughput.tokens_per_s").value for n in (1, 2)]
    assert sorted(rates) == [pytest.approx(20.0), pytest.approx(100.0)]
    assert {whole.training(n).name for n in (1, 2)} == {"test, ModelA", "test, ModelB"}


def test_ranks_of_one_training_are_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        rows = even_steps(10, tokens_computed=100, rank=rank)
        add_writer(run, steps=rows, header=training("A", world=2))
    whole = Run.open(run)
    assert whole.trainings == ["A"]
    assert reading(whole, "throughput.tokens_per_s").value == pytest.approx(200.0)


def test_what_devices_drew_for_two_in_turn_is_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, samples=SAMPLES, devices=[GPU])
    add_writer(run, steps=even_steps(10, tokens_computed=1), header=training("A"))
    later = [type(s)(s.start_ns + 20 * S, s.end_ns + 20 * S, index=s.index) for s in even_steps(5)]
    add_writer(run, steps=later, header=training("B"))
    whole = Run.open(run)
    found = sorted(reading(whole.training(n), "energy.run_j").value for n in (1, 2))
    assert found == [pytest.approx(500.0, rel=0.01), pytest.approx(1000.0, rel=0.01)]


def test_a_training_there_is_not_is_refused_with_how_many_there_are(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(1), header=training("A"))
    with pytest.raises(UsageError, match=r"no training 2 .*1 to 1"):
        Run.open(run).training(2)
    other = make_run(tmp_path / "other")
    add_writer(other, steps=even_steps(1))
    with pytest.raises(UsageError, match="it has no numbered trainings"):
        Run.open(other).training(1)


def test_who_checks_or_explains_two_at_once_is_told_how_to_name_one(
    tmp_path: Path, erg: Callable[..., tuple[int, str, str]]
) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(10, tokens_computed=100), header=training("A"))
    add_writer(run, steps=even_steps(20, seconds=0.5, tokens_computed=10), header=training("B"))
    for command in ("check", "explain"):
        said = " ".join(erg(command, run)[1].split())
        assert "2 trainings in this run, each with its own metrics: choose one" in said
        assert "no steps were seen" not in said
    second = Run.open(run).trainings.index("B") + 1  # both began at the same instant
    assert "over 20 steps in 10 s" in " ".join(erg("check", run, "--training", second)[1].split())
    code, _, wrong = erg("check", run, "--training", "3")
    assert (code, wrong.count("\n")) == (2, 1)
    assert "no training 3 in" in wrong

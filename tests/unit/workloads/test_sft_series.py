"""`erg train` of several configurations and rounds: who trains when, with what. Nobody trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.workloads.sft import repeats

# In place of a Python with ergmeter: it writes down what it was told, and ends with that code.
PYTHON = """#!{python}
import json, sys, time
with open("told", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
time.sleep({took_s})
sys.exit({code})
"""
TOOK_S = 0.1


@pytest.fixture
def series(
    erg: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """`series(*options)`: its exit code, and the words of each training it started."""
    monkeypatch.chdir(tmp_path)

    def call(*options: object, code: int = 0) -> tuple[int, list[list[str]]]:
        python = tmp_path / "python"
        python.write_text(PYTHON.format(python=sys.executable, took_s=TOOK_S, code=code))
        python.chmod(0o755)
        monkeypatch.setattr(repeats, "interpreter", lambda _config: str(python))
        for name in ("a", "b"):
            Path(f"{name}.yaml").write_text(
                f"model: {{name: 'builtin:tiny'}}\ntrain: {{output_dir: outputs/{name}}}\n"
            )
        ended, _, _ = erg("train", "--config", "a.yaml", "--cool-down", 0, *options)
        told = tmp_path / "told"
        return ended, [json.loads(line) for line in told.read_text().splitlines()]

    return call


def words(name: str, number: int, *more: str) -> list[str]:
    return [
        *("-m", "ergmeter", "train", "--config", f"{name}.yaml"),
        *("--out", f"series/{name}-{number}", "--no-report", "--grace", "60.0", *more),
        *("--set", f"seed={41 + number}"),
        *("--set", f"train.output_dir=outputs/{name}/round-{number}"),
    ]


def series_options(told: list[str]) -> tuple[int, float]:
    """Take from a training's words what it is told of its series: how often it is still trained,
    and the seconds of all others."""
    at = told.index("--in-series")
    _, times, others_s = told[at : at + 3]
    del told[at : at + 3]
    return int(times), float(others_s)


def test_a_series_takes_turns_and_pairs_its_seeds(series: Callable[..., Any]) -> None:
    ended, told = series("--interleave", "b.yaml", "--repeats", 3, "--out", "series")
    assert ended == 0
    options_of_each = [series_options(each) for each in told]
    turns = [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert told == [words(name, number) for name, number in turns]
    assert [times for times, _ in options_of_each] == [3, 3, 2, 2, 1, 1]
    # Those that are over, and those of the other configuration that are left, once one was timed.
    trainings_known = [0, 1 + 2, 2 + 2, 3 + 1, 4 + 1, 5]
    for (_, others_s), trainings in zip(options_of_each, trainings_known, strict=True):
        assert others_s >= trainings * TOOK_S


def test_what_is_asked_of_a_series_is_asked_of_each_training(series: Callable[..., Any]) -> None:
    options = ("--quiet", "--set", "train.max_steps=7")
    more = ("--anyway", "--sink", "wandb:project=a")
    ended, told = series("--repeats", 2, "--out", "series", *more, *options)
    assert ended == 0
    assert [series_options(each)[0] for each in told] == [2, 1]
    sinks = ("--set", 'train.report_to=["wandb:project=a"]')
    assert told == [words("a", number, "--anyway", *options, *sinks) for number in (1, 2)]


def test_a_training_that_cannot_finish_ends_its_series(series: Callable[..., Any]) -> None:
    ended, told = series("--interleave", "b.yaml", "--repeats", 2, code=3)
    assert (ended, len(told)) == (1, 1)


def test_a_configuration_that_can_not_run_here_ends_the_series(
    series: Callable[..., Any],
) -> None:
    """It could not in any round, and the others have nothing to be compared with."""
    ended, told = series("--interleave", "b.yaml", "--repeats", 2, "--out", "series", code=2)
    assert (ended, len(told)) == (2, 1)


def test_a_training_that_fails_does_not_end_its_series(series: Callable[..., Any]) -> None:
    ended, told = series("--interleave", "b.yaml", "--repeats", 2, code=1)
    assert (ended, len(told)) == (1, 4)

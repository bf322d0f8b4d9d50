"""`erg train` of several configurations and rounds: who trains when, with what. Nobody trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.workloads.sft import repeats

# In place of a Python with ergmeter: it writes down what it was told.
PYTHON = """#!{python}
import json, sys
with open("told", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def series(
    erg: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """`series(*options)`: its exit code, and the words of each training it started."""
    monkeypatch.chdir(tmp_path)

    def call(*options: object) -> tuple[int, list[list[str]]]:
        python = tmp_path / "python"
        python.write_text(PYTHON.format(python=sys.executable))
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
        *("--out", f"series/{name}-{number}", "--no-report", *more),
        *("--set", f"seed={41 + number}"),
        *("--set", f"train.output_dir=outputs/{name}/round-{number}"),
    ]


def test_a_series_takes_turns_and_pairs_its_seeds(series: Callable[..., Any]) -> None:
    ended, told = series("--interleave", "b.yaml", "--repeats", 3, "--out", "series")
    assert ended == 0
    turns = [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert told == [words(name, number) for name, number in turns]


def test_what_is_asked_of_a_series_is_asked_of_each_training(series: Callable[..., Any]) -> None:
    asked = ("--quiet", "--set", "train.max_steps=7")
    ended, told = series("--repeats", 2, "--out", "series", *asked, "--sink", "wandb:project=a")
    assert ended == 0
    sinks = ("--set", 'train.report_to=["wandb:project=a"]')
    assert told == [words("a", number, *asked, *sinks) for number in (1, 2)]

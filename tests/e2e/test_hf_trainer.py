"""A real Trainer of transformers, recorded without a change to its script."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import QUICK, needs, script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

needs("transformers")

PRINTED = (*QUICK, "--no-hook")  # what can be told from its output alone

_TIMED = re.compile(
    r"('(?:train_runtime|train_\w+_per_second)': )'[^']*'|\d+:\d\d|[\d.]+ ?(?:it/s|s/it)|\?it/s"
)


def without_times(printed: bytes) -> list[str]:
    """What was printed, line by line, but for how long it took."""
    lines = printed.decode().replace("\r", "\n").split("\n")
    return [
        _TIMED.sub("TIME", line) for line in lines if "it/s]" not in line and "s/it]" not in line
    ]


def test_a_recorded_trainer_prints_what_it_prints_alone_and_its_tokens_are_right(lab: Lab) -> None:
    without = lab.run(*script("hf_trainer", "alone.json", "all"))
    assert without.returncode == 0, without.stderr.decode()
    within = lab.record(*script("hf_trainer", "recorded.json", "all"), options=PRINTED)
    assert within.returncode == 0
    assert without_times(within.stdout) == without_times(without.stdout)
    assert len(without_times(within.stdout)) > 20

    tokens = json.loads((lab.path / "recorded.json").read_text())
    assert tokens == json.loads((lab.path / "alone.json").read_text())
    report = lab.report()
    readings = report["readings"]
    steps = readings["steps.count"]["value"]
    # All, or those after the first line, or after those that were read together with it.
    assert len(tokens) / 2 <= steps <= len(tokens)
    # Totals of five digits are printed rounded, but here they have four.
    assert readings["tokens.total"]["value"] == sum(tokens[-int(steps) :])
    assert readings["tokens.per_step"]["value"] == pytest.approx(tokens[0])
    assert readings["throughput.tokens_per_s"]["basis"] == "derived"
    assert readings["throughput.tokens_per_s"]["value"] == pytest.approx(
        readings["tokens.total"]["value"] / readings["time.window_s"]["value"], rel=0.001
    )
    assert report["status"] == "finished"


def test_a_trainer_that_counts_no_tokens_is_told_the_option_that_does(lab: Lab) -> None:
    done = lab.record(*script("hf_trainer", "truth.json", "no"), options=PRINTED)
    assert done.returncode == 0, done.stderr.decode()
    readings = lab.report()["readings"]
    assert "include_num_input_tokens_seen" in readings["throughput.tokens_per_s"]["missing"]
    assert readings["time.step_s"]["value"] > 0
    assert readings["steps.count"]["value"] >= 10  # of 20, as above

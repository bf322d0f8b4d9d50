from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.bench.execute.outcome import check_expectations
from ergmeter.bench.plan.cells import Expectation, broken_expectations

RAN = {"attention": "sdpa", "trainable_parameters": 149504, "packing": False, "weights_dtype": None}


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("attention", "sdpa", True),
        ("attention", "flash_attention_2", False),
        ("trainable_parameters", 149504, True),
        ("trainable_parameters", "149504", True),
        ("trainable_parameters", 149505, False),
        ("packing", False, True),
        ("packing", "true", False),
    ],
)
def test_a_fact_holds_if_the_run_says_the_same(name: str, value: str | int, held: bool) -> None:
    (checked,) = check_expectations([Expectation("fact", name, value)], workload=RAN)
    assert checked["held"] is held


@pytest.mark.parametrize("name", ["weights_dtype", "kernels"])
def test_a_fact_that_nobody_saw_does_not_hold(name: str) -> None:
    (found,) = check_expectations([Expectation("fact", name, "bf16")], workload=RAN)
    assert not found["held"]
    assert "does not record" in found["seen"]


def test_a_pattern_is_looked_for_in_both_outputs_and_shown(tmp_path: Path) -> None:
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    out.write_text("loading\n")
    err.write_text("***** FMS AccelerationFramework *****\nActive Plugin: foak. rest\n")
    claims = [
        Expectation("pattern", "plugin", r"Active Plugin: \w+"),
        Expectation("pattern", "none", "liger"),
        Expectation("fact", "attention", "sdpa"),
    ]
    found = [*check_expectations(claims, outputs=[out, err, tmp_path / "gone"], workload=RAN)]
    assert [claim["held"] for claim in found] == [True, False, True]
    assert found[0]["seen"] == "Active Plugin: foak. rest"
    assert broken_expectations(found) == "none: no line of the output has 'liger'"

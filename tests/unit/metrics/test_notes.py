"""The remarks beside the numbers: said when there is cause, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from ergmeter.metrics.evidence import Evidence
from ergmeter.metrics.notes import _above_one, _short
from ergmeter.records import Reading, Window

S = 10**9


@pytest.mark.parametrize(
    ("lasted_ns", "said"),
    [
        (
            S // 2,
            ["just 500 ms long: memory and CPU, read every 2 to 3 s, may be absent"],
        ),
        (3 * S, []),
    ],
)
def test_a_run_of_a_moment_says_why_memory_and_cpu_may_be_absent(
    lasted_ns: int, said: list[str]
) -> None:
    evidence = cast("Evidence", SimpleNamespace(watched=Window(0, lasted_ns)))
    assert _short(evidence) == said


def test_a_share_above_one_is_an_error_unless_it_is_a_share_of_one_core() -> None:
    high = Reading(1.5, "frac", "measured")
    (said,) = _above_one({"utilization.busy_frac": high, "overhead.cpu_frac": high})
    assert said.startswith("utilization.busy_frac is 1.5, more than all there is")

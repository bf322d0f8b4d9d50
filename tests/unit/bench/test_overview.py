"""Repeats of a configuration as one figure."""

from __future__ import annotations

from typing import Any

from ergmeter.bench.overview import of_repeats


def test_repeats_are_their_mean_memory_its_highest_and_nothing_is_nothing() -> None:
    rows: list[dict[str, Any]] = [
        {"loss": 1.0, "memory_hf_peak_bytes": 5, "runtime_s": None},
        {"loss": 4.0, "memory_hf_peak_bytes": 9, "runtime_s": None},
        {"loss": None, "memory_hf_peak_bytes": None, "runtime_s": None},
    ]
    assert of_repeats(rows, "loss") == 2.5
    assert of_repeats(rows, "memory_hf_peak_bytes") == 9
    assert of_repeats(rows, "runtime_s") is None

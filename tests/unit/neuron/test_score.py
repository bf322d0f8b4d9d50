"""The score, against the example of the guide."""

from __future__ import annotations

import pytest

from ergmeter.neuron.score import THROUGHPUT, Baseline, Score, with_rate
from ergmeter.records import Reading, Result


def test_the_guide_s_example_is_2_7324() -> None:
    base = Baseline(50.0, 100.0, loss_improvement=1.2, convergence_rate=1.1)
    found = Score(base, mfu_percent=60.0, seq_per_s=150.0, nki_ratio=0.15)
    assert (found.mfu_improvement, found.throughput_improvement) == (1.2, 1.5)
    assert found.value == pytest.approx(2.7324)
    assert found.without_nki == pytest.approx(1.2 * 1.5 * 1.2 * 1.1)


def test_the_offset_is_an_option() -> None:
    base = Baseline(50.0, 100.0, offset=0.1)
    found = Score(base, mfu_percent=50.0, seq_per_s=100.0, nki_ratio=0.15)
    assert found.value == pytest.approx(0.25)


def test_an_unknown_ratio_gives_no_score() -> None:
    found = Score(Baseline(), mfu_percent=25.0, seq_per_s=50.0, nki_ratio=None)
    assert found.value is None
    assert found.without_nki == 0.25


def test_what_is_not_known_leaves_the_other_factors() -> None:
    base = Baseline(loss_improvement=1.2, convergence_rate=1.1)
    found = Score(base, mfu_percent=None, seq_per_s=None, nki_ratio=0.15)
    assert (found.mfu_improvement, found.throughput_improvement) == (None, None)
    assert (found.value, found.without_nki) == (None, None)
    assert found.nki_factor == 1.15


def test_a_baseline_of_0_leaves_its_factor_at_1() -> None:
    found = Score(Baseline(0.0, -1.0), mfu_percent=60.0, seq_per_s=150.0, nki_ratio=0.5)
    assert found.value == 1.5


def test_factors_multiply_in_the_order_of_the_score() -> None:
    base = Baseline(50.0, 100.0, loss_improvement=1.2, convergence_rate=1.1)
    score = Score(base, mfu_percent=60.0, seq_per_s=150.0, nki_ratio=0.15)
    found = list(score.factors())
    assert [one.product for one in found] == pytest.approx([1.2, 1.8, 2.16, 2.376, 2.7324])
    assert found[0].doublings == pytest.approx(
        2.5849625 - 2.3219281, abs=1e-6
    )  # log2 of 6 and of 5


def test_a_rate_without_a_note_has_the_size_alone_as_its_note() -> None:
    rates: dict[str, Result] = {THROUGHPUT: Reading(2.0, "sequences/s", "reported")}
    tokens = with_rate(rates, "tokens", 4096, "4096 tokens a sequence")["throughput.tokens_per_s"]
    assert tokens == Reading(8192.0, "tokens/s", "reported", note="4096 tokens a sequence")

"""What a gate says of a figure: its change, the interval of it, the noise that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.bench.comparing import amount
from ergmeter.metrics.ratios import PAIRED
from ergmeter.units import significant

if TYPE_CHECKING:
    from ergmeter.bench.comparing import Figure


def change_in_words(found: Figure) -> str:
    """By how much, and from what to what."""
    return (
        f"{_shown(found.value, found)} ({amount(found, found.ref)} to {amount(found, found.new)})"
    )


def span_in_words(found: Figure) -> str:
    """The interval of the change."""
    assert found.low is not None
    assert found.high is not None
    if found.low == found.high:
        return "the same in every repeat"
    return f"{_shown(found.low, found)} to {_shown(found.high, found)}"


def _shown(value: float, found: Figure) -> str:
    if found.scale == "difference":
        return f"{'+' if value >= 0 else '-'}{significant(abs(value), 3)}"
    return f"{(value - 1.0) * 100:+.1f} %"


def noise_in_words(found: Figure) -> str:
    """How much runs scatter, and how many there were."""
    if found.noise is None:
        return found.basis
    size = (
        f"{significant(found.noise * 100, 2)} %"
        if found.scale == "ratio"
        else significant(found.noise, 2)
    )
    if found.basis == PAIRED:
        return f"the change scatters by {size} over {found.repeats[0]} cells"
    return f"runs scatter by {size} ({found.repeats[0]} of NEW, {found.repeats[1]} of REF)"

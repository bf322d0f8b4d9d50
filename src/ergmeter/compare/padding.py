"""Recognises that padding explains why samples/s and tokens/s go different ways.

transformers counts padding in tokens/s, so padding-free training can be faster in samples/s and
slower in tokens/s. The tokens of a sample tell the two apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.units import duration, significant

if TYPE_CHECKING:
    from ergmeter.compare.pairing import ConfigurationPair

COUNTED = "throughput.computed_tokens_per_s"
_SAMPLES, _TIME = "throughput.samples_per_s", "time.run_s"
# Packing a batch differently moves tokens per sample by a little; padding moves it by much.
_ALIKE = 0.01


def padding_remark(pair: ConfigurationPair) -> str:
    """How to read samples/s and tokens/s that go different ways; empty if they don't."""
    new, ref = ((side.mean(COUNTED), side.mean(_SAMPLES)) for side in (pair.new, pair.ref))
    if not all((*new, *ref)) or not counts_differ(pair):
        return ""
    (new_tokens, new_samples), (ref_tokens, ref_samples) = new, ref
    assert new_tokens and new_samples and ref_tokens and ref_samples  # noqa: PT018  one thing
    rate, pace = new_tokens / ref_tokens, new_samples / ref_samples
    if (rate - 1.0) * (pace - 1.0) >= 0.0:
        return ""
    each = ref_tokens / ref_samples, new_tokens / new_samples
    fewer, more = sorted(each)
    who = "REF" if each[0] > each[1] else "NEW"
    way, other = ("faster", "slower") if pace > 1.0 else ("slower", "faster")
    return (
        f"{way} by samples/s ({_percent(pace)}{_times(pair)}), yet {other} by tokens/s"
        f" ({_percent(rate)}): tokens/s counts padding. A sample was {significant(each[0], 3)}"
        f" tokens in REF and is {significant(each[1], 3)} in NEW; if the data is the same, at least"
        f" {(1.0 - fewer / more) * 100:.0f} % of what {who} counted was padding. Judge by time,"
        " samples/s or real tokens/s"
    )


def has_both_rates(pair: ConfigurationPair) -> bool:
    """True if both sides have samples/s and tokens/s, so that they could go different ways."""
    return all(side.mean(COUNTED) and side.mean(_SAMPLES) for side in (pair.new, pair.ref))


def counts_differ(pair: ConfigurationPair) -> bool:
    """True if tokens per sample differ by more than 1 %: tokens/s are then not comparable."""
    each = []
    for side in (pair.new, pair.ref):
        tokens, samples = side.mean(COUNTED), side.mean(_SAMPLES)
        if not tokens or not samples:
            return False
        each.append(tokens / samples)
    return abs(each[0] / each[1] - 1.0) > _ALIKE


def _percent(ratio: float) -> str:
    return f"{(ratio - 1.0) * 100:+.0f} %"


def _times(pair: ConfigurationPair) -> str:
    ref, new = pair.ref.mean(_TIME), pair.new.mean(_TIME)
    return f", {duration(ref)} to {duration(new)}" if ref and new else ""

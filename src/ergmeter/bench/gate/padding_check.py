"""Faster in seconds, slower in tokens per second: which is it?

The trap: transformers counts what is in a batch, padding included. A way of training that leaves
out the padding does the same samples in less time and counts fewer tokens a second: FMS's published
results have padding-free runs that took 23 % less time "at 15 % fewer tokens/s". Samples do not
depend on padding, so tokens a sample tell the two apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.units import duration, significant

if TYPE_CHECKING:
    from ergmeter.bench.gate.pairing import CellPair

_TOKENS, _SAMPLES, _TIME = "computed_tokens_per_s", "samples_per_s", "runtime_s"
# Packing a batch differently moves tokens a sample by a little; padding moves it by much.
_ALIKE = 0.01


def paradox(pair: CellPair) -> str:
    """What to make of samples/s and tokens/s that go different ways; empty if they don't."""
    new, ref = ((side.mean(_TOKENS), side.mean(_SAMPLES)) for side in (pair.new, pair.ref))
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


def tells_both(pair: CellPair) -> bool:
    """Whether both sides have samples/s and tokens/s, so that they could go different ways."""
    return all(side.mean(_TOKENS) and side.mean(_SAMPLES) for side in (pair.new, pair.ref))


def counts_differ(pair: CellPair) -> bool:
    """Whether a sample is of other tokens on the two sides: their tokens/s are not alike."""
    each = []
    for side in (pair.new, pair.ref):
        tokens, samples = side.mean(_TOKENS), side.mean(_SAMPLES)
        if not tokens or not samples:
            return False
        each.append(tokens / samples)
    return abs(each[0] / each[1] - 1.0) > _ALIKE


def _percent(ratio: float) -> str:
    return f"{(ratio - 1.0) * 100:+.0f} %"


def _times(pair: CellPair) -> str:
    ref, new = pair.ref.mean(_TIME), pair.new.mean(_TIME)
    if not ref or not new:
        return ""
    return f", {duration(ref)} to {duration(new)}"

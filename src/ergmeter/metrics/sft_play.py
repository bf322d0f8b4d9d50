"""What a row of the original SFT-Play can honestly be taken for.

Its trap: tokens of the whole run over the time after the warm-up, and energy after the warm-up over
tokens of the whole run. A run of 120 s with 60 s of warm-up reads twice as fast and half as thirsty
as it was; one that is shorter than its warm-up reads 1e14 tokens/s.

Nothing is recomputed silently. The rate given here is all tokens over all of the time, one span for
both. What the warm-up drew nobody measured: J/token is a range, from nothing to its peak power
throughout, and its value assumes the mean of the rest. 0 J is a sensor that did not work. Its MB
were MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.records import Missing, Reading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.records import Result

REMARK = (
    "the original's figures: all tokens over the time after warm-up; taken here as tokens over"
    " wall time"
)
ASSUMED = frozenset({"energy.joules_per_token"})
_NEAR = 1e-6


def is_original(row: Mapping[str, float]) -> bool:
    """Whether the rate is all tokens over the time after the warm-up, as the original had it.

    Its file says nothing of where it comes from, but its floats are not rounded: the identity holds
    to the last digits, and to none where tokens and time are of one window.
    """
    tokens, rate = row.get("tokens_processed"), row.get("tok_per_s")
    wall_s, warmup_s = row.get("wall_s"), row.get("warmup_s")
    if tokens is None or rate is None or wall_s is None or warmup_s is None:
        return False
    after_s = max(1e-9, wall_s - warmup_s)
    return abs(rate * after_s - tokens) <= _NEAR * max(tokens, 1.0)


def figures(row: Mapping[str, float]) -> dict[str, Result]:
    """The figures of a row of the original, by key of the catalogue."""
    wall_s, tokens = row["wall_s"], row["tokens_processed"]
    found: dict[str, Result] = {}
    if wall_s > 0:
        found["time.run_s"] = Reading(wall_s, "s", "reported")
        found["time.window_s"] = Reading(wall_s, "s", "reported", note="all of the run")
    if tokens > 0 and wall_s > 0:
        note = f"tokens over wall time; the row says {row['tok_per_s']:g}"
        found["throughput.tokens_per_s"] = Reading(
            tokens / wall_s, "tokens/s", "derived", note=note
        )
    elif tokens > 0:
        found["throughput.tokens_per_s"] = Missing("the row has no wall time above 0 s")
    else:
        why = "the row counts 0 tokens, as the original did for cpt, seq2seq and loader workers"
        found["throughput.tokens_per_s"] = Missing(why)
    found["energy.joules_per_token"] = _joules_per_token(row)
    for column, key in (
        ("vram_peak_MB", "memory.device_peak_bytes"),
        ("vram_avg_MB", "memory.device_mean_bytes"),
    ):
        if row.get(column):
            found[key] = Reading(row[column] * 2**20, "B", "reported", note="its MB were MiB")
    for column, key in (("avg_power_W", "energy.mean_w"), ("peak_power_W", "energy.peak_w")):
        if row.get(column):
            found[key] = Reading(row[column], "W", "reported", note="after the warm-up")
    return found


def _joules_per_token(row: Mapping[str, float]) -> Result:
    energy_j, tokens = row.get("energy_J") or 0.0, row["tokens_processed"]
    wall_s, warmup_s = row["wall_s"], row["warmup_s"]
    if wall_s <= warmup_s:
        return Missing("the run is shorter than its warm-up: no energy was measured")
    if energy_j <= 0:
        return Missing("the row has 0 J, which the original wrote where its sensor did not work")
    if tokens <= 0:
        return Missing("the row counts 0 tokens")
    peak_w = row.get("peak_power_W") or 0.0
    mean_w = energy_j / (wall_s - warmup_s)
    return Reading(
        mean_w * wall_s / tokens,
        "J/token",
        "assumed",
        low=energy_j / tokens,
        high=(energy_j + max(peak_w, mean_w) * warmup_s) / tokens,
        note="what its warm-up drew was not measured: between nothing and peak power throughout",
    )

"""`erg explain` in words: what its terminal, its Markdown and its page say alike.

The trap: three texts of one waterfall that drift apart. Each figure and each sentence is made here;
the page adds the drawing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.metrics.explain import levels
from ergmeter.records import Missing
from ergmeter.units import scaled, significant
from ergmeter.views.analyze_blocks import Grid, Items, Part, Words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.metrics.explain import Change, Explanation
    from ergmeter.metrics.explain_blocks import Block

NOTHING = "nothing can be told apart: no MFU, no readings of a device, no waits between steps"
_LEAST = 0.01  # percent, that a share is given to
_OF_JOULES = (
    "each block is what is lost beyond the ones above it; joules of waits and stalls of 0.2 s and"
    " more are as drawn, the others are divided by share"
)
WATERFALL = "from the peak to what was achieved"
_TITLE = WATERFALL.capitalize()
CHANGES = "most worth trying"
NOT_TOLD = "not told apart"
RECORD_NEXT = "to record next time"


def share(one: Block) -> str:
    """The share of the peak that a block takes; with a plus what it gives."""
    value = 100 * abs(one.share_frac)
    sign = "+" if one.share_frac < 0 else ""
    if 0 < value < _LEAST:
        return f"{sign}< {_LEAST} %"
    said = f"{value:.1f}" if value >= 0.05 or not value else significant(value, 1)
    return f"{sign}{said} %"


def joules(one: Block) -> str:
    """What a block drew; a gain has drawn nothing."""
    return "" if one.joules is None or one.share_frac < 0 else scaled(one.joules, "J")


def whole_joules(found: Explanation) -> str:
    """What the window drew, where that is known."""
    return "" if isinstance(found.energy, Missing) else scaled(found.energy.value, "J")


def said_of_joules(found: Explanation) -> str:
    """How blocks came to their joules, or why they have none."""
    if isinstance(found.energy, Missing):
        return f"no joules: {found.energy.reason}"
    return _OF_JOULES if found.blocks else ""


def gain(one: Change) -> str:
    """How much faster a change would make the run, at the most."""
    most = "less than" if one.is_bound else "up to"
    if one.gain_frac >= 1:
        return f"{most} {1 + one.gain_frac:.1f} times as fast"
    return f"{most} {100 * one.gain_frac:.0f} % faster"


def facts(one: Block) -> str:
    """The evidence of a block."""
    return "; ".join(f"{fact.key}: {fact.said}" for fact in one.facts)


def not_told(found: Explanation) -> dict[str, str]:
    """What is not told apart, by the reason that it shares."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.missing.items():
        by_reason.setdefault(why, []).append(name.removesuffix("_frac").replace("_", " "))
    return {why: ", ".join(names) for why, names in by_reason.items()}


def change_lines(found: Explanation) -> tuple[str, ...]:
    """What to try, what it would bring at the most, and what says so."""
    return tuple(f"{one.advice}. {gain(one).capitalize()}: {one.why}" for one in found.changes)


def explain_parts(found: Explanation) -> Iterator[Part]:
    """Everything, the waterfall as a table first."""
    if found.achieved is None:
        yield Part("waterfall-part", _TITLE, (Words(f"{NOTHING}."),))
    else:
        rows = tuple(
            (level.block.title, share(level.block), joules(level.block), level.block.basis)
            for level in levels(found)
        )
        peak = ("peak", "100.0 %", whole_joules(found), "")
        head = ("block", "of the peak", "joules", "how")
        table = Grid(WATERFALL, head, (peak, *rows))
        said = (Words(one) for one in (said_of_joules(found),) if one)
        yield Part("waterfall-part", _TITLE, (Words(f"100 % is {found.of}."), table, *said))
    lists = {
        ("remarks", "what to know"): found.remarks,
        ("changes", CHANGES): change_lines(found),
        ("not-told", NOT_TOLD): tuple(f"{names}: {why}" for why, names in not_told(found).items()),
        ("record-next", RECORD_NEXT): found.record_next,
    }
    for (id_, title), texts in lists.items():
        if texts:
            yield Part(id_, title.capitalize(), (Items(texts),))
    if found.achieved is not None:
        whole = (*found.blocks, found.achieved)
        seen = tuple((one.title, one.why, facts(one)) for one in whole)
        yield Part("evidence", "Evidence", (Grid("evidence", ("block", "is", "seen"), seen),))

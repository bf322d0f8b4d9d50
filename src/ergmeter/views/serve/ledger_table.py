"""In which order are the columns of a ledger shown, and which of them need no column?

The trap: a ledger has sixty columns, and a table of all of them is read by nobody. What people look
for comes first, what is the same in every row is said once, and a figure has as many digits as one
reads; its full value stays with it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.entries import EVAL_LOSS
from ergmeter.metrics.verdicts import DEVICE_MEMORY, HOST_MEMORY, JOULES, LOSS, RATE
from ergmeter.records import Reading
from ergmeter.units import significant
from ergmeter.views import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.metrics.entries import Entry

# By key of the catalogue or column of the ledger. They stay in the table, also where all are alike.
_FIRST = (
    *("backend", RATE, JOULES, DEVICE_MEMORY, HOST_MEMORY, LOSS, EVAL_LOSS),
    *("steps", "started", "status"),
)
# Where a title of the catalogue is another column's name, or does not say what it is of.
_HEADS = {"steps.count": "steps in the window", "time.run_s": "duration", EVAL_LOSS: "eval loss"}
_DIGITS = 5


def ledger_table(entries: Sequence[Entry]) -> dict[str, Any]:
    """Heads, and rows of cells with their full value; what all rows say alike, once."""
    columns = _columns(entries)
    cells = {one: [_cell(entry, one) for entry in entries] for one in columns}
    alike = [one for one in columns if one not in _FIRST and _is_same(cells[one])]
    shown = [one for one in columns if one not in alike]
    heads = _heads(columns)
    return {
        "heads": [heads[one] for one in shown],
        "rows": [[cells[one][row] for one in shown] for row in range(len(entries))],
        "alike": [{"head": heads[one], **cells[one][0]} for one in alike],
    }


def _columns(entries: Sequence[Entry]) -> list[str]:
    """What some row has, the important first, then figures, then facts."""
    figures = dict.fromkeys(
        key for entry in entries for key in entry.figures if entry.value(key) is not None
    )
    there = [*figures, *dict.fromkeys(name for entry in entries for name in entry.facts)]
    return [*(one for one in _FIRST if one in there), *(one for one in there if one not in _FIRST)]


def _heads(columns: Sequence[str]) -> dict[str, str]:
    known = catalogue()
    titles = {one: known[one].title if one in known else one for one in columns}
    titles |= {one: _HEADS[one] for one in columns if one in _HEADS}
    often = Counter(titles.values())
    return {one: f"{said} ({one})" if often[said] > 1 else said for one, said in titles.items()}


def _cell(entry: Entry, column: str) -> dict[str, str]:
    """What is shown, and in full."""
    found = entry.figures.get(column)
    if isinstance(found, Reading):
        text = terminal.value(found).removesuffix(" 1")
        return {"text": text, "title": f"{found.value:.17g} {found.unit}".removesuffix(" 1")}
    said = entry.facts.get(column)
    if said is None:
        return {"text": "-", "title": entry.why_not(column) if found else "not said"}
    return {"text": _rounded(said), "title": said}


def _rounded(said: str) -> str:
    """A fraction of many digits with few; versions, whole numbers and words as they are."""
    if len(said) <= _DIGITS + 2 or not said.lstrip("-").replace(".", "", 1).isdigit():
        return said
    return significant(float(said), _DIGITS) if "." in said else said


def _is_same(cells: Sequence[dict[str, str]]) -> bool:
    return len({one["title"] for one in cells}) == 1

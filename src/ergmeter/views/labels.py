"""What people said of a run, its tags and notes, as lines that any view can show.

The trap: a label that costs the figures. Labels are written by hand and by other tools; where they
can't be read that is a line too, and the rest of the view is as it would be without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.runlog.manage.labels import labels_of
from ergmeter.units import printable

if TYPE_CHECKING:
    from ergmeter.runlog.reader import Run


def label_lines(run: Run) -> list[tuple[str, str]]:
    """The tags in one line, each note in its own: what it is, and what was said."""
    try:
        found = labels_of(run.path)
    except FormatError as error:
        return [("tags and notes", f"can't be read: {printable(str(error))}")]
    tags = [("tags", ", ".join(map(printable, found.tags)))] if found.tags else []
    return [
        *tags,
        *((f"note of {printable(at)[:10]}", printable(said)) for at, said in found.notes),
    ]


def label_document(run: Run) -> dict[str, Any]:
    """The same for programs, as it was written; or why it can't be read."""
    try:
        found = labels_of(run.path)
    except FormatError as error:
        return {"missing": str(error)}
    return {
        "tags": list(found.tags),
        "notes": [{"at": at, "text": said} for at, said in found.notes],
    }

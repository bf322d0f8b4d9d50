"""Lines of a training loop, and what the key=value importer makes of them."""

from __future__ import annotations

from ergmeter.importers.engine.parsed_line import Mode
from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.ports import Line
from ergmeter.records import Record

S = 1_000_000_000


def live(*timed: tuple[float, str], tokens_are: Mode | None = None) -> list[Record]:
    lines = [Line(text, round(t_s * S)) for t_s, text in timed]
    return list(KeyValueImporter(tokens_are=tokens_are).records(lines))


def from_file(*texts: str) -> list[Record]:
    return list(KeyValueImporter().records([Line(text) for text in texts]))

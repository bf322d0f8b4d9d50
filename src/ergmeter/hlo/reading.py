"""Chooses the reader that indexes a module, and builds the index from what it gives.

There are three readers: a compiled one, one on protobuf's C parser and one in plain Python. They
must agree, so the other two pass anything unusual to the plain one, and only that one reports
damage.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ergmeter.errors import PluginError
from ergmeter.hlo import compiled, protobuf
from ergmeter.hlo.module import (
    ID,
    MODULE_COMPUTATION,
    MODULE_ENTRY_ID,
    MODULE_ENTRY_NAME,
    MODULE_NAME,
    MODULE_PAYLOAD,
    Computation,
    Computations,
    Module,
    module_fields,
)
from ergmeter.hlo.plain import Index, PlainParser, frames
from ergmeter.hlo.wire import Buffer, Malformed, Span, Unparsed, integer, message, spans, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.hlo.plain import Dot, Parsed, Parser


def index(data: Buffer, where: Span, parsed: Parsed | Index) -> Index:
    """Indexes a parsed computation."""
    if isinstance(parsed, Index):
        return parsed
    noted = parsed.noted
    computation = None
    if noted.matters:
        places = _Places(data, where, parsed)
        computation = _computation(parsed, places)
        computation.calls, computation.applied, computation.special = (
            noted.calls,
            noted.applied,
            noted.special,
        )
        if parsed.row:
            computation.encoded = {number: parsed.row(number) for number in noted.special}
        if noted.dots:
            _add_dots(computation, noted.dots, parsed, places.number(parsed.ids))
    return Index(parsed.id, parsed.instructions, noted.literal_bytes, computation)


def idle_computation(data: Buffer, where: Span) -> Computation:
    """A computation that neither multiplies nor calls; a loop's condition is one."""
    (parsed,) = PlainParser().parsed(data, [where])
    return _computation(parsed, _Places(data, where, parsed))


def _computation(parsed: Parsed, places: _Places) -> Computation:
    name = parsed.name.decode(errors="replace")
    return Computation(
        id=parsed.id,
        name=name,
        root_id=parsed.root_id,
        places=places,
        instructions=parsed.instructions,
    )


class _Places:
    """Instruction spans by id and index, gathered at first use."""

    __slots__ = ("_data", "_framed", "_ids", "_span", "_sure")

    def __init__(self, data: Buffer, where: Span, parsed: Parsed) -> None:
        self._data, self._span, self._framed = data, where, parsed.frames
        self._sure = parsed.sure
        self._ids: dict[int, int] | None = None

    def by_id(self, member: int) -> Span | None:
        if self._ids is None:
            (parsed,) = PlainParser().parsed(self._data, [self._span])
            self._sure = True
            self.number(parsed.ids)
        index = (self._ids or {}).get(member)
        where = None if index is None else self.by_index(index)
        if not self._sure and (not where or not member or self._id(where) != member):
            raise Unparsed
        return where

    def by_index(self, index: int) -> Span:
        if self._framed is None:
            self._framed = frames(self._data, *self._span)
        return self._framed.starts[index], self._framed.ends[index]

    def number(self, ids: Sequence[int]) -> dict[int, int]:
        """Note the index of each id; not of 0 if several have it, which are those without an id."""
        numbers = self._ids = dict(zip(ids, range(len(ids)), strict=True))
        if len(numbers) != len(ids):
            if not self._sure:
                raise Unparsed
            without = ids.count(0)
            numbers.pop(0, None)
            if len(numbers) + without != len(ids):
                raise Malformed("two instructions of one id in a computation", self._span[0])
        return numbers

    def _id(self, where: Span) -> int:
        return integer(message(self._data, *where), ID)


def _add_dots(
    computation: Computation, dots: list[Dot], parsed: Parsed, numbers: dict[int, int]
) -> None:
    """Note dots, those of the same shapes together; one without its operand is a special case."""
    computation.special += [number for number, left, _, _ in dots if left not in numbers]
    # Each operand once: many dots may share a large one.
    members = [*{left: None for _, left, _, _ in dots if left is not None and left in numbers}]
    of_members = parsed.shapes([numbers[member] for member in members], members)
    lefts: dict[int | None, bytes] = dict(zip(members, of_members, strict=True))
    for number, member, shape, dimensions in dots:
        if member not in lefts:
            continue
        shapes = (shape, lefts[member], dimensions)
        group = computation.dots.get(shapes)
        if group:
            group[0] += 1
        else:
            computation.dots[shapes] = [1, number]


_NEEDS = {
    "compiled": "a C compiler (cc) and ERGMETER_COMPILED not set to 0",
    "protobuf": "protobuf with its C parser: pip install 'ergmeter[hlo]'",
}


def read(data: Buffer, *, reader: str | None = None) -> Module:
    """Index the module in `data`, an HloModuleProto or an HloProto around one."""
    library = _library() if reader in (None, "compiled") else None
    module = library.module(data) if library else None
    if module:
        return module
    # Not before: to load protobuf takes as long as a dozen files take the compiled reader.
    parser = protobuf.parser() if reader in (None, "protobuf") else None
    if (reader == "compiled" and not library) or (reader == "protobuf" and not parser):
        raise PluginError(f"no {reader} HLO reader here: it needs {_NEEDS[reader]}")
    return _parsed(data, parser)


def _parsed(data: Buffer, parser: Parser | None) -> Module:
    fields, start = module_fields(data)
    places = spans(fields, MODULE_COMPUTATION)
    if not places:
        raise Malformed("it has no computations", start)
    every = (parser or PlainParser()).parsed(data, places)
    listed = [index(data, where, parsed) for where, parsed in zip(places, every, strict=True)]

    def make(number: int) -> Computation:
        return listed[number].computation or idle_computation(data, places[number])

    return Module(
        data=data,
        name=text(data, fields, MODULE_NAME),
        entry_id=integer(fields, MODULE_ENTRY_ID),
        entry_name=text(data, fields, MODULE_ENTRY_NAME),
        payloads=spans(fields, MODULE_PAYLOAD),
        computations=Computations.of(
            [entry.id for entry in listed],
            make,
            idle={entry.id for entry in listed if entry.computation is None},
            instructions=sum(entry.instructions for entry in listed),
            literal_bytes=sum(entry.literal_bytes for entry in listed),
        ),
        reader="protobuf" if parser else "python",
        fields=fields,
    )


def reader_name() -> str:
    """The default reader on this machine."""
    if _library():
        return "compiled"
    return "protobuf" if protobuf.parser() else "python"


def _library() -> compiled.Library | None:
    return None if os.environ.get("ERGMETER_COMPILED") == "0" else compiled.library()

"""Reads a module into its index: with compiled code, else in Python.

Both readers must agree. So the compiled one leaves everything unusual to the Python one, which
checks every field of every instruction and alone reports damage, with its offset.

An object for each instruction would take longer than parsing it. So the Python reader makes columns
(the opcodes, ids and shapes of a computation), and parses only the instructions that matter.
"""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from typing import NamedTuple

from ergmeter.errors import PluginError, UsageError
from ergmeter.hlo import compiled, proto
from ergmeter.hlo.module import Computation, Computations, Instruction, Module, module_fields
from ergmeter.hlo.wire import (
    SIZE_BITS,
    Buffer,
    Fields,
    Malformed,
    Span,
    field,
    integer,
    message,
    short,
    span,
    spans,
    text,
)

READERS = ("compiled", "python")
_INSTRUCTION_TAG, _OPCODE_TAG, _SHAPE_TAG = (
    number << 3 | 2 for number in (proto.COMPUTATION_INSTRUCTION, proto.OPCODE, proto.SHAPE)
)
_SHORT_TAGS = frozenset(number << 3 | 2 for number in range(1, 16))
_COLUMNS = frozenset([proto.OPCODE, proto.SHAPE, proto.ID, proto.OPERAND_IDS, proto.CALLED_IDS])


def read(data: Buffer, *, reader: str | None = None) -> Module:
    """Index the module in `data`, an HloModuleProto or an HloProto around one."""
    if reader is not None and reader not in READERS:
        raise UsageError(f"no HLO reader {reader!r}: pass {' or '.join(READERS)}, or leave it out")
    library = None if reader == "python" else _library()
    if reader == "compiled" and not library:
        needs = "a C compiler (cc) and ERGMETER_COMPILED not set to 0"
        raise PluginError(f"no compiled HLO reader here: it needs {needs}")
    return (library and library.module(data)) or _read(data)


def reader_name() -> str:
    """The default reader on this machine."""
    return "compiled" if _library() else "python"


def _library() -> compiled.Library | None:
    return None if os.environ.get("ERGMETER_COMPILED") == "0" else compiled.library()


def _read(data: Buffer) -> Module:
    """The module, read in Python. Raises Malformed if it is damaged."""
    fields, start = module_fields(data)
    every = [_computation(data, where) for where in spans(fields, proto.MODULE_COMPUTATION)]
    if not every:
        raise Malformed("it has no computations", start)
    return Module(
        data=data,
        name=text(data, fields, proto.MODULE_NAME),
        entry_id=integer(fields, proto.MODULE_ENTRY_ID),
        entry_name=text(data, fields, proto.MODULE_ENTRY_NAME),
        payloads=spans(fields, proto.MODULE_PAYLOAD),
        computations=Computations(
            [computation.id for computation in every],
            every.__getitem__,
            idle={computation.id for computation in every if computation.is_idle},
            instructions=sum(computation.instructions for computation in every),
            literal_bytes=sum(computation.literal_bytes for computation in every),
        ),
        reader="python",
        fields=fields,
    )


def _computation(data: Buffer, where: Span) -> Computation:
    framed = _frames(data, *where)
    opcodes, ids, shapes = _columns(data, framed)
    places = _Places(framed, ids, where[0])
    computation = Computation(
        id=integer(framed.others, proto.COMPUTATION_ID),
        name=text(data, framed.others, proto.COMPUTATION_NAME),
        root_id=integer(framed.others, proto.COMPUTATION_ROOT_ID),
        places=places,
        instructions=len(ids),
    )
    quiet = proto.QUIET_OPCODES
    for index, opcode in enumerate(opcodes):
        if opcode not in quiet:
            where = places.by_index(index)
            instruction = Instruction(data, message(data, *where), where)
            kind = proto.KINDS.get(opcode, proto.OTHER)
            if kind == proto.DOT:
                _add_dot(computation, index, instruction, places, shapes)
            else:
                _add(computation, index, instruction, kind)
    return computation


def _add(computation: Computation, index: int, instruction: Instruction, kind: int) -> None:
    if kind == proto.CONSTANT:
        start, end = span(instruction.fields, proto.LITERAL) or (0, 0)
        computation.literal_bytes += end - start
    elif kind == proto.SPECIAL:
        computation.special.append(index)
    elif kind == proto.APPLYING:
        computation.applied += instruction.called_ids
    else:
        for callee in instruction.called_ids:
            computation.calls += (callee, index)


def _add_dot(
    computation: Computation, index: int, dot: Instruction, places: _Places, shapes: list[bytes]
) -> None:
    """Note a dot with those of the same shapes; one without its operand is a special case."""
    operands = dot.operand_ids
    left = places.numbers.get(operands[0]) if operands else None
    if left is None:
        computation.special.append(index)
        return
    key = (shapes[index], shapes[left], dot.encoded(proto.DOT_DIMENSIONS))
    computation.dots.setdefault(key, [0, index])[0] += 1


class _Frames(NamedTuple):
    """Where the instructions of a computation lie, and its other fields."""

    starts: list[int]
    ends: list[int]
    others: Fields


class _Places:
    """Instruction spans by id and index; ids are looked at when one is asked for."""

    __slots__ = ("_framed", "_ids", "_numbers", "_start")

    def __init__(self, framed: _Frames, ids: list[int], start: int) -> None:
        self._framed, self._ids, self._start = framed, ids, start
        self._numbers: dict[int, int] | None = None

    def by_id(self, member: int) -> Span | None:
        index = self.numbers.get(member)
        return None if index is None else self.by_index(index)

    def by_index(self, index: int) -> Span:
        return self._framed.starts[index], self._framed.ends[index]

    @property
    def numbers(self) -> dict[int, int]:
        """The index of each id; not of 0 if several have it, which are those without an id."""
        if self._numbers is None:
            ids = self._ids
            numbers = dict(zip(ids, range(len(ids)), strict=True))
            if len(numbers) != len(ids):
                without = ids.count(0)
                numbers.pop(0, None)
                if len(numbers) + without != len(ids):
                    raise Malformed("two instructions of one id in a computation", self._start)
            self._numbers = numbers
        return self._numbers


def _frames(data: Buffer, start: int, end: int) -> _Frames:
    """Finds the instructions of a computation by their lengths."""
    starts: list[int] = []
    ends: list[int] = []
    others: Fields = {}
    at = last = start
    try:
        while at < end:
            last = at
            if data[at] == _INSTRUCTION_TAG:
                size = data[at + 1]
                at += 2
                if size > 0x7F:
                    size, at = short(data, at - 1, bits=SIZE_BITS)
                starts.append(at)
                at += size
                ends.append(at)
                continue
            number, value, at = field(data, at)
            if number == proto.COMPUTATION_INSTRUCTION and isinstance(value, tuple):
                starts.append(value[0])
                ends.append(at)
            elif value is not None:
                others.setdefault(number, []).append(value)
    except IndexError:
        raise Malformed("cut short", last) from None
    if at != end:
        raise Malformed("a field longer than what holds it", last)
    return _Frames(starts, ends, others)


def _lists() -> bytes:
    """A pattern for a packed list of up to 35 bytes, which is five ids of an optimised module.

    The last byte ends a number; none has more than ten bytes.
    """
    kinds = [rb"\x00"]
    for size in range(1, 36):
        no_longer = rb"(?!.{0,%d}[\x80-\xff]{10})" % (size - 10) if size > 10 else b""
        kinds.append(rb"\x%02x%s.{%d}[\x00-\x7f]" % (size, no_longer, size - 1))
    return rb"(?:" + rb"|".join(kinds) + rb")"


@lru_cache(maxsize=1)
def _end() -> re.Pattern[bytes]:
    """A pattern of the end of nearly every instruction.

    With its id, the ids of operands and callees, and two empty messages (frontend attributes and
    statistics). Compiled when it is first needed, since that takes as long as a file.
    """
    parts = (
        rb"\x98\x02([\x80-\xff]{0,8}[\x00-\x7f])",
        rb"(?:\xa2\x02%s)?" % _lists(),
        rb"(?:\xb2\x02%s)?" % _lists(),
        rb"(?:\xa2\x04\x00)?(?:\x92\x05\x00)?",
    )
    return re.compile(b"".join(parts), re.DOTALL)


def _columns(data: Buffer, framed: _Frames) -> tuple[list[bytes], list[int], list[bytes]]:
    """The opcode, the id and the shape of each instruction."""
    opcodes: list[bytes] = []
    ids: list[int] = []
    shapes: list[bytes] = []
    high, ended, short_tags = _High(), _end().match, _SHORT_TAGS
    for start, end in zip(framed.starts, framed.ends, strict=True):
        at, member = start, 0
        opcode = shape = b""
        try:
            while at < end:
                tag, size = data[at], data[at + 1]
                if tag in short_tags and size < 0x80:
                    at += 2
                    if tag == _OPCODE_TAG:
                        opcode = data[at : at + size]
                    elif tag == _SHAPE_TAG:
                        shape = data[at : at + size]
                    at += size
                elif match := ended(data, at, end):
                    at = match.end()
                    raw = int.from_bytes(match[1], "little")
                    member = (raw & 0x7F | raw >> 1 & 0x3F80) + high[raw >> 16]
                else:
                    at = _past_other(data, at)
        except IndexError:
            at = -1
        if at != end:
            opcode, member, shape = _checked(data, start, end)
        opcodes.append(opcode)
        ids.append(member)
        shapes.append(shape)
    return opcodes, ids, shapes


def _checked(data: Buffer, start: int, end: int) -> tuple[bytes, int, bytes]:
    """The same of an unusual instruction. Raises Malformed where it is damaged."""
    instruction = Instruction(data, message(data, start, end), (start, end))
    _ = instruction.operand_ids, instruction.called_ids
    return (
        instruction.encoded(proto.OPCODE),
        instruction.integer(proto.ID),
        instruction.encoded(proto.SHAPE),
    )


def _past_other(data: Buffer, at: int) -> int:
    """The end of a field that is in no column; sys.maxsize for one that is."""
    number, _, after = field(data, at)
    return sys.maxsize if number in _COLUMNS else after


class _High(dict[int, int]):
    """Caches the value of a varint's bytes from the third on; most ids share them."""

    def __missing__(self, raw: int) -> int:
        value, shift, rest = 0, 14, raw
        while rest:
            value |= (rest & 0x7F) << shift
            rest, shift = rest >> 8, shift + 7
        self[raw] = value
        return value

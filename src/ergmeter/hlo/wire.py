"""Reads protobuf messages without a schema, skipping the fields that are not needed.

A literal of hundreds of megabytes is skipped by its length prefix, so its pages are never read.
Damage is whatever protobuf's own parser refuses, and groups, which HLO does not have.
"""

from __future__ import annotations

import mmap
from typing import TypeAlias

Buffer: TypeAlias = bytes | mmap.mmap
Span: TypeAlias = tuple[int, int]
Fields: TypeAlias = dict[int, list[int | Span]]

_VARINT, _BYTES = 0, 2  # wire types; groups are none of proto3, in which HLO is written
_FIXED_BYTES = {1: 8, 5: 4}
_TAG_BITS, _SIZE_BITS = 32, 31


class Malformed(Exception):  # noqa: N818  becomes a FormatError where the file's name is known
    """Damaged bytes, at `offset`."""

    def __init__(self, what: str, offset: int) -> None:
        super().__init__(what)
        self.what, self.offset = what, offset


class Unparsed(Exception):  # noqa: N818  not an error: protobuf is asked
    """The compiled reader met something it can't read."""


def varint(data: Buffer, at: int) -> tuple[int, int]:
    """An unsigned number of at most 64 bits, and where it ends."""
    value = data[at]
    start = at
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift == 70:
            raise Malformed("a number of more than ten bytes", start)


def short(data: Buffer, at: int, *, bits: int) -> tuple[int, int]:
    """A tag or a length: five bytes at most."""
    value, after = data[at], at + 1
    if value > 0x7F:
        byte = data[after]
        if byte < 0x80:
            return value & 0x7F | byte << 7, after + 1
        value, after = varint(data, at)
    if after - at > 5 or value >> bits:
        raise Malformed("a tag or a length out of range", at)
    return value, after


def signed(value: int) -> int:
    """A varint as the int64 that it stands for."""
    return value - (1 << 64) if value >> 63 else value


def field(data: Buffer, at: int) -> tuple[int, int | Span | None, int]:
    """The number of the field that begins here, its value, and where the next one begins.

    The value is a number or, of what has a length, a span; None for kinds that HLO does not use.
    """
    start = at
    tag = data[at]
    at += 1
    if tag > 0x7F:
        tag, at = short(data, start, bits=_TAG_BITS)
    if tag < 8:
        raise Malformed("a field numbered 0", start)
    wire = tag & 7
    if wire == _BYTES:
        size = data[at]
        at += 1
        if size > 0x7F:
            size, at = short(data, at - 1, bits=_SIZE_BITS)
        return tag >> 3, (at, at + size), at + size
    if wire == _VARINT:
        value, at = varint(data, at)
        return tag >> 3, value, at
    if wire not in _FIXED_BYTES:
        raise Malformed("no field of a message", at)
    return tag >> 3, None, at + _FIXED_BYTES[wire]


def message(data: Buffer, start: int, end: int) -> Fields:
    """Every field between two offsets.

    Reads a few bytes past `end` at worst: what runs over is seen at the end, since offsets only
    grow.
    """
    fields: Fields = {}
    value: int | Span | None
    at = last = start
    try:
        while at < end:
            last = at
            tag = data[at]
            if tag & 0x87 == _BYTES < tag:  # as in nearly all
                size = data[at + 1]
                at += 2
                if size > 0x7F:
                    size, at = short(data, at - 1, bits=_SIZE_BITS)
                number, value, at = tag >> 3, (at, at + size), at + size
            else:
                number, value, at = field(data, at)
            if value is None:
                continue
            if number in fields:
                fields[number].append(value)
            else:
                fields[number] = [value]
    except IndexError:
        raise Malformed("cut short", last) from None
    if at != end:
        raise Malformed("a field longer than what holds it", last)
    return fields


def spans(fields: Fields, number: int) -> list[Span]:
    """The spans of a field; values of other wire types are ignored."""
    return [value for value in fields.get(number, ()) if isinstance(value, tuple)]


def span(fields: Fields, number: int) -> Span | None:
    """The last span of a field, as in protobuf; None if absent."""
    every = spans(fields, number)
    return every[-1] if every else None


def integer(fields: Fields, number: int) -> int:
    """An int64, the last one given; 0 where there is none."""
    numbers = [value for value in fields.get(number, ()) if isinstance(value, int)]
    return signed(numbers[-1]) if numbers else 0


def integers(data: Buffer, fields: Fields, number: int) -> list[int]:
    """A repeated int64, packed or not."""
    values: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            values.append(signed(value))
        else:
            values += packed(data, value)
    return values


def packed(data: Buffer, where: Span) -> list[int]:
    """The int64s that stand one after another in a span."""
    at, end = where
    values = []
    try:
        while at < end:
            value = data[at]
            at += 1
            if value > 0x7F:
                value, at = varint(data, at - 1)
            values.append(signed(value))
    except IndexError:
        raise Malformed("cut short", where[0]) from None
    if at != end:
        raise Malformed("a number longer than what holds it", where[0])
    return values


def encoded(data: Buffer, fields: Fields, number: int) -> bytes:
    """The bytes of a string or a message; empty where there is none."""
    where = span(fields, number)
    return data[where[0] : where[1]] if where else b""


def text(data: Buffer, fields: Fields, number: int) -> str:
    """A string; what is not UTF-8 in it is replaced."""
    return encoded(data, fields, number).decode(errors="replace")

"""Reads protobuf messages without a schema, skipping the fields that are not needed.

A literal of hundreds of megabytes is skipped by its length prefix, so its pages are never read.
Malformed is raised for anything that protobuf's own parser refuses, and for groups, which HLO does
not use.
"""

from __future__ import annotations

import mmap
from typing import TypeAlias

Buffer: TypeAlias = bytes | mmap.mmap
Span: TypeAlias = tuple[int, int]
Fields: TypeAlias = dict[int, list[int | Span]]

_VARINT, _BYTES = 0, 2  # wire types; HLO is proto3, which has no groups
_FIXED_BYTES = {1: 8, 5: 4}
_TAG_BITS, _SIZE_BITS = 32, 31


class Malformed(Exception):  # noqa: N818  becomes a FormatError where the file's name is known
    """The bytes at `offset` are damaged or are not an HLO module."""

    def __init__(self, what: str, offset: int) -> None:
        super().__init__(what)
        self.what, self.offset = what, offset


class Unparsed(Exception):  # noqa: N818  not an error: protobuf reads it instead
    """The compiled reader can't read this module."""


def varint(data: Buffer, at: int) -> tuple[int, int]:
    """Return the unsigned varint at `at`, of at most 64 bits, and the offset after it."""
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
    """Return the tag or length at `at`, of at most 5 bytes, and the offset after it."""
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
    """Return the int64 that a varint encodes."""
    return value - (1 << 64) if value >> 63 else value


def field(data: Buffer, at: int) -> tuple[int, int | Span | None, int]:
    """Return the number of the field at `at`, its value, and the offset after it.

    The value is an integer, or a span for length-delimited types; None for types that HLO does not
    use.
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
    """Return all fields of the message between two offsets.

    It may read a few bytes past `end` before it raises Malformed for a field that is too long.
    """
    fields: Fields = {}
    value: int | Span | None
    at = last = start
    try:
        while at < end:
            last = at
            tag = data[at]
            if tag & 0x87 == _BYTES < tag:  # nearly all fields
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
        raise Malformed("a field that is longer than its message", last)
    return fields


def spans(fields: Fields, number: int) -> list[Span]:
    """Return the spans of a field; values of other wire types are ignored."""
    return [value for value in fields.get(number, ()) if isinstance(value, tuple)]


def span(fields: Fields, number: int) -> Span | None:
    """Return the last span of a field, as protobuf does; None if absent."""
    every = spans(fields, number)
    return every[-1] if every else None


def integer(fields: Fields, number: int) -> int:
    """Return the last int64 of a field; 0 if absent."""
    numbers = [value for value in fields.get(number, ()) if isinstance(value, int)]
    return signed(numbers[-1]) if numbers else 0


def integers(data: Buffer, fields: Fields, number: int) -> list[int]:
    """Return the values of a repeated int64 field, packed or not."""
    values: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            values.append(signed(value))
        else:
            values += packed(data, value)
    return values


def packed(data: Buffer, where: Span) -> list[int]:
    """Return the packed int64s in a span."""
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
        raise Malformed("a number that is longer than its field", where[0])
    return values


def encoded(data: Buffer, fields: Fields, number: int) -> bytes:
    """Return the bytes of a string or message field; empty if absent."""
    where = span(fields, number)
    return data[where[0] : where[1]] if where else b""


def text(data: Buffer, fields: Fields, number: int) -> str:
    """Return a string field; bytes that are not UTF-8 are replaced."""
    return encoded(data, fields, number).decode(errors="replace")

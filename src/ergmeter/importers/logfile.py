"""Reads a log of any size in little memory, and chooses the importer that reads it.

A line may be 100 MB long. A log that was truncated while a program wrote to it holds gigabytes of
NUL bytes, and a progress bar ends its lines with \r. So a log is read in blocks. NULs are dropped,
lines end at \r too and are cut at 64 KiB. Only lines with a word that an importer looks for are
decoded.
"""

from __future__ import annotations

import codecs
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeAlias

from ergmeter import registry
from ergmeter.errors import FormatError, PluginError, UsageError
from ergmeter.ports import Importer, Line, LineHints

MAX_LINE_BYTES = 65_536
STDIN = "-"
_BLOCK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_TELL_EVERY_S = 0.1
_FIRST = 3  # lines kept for a message

Progress: TypeAlias = "Callable[[int], None]"


class LogFile:
    """Reads a log once: `lines` can be called only once.

    `words` may be changed while reading, once it is known which lines are wanted.
    """

    def __init__(self, path: str | Path, *, progress: Progress | None = None) -> None:
        self.path = str(path)
        self.words: LineHints | None = None  # None: every line is wanted
        self.bytes_read = 0  # as they are in the file: of a compressed one, compressed
        self.line_count = 0
        self.first_texts: list[str] = []  # for a message that nothing was recognised
        self.is_cut_off = False  # the compressed data ends half way
        self._progress = progress
        self._told_s = 0.0

    def lines(self) -> Iterator[Line]:
        """The lines that hold one of the words, as text."""
        with _opened(self.path) as raw:
            for lines in _whole_lines(self._blocks(raw)):
                self.line_count += lines.count(b"\n")
                if len(self.first_texts) < _FIRST:
                    self._keep_first(lines)
                words = self.words
                for line, end in _with_words(lines, words):
                    yield Line(line.decode("utf-8", errors="replace"))
                    if words is not None and self.words is None:  # from here on all of them
                        for rest, _ in _with_words(lines[end + 1 :], None):
                            yield Line(rest.decode("utf-8", errors="replace"))
                        break
        if self._progress:
            self._progress(self.bytes_read)

    def _keep_first(self, lines: bytes) -> None:
        texts = lines[:4096].decode("utf-8", errors="replace").split("\n")
        self.first_texts = [*self.first_texts, *(text for text in texts if text.strip())][:_FIRST]

    def _blocks(self, raw: IO[bytes]) -> Iterator[bytes]:
        """The log's bytes: unpacked, as UTF-8, without NULs, with one kind of line end."""
        decoder, ends_in_cr = None, False
        for number, data in enumerate(self._unpacked(raw)):
            if number == 0 and data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            block = decoder.decode(data).encode() if decoder else data
            block = block.removeprefix(codecs.BOM_UTF8) if number == 0 else block
            block = block.replace(b"\0", b"") if b"\0" in block else block
            is_second_half = ends_in_cr and block.startswith(b"\n")  # of the end of a line
            ends_in_cr = block.endswith(b"\r") if block else ends_in_cr
            if b"\r" in block:
                block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            yield block[1:] if is_second_half else block

    def _unpacked(self, raw: IO[bytes]) -> Iterator[bytes]:
        data = raw.read(_BLOCK_BYTES)
        if data[:2] == _GZIP:
            yield from self._gunzipped(data, raw)
            return
        while data:
            self._count(len(data))
            yield data
            data = raw.read(_BLOCK_BYTES)

    def _gunzipped(self, data: bytes, raw: IO[bytes]) -> Iterator[bytes]:
        """Unpack gzip data member by member: a log of several packed parts has several."""
        unpack, begun = zlib.decompressobj(wbits=31), False
        while data:
            self._count(len(data))
            while data:
                begun = True
                try:
                    block = unpack.decompress(data, _BLOCK_BYTES)
                except zlib.error as error:
                    raise FormatError(f"{self.path}: damaged gzip data ({error})") from error
                if block:
                    yield block
                data = unpack.unconsumed_tail
                if unpack.eof:
                    data, begun = unpack.unused_data.lstrip(b"\0"), False
                    unpack = zlib.decompressobj(wbits=31)
            data = raw.read(_BLOCK_BYTES)
        # What is left begins no member: an archive that ends half way, or was packed to its end.
        self.is_cut_off = begun

    def _count(self, more: int) -> None:
        self.bytes_read += more
        now_s = time.monotonic()
        if self._progress and now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._progress(self.bytes_read)


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes in pieces that end at line ends; of an overlong line, only its start."""
    rest = b""
    for block in blocks:
        if len(rest) >= MAX_LINE_BYTES:  # the end of this line is not wanted
            end = block.find(b"\n")
            block = b"" if end < 0 else block[end:]
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = b""
        rest = (rest + block[cut:])[:MAX_LINE_BYTES]
    if rest:
        yield rest + b"\n"


def _with_words(lines: bytes, words: LineHints | None) -> Iterator[tuple[bytes, int]]:
    """Yield the lines with one of the words, in order and cut to the limit, and where each ends.

    A word is looked for in all lines at once: where few have one, that is several times as fast as
    line by line.
    """
    if words is None:
        for line in lines.split(b"\n")[:-1]:
            yield line[:MAX_LINE_BYTES], 0
        return
    searched = lines.lower() if words.folds_case else lines
    starts: set[int] = set()
    for word in words.any_of:
        at = searched.find(word)
        while at >= 0:
            starts.add(searched.rfind(b"\n", 0, at) + 1)
            at = searched.find(word, searched.find(b"\n", at))
    for start in sorted(starts):
        end = lines.find(b"\n", start)
        yield lines[start : min(end, start + MAX_LINE_BYTES)], end


def _opened(path: str) -> IO[bytes]:
    if path == STDIN:
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise FormatError(f"{path} can't be read: {error.strerror}") from error


# Choosing the importer. The first line that looks like a step does not decide: a loop's own
# `step=1` may come before Megatron's first line. So the log is read a little further and the most
# specific importer is taken. One importer reads a log, so no step is counted twice.


_FURTHER = 2000  # lines looked at after the first that was recognised
_BEFORE = 20  # lines before it that the importer gets to see
_MESSAGE_CHARS = 120


@dataclass(frozen=True)
class ChosenImporter:
    """An importer, the line it recognised, and the lines it reads."""

    importer: Importer
    recognised: str
    lines: Iterator[Line]


def choose_importer(
    log: LogFile, *, format: str | None, options: dict[str, Any] | None = None, hint: str = ""
) -> ChosenImporter:
    """Choose the importer of a log. Raises FormatError, with what was looked for, if none fits;
    `hint` is advice to add to that message."""
    importers = make_importers(options or {}, format=format)
    log.words = _joint_hints(importers)
    lines = log.lines()
    before: deque[Line] = deque(maxlen=_BEFORE)
    for line in lines:
        before.append(line)
        best = _first_to_recognise(importers, line.text)
        if best is not None:
            if best.words(line.text) is None:
                log.words = None  # every line is wanted, also those that are looked at on the way
            settled = _look_further(importers, best, line, [*before], lines)
            log.words = settled.importer.words(settled.recognised)
            return settled
    if not log.line_count:
        raise FormatError(f"{log.path} is empty")
    advices = (importer.advice(log.first_texts) for importer in importers)
    hint = next(filter(None, advices), hint)
    raise FormatError(_no_step_message(log, importers) + (f"; {hint}" if hint else ""))


def make_importers(options: dict[str, Any], *, format: str | None = None) -> list[Importer]:
    """Make all importers in order, or the one named `format`, each with the options it takes."""
    names = registry.names("importers")
    if format is not None and format not in names:
        raise UsageError(f"no format {format!r}; there are {', '.join(names)}")
    importers = []
    for name in [format] if format else names:
        make = registry.load("importers", name)
        if Importer not in getattr(make, "__mro__", ()):
            raise PluginError(f"the importer {name!r} is not a subclass of ergmeter.ports.Importer")
        importers.append(make(**{n: v for n, v in options.items() if n in make.options}))
    return sorted(importers, key=lambda importer: importer.order)


def _joint_hints(importers: Iterable[Importer]) -> LineHints | None:
    """Join the words of all importers (None: every line is wanted), so that no line that the chosen
    one needs is skipped before the choice."""
    all_of: set[bytes] = set()
    for importer in importers:
        words = importer.words("")
        if words is None:
            return None
        all_of |= {word.lower() for word in words.any_of}
    least = (w for w in all_of if not any(other != w and other in w for other in all_of))
    return LineHints(tuple(sorted(least)), folds_case=True)


def _first_to_recognise(importers: Iterable[Importer], text: str) -> Importer | None:
    return next((importer for importer in importers if importer.recognises([text])), None)


def _look_further(
    importers: list[Importer], best: Importer, line: Line, head: list[Line], lines: Iterator[Line]
) -> ChosenImporter:
    """Reads further for an importer that is more specific than the best so far."""
    better = importers[: importers.index(best)]
    recognised = line.text
    for number, further in enumerate(lines):
        if not better or number >= _FURTHER:
            lines = chain([further], lines)
            break
        head.append(further)
        importer = _first_to_recognise(better, further.text)
        if importer is not None:
            best, recognised = importer, further.text
            better = better[: better.index(importer)]
    return ChosenImporter(best, _shortened(recognised, _MESSAGE_CHARS), chain(head, lines))


def _no_step_message(log: LogFile, importers: list[Importer]) -> str:
    lines = "1 line" if log.line_count == 1 else f"{log.line_count} lines"
    beginning = " / ".join(repr(_shortened(text, _MESSAGE_CHARS // 3)) for text in log.first_texts)
    last = next((i for i in reversed(importers) if i.is_live), importers[0])  # the most general
    looked = last.looks_for or last.name
    others = [importer.name for importer in importers if importer is not last]
    if others:
        looked = f"lines of {', '.join(others)}, or {looked}"
    return (
        f"{log.path}: no training step recognised in {lines}; looked for {looked}; "
        f"it begins {beginning}"
    )


def _shortened(text: str, most: int) -> str:
    """Shorten a line for a message, between words if possible."""
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    begin, _, rest = text[: most - 3].rpartition(" ")
    return f"{begin or rest} ..."

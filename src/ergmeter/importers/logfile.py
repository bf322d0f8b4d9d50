"""How is a log of many gigabytes read, in little memory, and what may be in it?

The trap: reading line by line. A line may be 100 MB long, a log that was cut while a program wrote
to it holds gigabytes of NUL bytes without an end of line, and a progress bar ends its lines with
\\r. So a log is read in blocks; NULs go, lines end at \\r too and are cut at 64 KiB, and only those
that hold a word that an importer looks for become text.
"""

from __future__ import annotations

import codecs
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from ergmeter.errors import FormatError, UsageError
from ergmeter.ports import Line

MAX_LINE_BYTES = 65_536
STDIN = "-"
_BLOCK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_TELL_EVERY_S = 0.1
_FEW = 4  # lines to one that has a word
_FIRST = 3  # lines kept for a message

Progress: TypeAlias = "Callable[[int], None]"


@dataclass(frozen=True)
class LineHints:
    """What a line must hold one of to be looked at."""

    any_of: tuple[bytes, ...]
    folds_case: bool = False  # they are in lower case, the log in any


class LogFile:
    """One pass over a log. `lines` may be asked for once.

    `words` may be changed on the way, once it is known which lines are wanted.
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
        said = lines[:4096].decode("utf-8", errors="replace").split("\n")
        self.first_texts = [*self.first_texts, *(text for text in said if text.strip())][:_FIRST]

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
        first = raw.read(_BLOCK_BYTES)
        if first[:2] == _GZIP:
            yield from self._gunzipped(first, raw)
            return
        data = first
        while data:
            self._count(len(data))
            yield data
            data = raw.read(_BLOCK_BYTES)

    def _gunzipped(self, data: bytes, raw: IO[bytes]) -> Iterator[bytes]:
        """Member after member, as logs that were packed in turns and joined have several."""
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
    """The same bytes cut behind ends of lines. Of a line longer than a block, the start is kept."""
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
    """The lines that hold one of the words, in their order, each cut at its longest; and where
    it ends.

    Where few lines have one, a word is looked for in all at once: in Python that is many times as
    fast as line by line.
    """
    if words is None:
        for line in lines.split(b"\n")[:-1]:
            yield line[:MAX_LINE_BYTES], 0
        return
    searched = lines.lower() if words.folds_case else lines
    often = sorted(words.any_of, key=searched.count, reverse=True)
    if searched.count(often[0]) * _FEW > searched.count(b"\n"):
        end = -1
        for line, low in zip(lines.split(b"\n"), searched.split(b"\n"), strict=True):
            end += len(line) + 1
            for word in often:
                if word in low:
                    yield line[:MAX_LINE_BYTES], end
                    break
        return
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
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error

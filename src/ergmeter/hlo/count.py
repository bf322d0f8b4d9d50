"""A file or bytes in, a count out; damage becomes an error with the file's name."""

from __future__ import annotations

import gc
import io
import mmap
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ergmeter.errors import FormatError
from ergmeter.hlo.counting import count
from ergmeter.hlo.reading import read
from ergmeter.hlo.wire import Malformed, Unparsed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.hlo.module import Module
    from ergmeter.hlo.result import ModuleCount
    from ergmeter.hlo.wire import Buffer

# -- opening ---------------------------------------------------------------------------------------
# How does a file become bytes to read, and what is it if it is no module?
#
# A file is mapped, not read: what is skipped is never loaded. A packed one has to be unpacked, up
# to a limit, since a few kilobytes can unpack to any size.


MAX_UNPACKED_BYTES = 512 << 20
_PART_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_FOREIGN = (
    (b"HloModule ", "HLO text; dump the module as a proto instead (--xla_dump_hlo_as_proto)"),
    (b"\x7fELF", "an ELF binary, not an HLO module"),
    (b"PK\x03\x04", "a zip archive, not an HLO module"),
    (b"{", "JSON, not an HLO module"),
)


@contextmanager
def opened(path: str | Path) -> Iterator[Buffer]:
    """A file's content, unpacked if it is gzip."""
    with Path(path).open("rb") as file, _mapped(file, str(path)) as data:
        yield data


@contextmanager
def open_buffer(data: bytes, name: str) -> Iterator[Buffer]:
    """Bytes as they are, or unpacked if they are gzip."""
    if data[:2] != _GZIP:
        yield data
        return
    with _unpacked(io.BytesIO(data), name) as unpacked:
        yield unpacked


def foreign(data: Buffer) -> str | None:
    """What a file is that is no module, if its beginning tells."""
    head = data[:64].lstrip()
    return next((what for magic, what in _FOREIGN if head.startswith(magic)), None)


def _mapped(file: BinaryIO, name: str) -> mmap.mmap:
    head = file.read(2)
    if not head:
        raise FormatError(f"{name}: empty (byte 0)")
    if head == _GZIP:
        return _unpacked(file, name)
    # ACCESS_COPY: the compiled reader needs a buffer that counts as writable. Nothing writes.
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _unpacked(file: BinaryIO, name: str) -> mmap.mmap:
    """What is packed, in memory of just its size: it is unpacked twice, first to learn that."""
    size = sum(map(len, _parts(file, name)))
    if not size:
        raise FormatError(f"{name}: empty once unpacked (byte 0)")
    data = mmap.mmap(-1, size)
    for part in _parts(file, name):
        data.write(part)
    return data


def _parts(file: BinaryIO, name: str) -> Iterator[bytes]:
    import gzip  # noqa: PLC0415  seldom needed, and as long to load as a file takes to count

    size = 0
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            while part := packed.read(_PART_BYTES):
                size += len(part)
                if size > MAX_UNPACKED_BYTES:
                    limit = f"more than {MAX_UNPACKED_BYTES >> 20} MiB"
                    raise FormatError(f"{name}: unpacks to {limit}; unpack it yourself (gunzip)")
                yield part
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{name}: damaged gzip: {error} (byte {size} unpacked)") from None


# -- count -----------------------------------------------------------------------------------------


def count_file(path: str | Path, *, reader: str | None = None) -> ModuleCount:
    """Count the module in a file: HloModuleProto or HloProto, packed with gzip or not."""
    with opened(path) as data:
        return _counted(data, str(path), reader)


def count_bytes(data: bytes, name: str = "", *, reader: str | None = None) -> ModuleCount:
    """Count a module that is in memory; `name` is for messages."""
    name = name or "HLO module"
    with open_buffer(data, name) as unpacked:
        return _counted(unpacked, name, reader)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Reading makes many small objects that live on; the collector would visit them for ever."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _tried(module: Module) -> ModuleCount:
    try:
        return count(module)
    except Malformed:
        if module.reader == "protobuf":  # some instructions lie apart, where offsets are others
            raise Unparsed from None
        raise


def _counted(data: Buffer, name: str, reader: str | None) -> ModuleCount:
    if not data:
        raise FormatError(f"{name}: empty (byte 0)")
    try:
        with _collector_paused():
            try:
                return _tried(read(data, reader=reader))
            except Unparsed:
                return count(read(data, reader="python"))
    except Malformed as error:
        text = foreign(data) or f"damaged or not an HLO module: {error.what}"
        raise FormatError(f"{name}: {text} (byte {error.offset})") from None

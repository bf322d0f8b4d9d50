"""A file or bytes in, a count out; damage becomes an error with the file's name."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.hlo.counting import count
from ergmeter.hlo.opening import foreign, held, opened
from ergmeter.hlo.reading import read
from ergmeter.hlo.wire import Malformed, Unparsed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ergmeter.hlo.module import Module
    from ergmeter.hlo.result import ModuleCount
    from ergmeter.hlo.wire import Buffer


def count_file(path: str | Path, *, reader: str | None = None) -> ModuleCount:
    """Count the module in a file: HloModuleProto or HloProto, packed with gzip or not."""
    with opened(path) as data:
        return _counted(data, str(path), reader)


def count_bytes(data: bytes, name: str = "", *, reader: str | None = None) -> ModuleCount:
    """Count a module that is in memory; `name` is for messages."""
    name = name or "HLO module"
    with held(data, name) as unpacked:
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

"""Which reader indexes a module, and where does the module begin?

There are three: a compiled one, one on protobuf's C parser and one in plain Python. They must not
disagree, so the plain one rules: the others hand it whatever they find odd, and it alone says that
a file is damaged.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ergmeter.errors import PluginError
from ergmeter.hlo import compiled, protobuf
from ergmeter.hlo.lines import idle_computation, index
from ergmeter.hlo.module import (
    MODULE_COMPUTATION,
    MODULE_ENTRY_ID,
    MODULE_ENTRY_NAME,
    MODULE_NAME,
    MODULE_PAYLOAD,
    Computations,
    Module,
    module_fields,
)
from ergmeter.hlo.plain import PlainParser
from ergmeter.hlo.wire import Buffer, Malformed, integer, spans, text

if TYPE_CHECKING:
    from ergmeter.hlo.module import Computation
    from ergmeter.hlo.plain import Parser

READERS = ("compiled", "protobuf", "python")
_NEEDS = {
    "compiled": "a C compiler (cc) and ERGMETER_COMPILED not set to 0",
    "protobuf": "protobuf with its C parser: pip install 'ergmeter[hlo]'",
}


def read(data: Buffer, *, reader: str | None = None) -> Module:
    """Index the module in `data`, an HloModuleProto or an HloProto around one."""
    library = _library() if reader in (None, "compiled") else None
    found = library.module(data) if library else None
    if found:
        return found
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
    listed = [index(data, place, one) for place, one in zip(places, every, strict=True)]

    def make(number: int) -> Computation:
        return listed[number].computation or idle_computation(data, places[number])

    return Module(
        data=data,
        name=text(data, fields, MODULE_NAME),
        entry_id=integer(fields, MODULE_ENTRY_ID),
        entry_name=text(data, fields, MODULE_ENTRY_NAME),
        payloads=spans(fields, MODULE_PAYLOAD),
        computations=Computations.of(
            [one.id for one in listed],
            make,
            idle={one.id for one in listed if one.computation is None},
            instructions=sum(one.instructions for one in listed),
            literal_bytes=sum(one.literal_bytes for one in listed),
        ),
        reader="protobuf" if parser else "python",
        fields=fields,
    )


def reader_name() -> str:
    """The reader that is used here unless one is asked for."""
    if _library():
        return "compiled"
    return "protobuf" if protobuf.parser() else "python"


def _library() -> compiled.Library | None:
    return None if os.environ.get("ERGMETER_COMPILED") == "0" else compiled.library()

"""What stands in two places must be the same: opcodes in C and Python, sources and their hash."""

from __future__ import annotations

import re
from pathlib import Path

import ergmeter.hlo
from ergmeter.hlo import files, proto

HERE = Path(ergmeter.hlo.__file__).parent


def test_the_compiled_reader_knows_the_same_opcodes() -> None:
    source = (HERE / "scan.c").read_text()
    body = source.partition("static enum kind kind_of(")[2].partition("return OTHER;")[0]
    kinds = {
        opcode.encode(): getattr(proto, kind)
        for names, kind in re.findall(r"if \(((?:[^;])*?)\)\s*return (\w+);", body)
        for opcode in re.findall(r'IS\("([^"]+)"\)', names)
    }
    assert kinds == proto.KINDS


def test_a_change_of_any_source_makes_memos_void() -> None:
    names = {source.name for source in files.sources()}
    assert names == {path.name for path in HERE.iterdir() if path.is_file()}
    assert "scan.c" in names

"""What stands in two places must be the same: opcodes in C and Python."""

from __future__ import annotations

import re
from pathlib import Path

import ergmeter.hlo
from ergmeter.hlo import proto

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

"""How far a command is: shown on a terminal, and gone when it is done."""

from __future__ import annotations

import io
import sys

import pytest

from ergmeter.cli.options import progress_bar


class Terminal(io.StringIO):
    """What somebody looks at."""

    def isatty(self) -> bool:
        return True


def printed(
    monkeypatch: pytest.MonkeyPatch,
    out: io.StringIO,
    *,
    quiet: bool = False,
    has_line: bool = False,
) -> str:
    """What is printed while ten runs are read."""
    monkeypatch.setattr(sys, "stderr", out)
    with progress_bar("reading runs", quiet=quiet, has_line=has_line) as show:
        for number in range(10):
            show(number, 10, f"{number} of 10")
    return out.getvalue()


def test_a_terminal_has_a_bar_that_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, Terminal())
    assert "reading runs" in text
    assert "9 of 10" in text
    assert text.endswith("\x1b[2K")  # the line is wiped


def test_a_file_has_at_most_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, io.StringIO()) == ""
    assert printed(monkeypatch, io.StringIO(), has_line=True) == "reading runs\n"


def test_a_quiet_command_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, Terminal(), quiet=True) == ""

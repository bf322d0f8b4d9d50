"""How far a command is: said on a terminal once it takes long, and gone when it is done."""

from __future__ import annotations

import io
import sys

import pytest

from ergmeter.cli.compare.compare import reading_progress


class Terminal(io.StringIO):
    """What somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds: its last entry."""
    times = [100.0]
    monkeypatch.setattr("ergmeter.cli.compare.compare.time.monotonic", lambda: times[-1])
    return times


def said(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, clock: list[float]) -> str:
    """Of ten runs, 0.3 s each."""
    monkeypatch.setattr(sys, "stderr", out)
    with reading_progress() as tell:
        for number in range(10):
            tell(number, 10)
            clock.append(clock[-1] + 0.3)
    return out.getvalue()


def test_a_line_comes_after_a_second_and_is_wiped(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    text = said(monkeypatch, Terminal(), clock)
    # The fifth is the first that is told of after a second: 4 x 0.3 s.
    assert "reading runs: 9 of 10" in text
    assert "reading runs: 3 of 10" not in text
    assert text.endswith("\x1b[2K")  # the line is wiped


def test_a_file_has_no_such_line(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    assert said(monkeypatch, io.StringIO(), clock) == ""


def test_what_is_soon_done_says_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with reading_progress() as tell:
        tell(0, 1)
    assert out.getvalue() == ""
    assert clock == [100.0]

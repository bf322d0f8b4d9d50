"""A recorded command has the terminal it would have had, and none where it would have had none."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.e2e.conftest import ERG, QUICK, TIMEOUT_S, eventually, script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

RECORD = (ERG, "record", *QUICK, "--out", "run", "--")


def test_a_command_on_a_terminal_has_one_of_the_same_size(lab: Lab) -> None:
    terminal = lab.terminal(*RECORD, *script("terminal"), rows=37, columns=111)
    shown = terminal.read_all()
    assert shown.startswith(b"True True True\r\n37x111\r\n")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_what_reaches_the_terminal_is_the_same_byte_for_byte(lab: Lab) -> None:
    without = lab.terminal(*script("terminal")).read_all()
    within = lab.terminal(*RECORD, *script("terminal")).read_all()
    assert within == without
    assert b"\x1b[31mred\x1b[0m" in within


def test_the_card_on_a_terminal_comes_last(lab: Lab) -> None:
    without = lab.terminal(*script("terminal")).read_all()
    shown = lab.terminal(ERG, "record", "--", *script("terminal"), columns=100).read_all()
    assert shown.replace(b"24x100", b"24x80").startswith(without)
    assert b"finished" in shown[len(without) :]


def test_a_resize_reaches_the_command(lab: Lab) -> None:
    terminal = lab.terminal(*RECORD, *script("terminal", "go"), rows=24, columns=80)
    terminal.read_until(b"\x1b[2Kcleared\rover\r\nzw")
    for rows, columns in ((33, 101), (12, 40), (50, 200)):
        terminal.resize(rows, columns)
        terminal.read_until(f"{rows}x{columns}\r\n".encode())
    (lab.path / "go").touch()
    # Not the last: a handler that a newer signal interrupts says its older size after it.
    assert b"50x200\r\n" in terminal.read_all()


def test_only_the_output_that_is_a_terminal_is_one(lab: Lab) -> None:
    recorded = " ".join([*RECORD, *script("terminal")])
    lab.terminal("sh", "-c", f"{recorded} 2>err").read_all()
    piped = lab.terminal("sh", "-c", f"{recorded.replace('--out run', '--out run2')} | cat >out")
    assert piped.read_all().startswith(b"\x1b[31mred")
    assert (lab.path / "out").read_bytes().startswith(b"True False True\nno size\n")
    assert (lab.path / "err").read_bytes().startswith(b"\x1b[31mred\x1b[0m\ttab")


def test_without_a_terminal_there_is_none(lab: Lab) -> None:
    within = lab.record(*script("terminal"))
    assert within.stdout.startswith(b"False False False\nno size\n")


def test_a_command_whose_terminal_is_gone_is_told_and_not_held_up(lab: Lab) -> None:
    outcomes = []
    for number, around in enumerate([(), RECORD]):
        ignoring = f"trap '' HUP; exec {' '.join([*around, *script('hang_up', f'end{number}')])}"
        terminal = lab.terminal("sh", "-c", ignoring)
        terminal.read_until(b"ready\r\n")
        terminal.close()
        end = lab.path / f"end{number}"
        eventually(lambda: end.exists() and end.read_text(), "the end of the command")  # noqa: B023
        outcomes.append(end.read_text())
        terminal.process.wait(TIMEOUT_S)
    assert outcomes[0] == outcomes[1] == "OSError 5"
    assert lab.report()["status"] == "finished"


def test_a_job_that_is_stopped_and_continued_goes_on(lab: Lab) -> None:
    terminal = lab.terminal(*RECORD, *script("terminal", "go"))
    terminal.read_until(b"True True True\r\n")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.process.send_signal(signal.SIGCONT)
    (lab.path / "go").touch()
    terminal.read_all()
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_the_next_commands_are_below_the_card_once(lab: Lab) -> None:
    lab.record(*script("terminal"))
    report = (ERG, "report", "run")
    hint = b"erg explain run "
    assert lab.terminal(*report).read_all().count(hint) == 1
    assert lab.terminal(*report, "--json").read_all().count(hint) == 0
    assert lab.run(*report).stdout.count(hint) == 1  # also where nobody looks at a terminal

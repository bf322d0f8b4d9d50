"""What a command on a terminal ends with: what to do next."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

from ergmeter.cli.main import _COMMANDS, _NEXT
from tests.runs import even_steps, run_of

# They end with a run's card, write what was asked for, run until they are stopped, or pass or fail.
WITH_AN_END_OF_THEIR_OWN = {
    "record", "demo", "import", "train", "report",
    "card", "export", "hlo", "watch", "serve", "gate",
}  # fmt: skip


def on_a_terminal(*words: str, cwd: Path) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "ergmeter", *words], cwd=cwd, stderr=theirs
    ) as erg:
        os.close(theirs)
        parts = []
        with contextlib.suppress(OSError):  # how a terminal ends that nobody writes to
            while part := os.read(ours, 1 << 16):
                parts.append(part)
    os.close(ours)
    return erg.returncode, b"".join(parts).decode()


def test_every_command_ends_with_what_to_do_next() -> None:
    assert set(_COMMANDS) == set(_NEXT) | WITH_AN_END_OF_THEIR_OWN
    assert not set(_NEXT) & WITH_AN_END_OF_THEIR_OWN


def test_a_list_ends_with_what_to_do_with_a_run(tmp_path: Path) -> None:
    run_of(tmp_path / "runs" / "first", steps=even_steps(3))
    code, text = on_a_terminal("list", cwd=tmp_path)
    assert code == 0
    assert "next: erg report DIRECTORY/NAME; erg compare" in text.splitlines()[-1]
    code, text = on_a_terminal("explain", "runs/first", cwd=tmp_path)
    assert code == 0
    assert "erg compare runs/first OTHER" in text.splitlines()[-1]
    code, text = on_a_terminal("list", "--json", cwd=tmp_path)
    assert code == 0
    assert "next:" not in text


def test_a_program_that_reads_the_output_gets_no_hint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ergmeter", "metrics", "mfu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "next:" not in done.stdout + done.stderr

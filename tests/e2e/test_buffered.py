"""Programs that hold their output back: their steps, what is said of them, and `--pty`."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.units import NS_PER_S
from tests.e2e.conftest import ERG, QUICK, SCRIPTS, TIMEOUT_S, eventually, script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.soak

PTY = (*QUICK, "--pty")
RECORD = (ERG, "record", *PTY, "--out", "run", "--")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The loop in C."""
    built = tmp_path_factory.mktemp("built") / "buffered"
    subprocess.run(["gcc", "-O1", "-o", built, SCRIPTS / "buffered.c"], check=True)
    return str(built)


def printed_steps(run: Path) -> dict[str, Any]:
    return dict(Run.open(run).steps("output"))


def buffered(run: Path) -> list[str]:
    return [mark.detail for mark in Run.open(run).marks if mark.name == "output_buffered"]


def reading(run: Path, key: str) -> Reading:
    # Over all steps: on a busy machine the first can be slow, and would be left out as a warm-up.
    found = summarize(Run.open(run), Settings(warmup_steps=0)).readings[key]
    assert isinstance(found, Reading), (key, found)
    return found


def test_block_buffered_steps_are_as_long_as_their_lines_say(lab: Lab, program: str) -> None:
    # Some 4 KiB of output are 80 lines: three blocks, the last of them 2 s after its last step.
    done = lab.record(program, 200, 0.02, 2, "took")
    truth = json.loads(done.stderr)
    seen = printed_steps(lab.path / "run")
    assert seen["index"].tolist() == list(range(1, 201))
    assert seen["steps"].tolist() == [1] * 200
    told_ms = [float(line.split("took ")[1].split()[0]) for line in _step_lines(done.stdout)]
    each_ms = (seen["end_ns"] - seen["start_ns"]) / 1e6
    assert each_ms.tolist() == pytest.approx(told_ms, abs=1e-3)
    assert seen["loss"].tolist() == pytest.approx([8.0 - n * 0.01 for n in range(1, 201)])
    # Not before the program began, one after the other, and the two seconds after them left out.
    assert seen["start_ns"][0] >= (truth["start_s"] - truth["step_s"]) * NS_PER_S
    assert np.all(seen["start_ns"][1:] >= seen["end_ns"][:-1])
    rate = reading(lab.path / "run", "throughput.steps_per_s")
    assert rate.value == pytest.approx(200 / (truth["end_s"] - truth["start_s"]), rel=0.03)
    assert rate.basis == "reported"
    (said,) = buffered(lab.path / "run")
    assert "200 of its step lines came at one instant with others" in said
    assert "step times are those that the lines give" in said
    assert "erg record --pty" in said
    assert "stdbuf -oL" in said
    assert any("block-buffered" in note for note in summarize(Run.open(lab.path / "run")).notes)


def test_blocks_of_lines_without_times_give_means_and_the_last_is_left_out(
    lab: Lab, program: str
) -> None:
    done = lab.record(program, 400, 0.01, 1, "bare")
    truth = json.loads(done.stderr)
    seen = printed_steps(lab.path / "run")
    # 12 lines of 68 bytes first, then lines of 27 to 31: blocks end near steps 110, 245 and 375.
    assert 200 <= seen["steps"].sum() <= 300
    assert seen["index"][-1] < 400
    step_s = reading(lab.path / "run", "time.step_s")
    assert step_s.value == pytest.approx(truth["step_s"], rel=0.2)
    (said,) = buffered(lab.path / "run")
    assert "a step's time is the mean over its block" in said
    (dropped,) = [m.detail for m in Run.open(lab.path / "run").marks if m.name == "rows_dropped"]
    assert "came last and together" in dropped


def test_two_blocks_without_times_are_no_steps_and_the_cure_is_said(lab: Lab, program: str) -> None:
    lab.record(program, 150, 0.01, 0, "bare")
    run = Run.open(lab.path / "run")
    found = summarize(run).readings["throughput.steps_per_s"]
    assert isinstance(found, Missing)
    assert "150 step lines came in two blocks" in found.reason
    assert "`erg record --pty` or `stdbuf -oL`" in found.reason


def test_a_line_at_a_time_is_not_said_to_be_buffered(lab: Lab, program: str) -> None:
    lab.record("stdbuf", "-oL", program, 60, 0.01, 0, "took")
    assert buffered(lab.path / "run") == []
    assert printed_steps(lab.path / "run")["steps"].tolist() == [1] * 60


@pytest.mark.parametrize("kind", ["took", "bare"])
def test_on_a_pseudo_terminal_each_step_is_seen_when_it_ends(
    lab: Lab, program: str, kind: str
) -> None:
    done = lab.record(program, 60, 0.02, 1, kind, options=PTY)
    bare = lab.run(program, 3, 0.001, 0, kind)
    truth = json.loads(done.stderr)
    seen = printed_steps(lab.path / "run")
    first = 1 if kind == "took" else 2  # without a time of its own the first starts the clock
    # Two lines that a busy machine lets us read at once are a row of two steps.
    assert seen["steps"].sum() == 61 - first
    assert seen["index"][-1] == 60
    assert len(seen["index"]) > 40
    assert buffered(lab.path / "run") == []
    seen_s = (seen["end_ns"][-1] - seen["start_ns"][0]) / NS_PER_S
    assert seen_s == pytest.approx(truth["end_s"] - truth["start_s"], rel=0.2)
    # The lines themselves are as they would be: no carriage returns, nothing added.
    assert b"\r" not in done.stdout
    assert done.stdout.splitlines()[:12] == bare.stdout.splitlines()[:12]


def test_a_pseudo_terminal_changes_no_byte_and_no_exit_code(lab: Lab) -> None:
    code = (
        "import os, sys; os.write(1, bytes(range(256)) * 300 + b'\\n\\r\\n');"
        "os.write(2, b'err'); print(sys.stdin.read(), os.isatty(0), os.isatty(1), os.isatty(2));"
        "print(os.get_terminal_size(1)); sys.exit(7)"
    )
    done = lab.run(*RECORD, "python3", "-c", code, stdin=b"in")
    assert done.returncode == 7
    assert done.stderr == b"err"
    whole = bytes(range(256)) * 300 + b"\n\r\n"
    size = b"os.terminal_size(columns=80, lines=24)\n"
    assert done.stdout == whole + b"in False True False\n" + size


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_a_command_on_a_pseudo_terminal_once(lab: Lab, name: str) -> None:
    process = lab.start(*RECORD, *script("signals", "log", name, 3))
    log = lab.path / "log"
    eventually(lambda: log.exists() and "ready" in log.read_text(), "the command to be ready")
    process.send_signal(getattr(signal, name))
    assert process.wait(TIMEOUT_S) == 3
    assert log.read_text() == f"ready\n{name}\n"


def test_a_command_on_a_pseudo_terminal_that_is_killed_has_the_shells_exit_code(lab: Lab) -> None:
    done = lab.run(*RECORD, "sh", "-c", "kill -9 $$")
    assert done.returncode == 137
    assert lab.report()["status"] == "killed by SIGKILL"


def test_control_c_and_the_window_size_reach_a_command_whose_output_goes_to_a_file(
    lab: Lab,
) -> None:
    recorded = " ".join([*RECORD, *script("signals", "log", "SIGINT", 3)])
    terminal = lab.terminal("sh", "-c", f"{recorded} >out; echo code $?", rows=33, columns=99)
    log = lab.path / "log"
    eventually(lambda: log.exists() and "ready" in log.read_text(), "the command to be ready")
    terminal.type(b"\x03")
    eventually(lambda: "SIGINT" in log.read_text(), "the interrupt")
    eventually(lambda: (lab.path / "out").read_bytes() == b"ready\nsaved\n", "its output")
    assert log.read_text() == "ready\nSIGINT\n"
    again = " ".join([*RECORD, *script("terminal")]).replace("--out run", "--out run2")
    sized = lab.terminal("sh", "-c", f"{again} >size", rows=33, columns=99)
    sized.read_all()
    assert b"33x99\n" in (lab.path / "size").read_bytes()


def test_without_the_option_the_output_is_a_pipe(lab: Lab) -> None:
    done = lab.record("python3", "-c", "import os; print(os.isatty(1))")
    assert done.stdout == b"False\n"


def _step_lines(printed: bytes) -> list[str]:
    return [line for line in printed.decode().splitlines() if line.startswith("step ")]


def test_import_of_such_a_log_uses_the_times_of_its_lines(lab: Lab, program: str) -> None:
    done = lab.run(program, 50, 0.01, 0, "took")
    (lab.path / "train.log").write_bytes(done.stdout)
    imported = lab.run(ERG, "import", "train.log", "--out", "imported")
    assert imported.returncode == 0, imported.stderr.decode()
    told_ms = [float(line.split("took ")[1].split()[0]) for line in _step_lines(done.stdout)]
    seen = printed_steps(lab.path / "imported")
    assert seen["index"].tolist() == list(range(1, 51))
    each_ms = (seen["end_ns"] - seen["start_ns"]) / 1e6
    assert each_ms.tolist() == pytest.approx(told_ms, abs=1e-3)
    notes = summarize(Run.open(lab.path / "imported")).notes
    assert any("times are its step times added up" in note for note in notes)
    rate = reading(lab.path / "imported", "throughput.steps_per_s")
    assert rate.value == pytest.approx(50 / (sum(told_ms) / 1000), rel=1e-3)

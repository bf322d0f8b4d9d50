"""`erg record` can't be told from its absence, and leaves a run."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from ergmeter import Run
from tests.e2e.conftest import ERG, PYTHON, QUICK, TIMEOUT_S, eventually, script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

WAIT_FOR_GO = "while [ ! -e go ]; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("stdout_bytes", "stderr_bytes", "code"),
    [(0, 0, 0), (1, 1, 1), (1000, 70_000, 3), (5_000_000, 1000, 255)],
    ids=["nothing", "a byte each", "binary on both", "5 MB"],
)
def test_output_and_exit_code_are_those_of_the_command(
    lab: Lab, stdout_bytes: int, stderr_bytes: int, code: int
) -> None:
    command = script("output", stdout_bytes, stderr_bytes, code)
    without = lab.run(*command)
    within = lab.record(*command)
    assert within.returncode == without.returncode == code
    assert within.stdout == without.stdout
    assert len(within.stdout) == stdout_bytes
    assert within.stderr == without.stderr
    assert len(within.stderr) == stderr_bytes


def test_the_card_comes_after_the_last_byte_of_standard_error(lab: Lab) -> None:
    command = script("output", 10, 50_000, 0)
    without = lab.run(*command)
    within = lab.record(*command, options=("--probe", "process"))
    assert within.stdout == without.stdout
    assert within.stderr.startswith(without.stderr)
    assert b"finished" in within.stderr[len(without.stderr) :]


def test_outputs_that_are_one_stay_in_order(lab: Lab) -> None:
    command = ["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do echo out $i; echo err $i >&2; done"]
    without = lab.run(*command, stderr=subprocess.STDOUT)
    within = lab.record(*command, stderr=subprocess.STDOUT)
    assert within.stdout == without.stdout


def test_standard_input_is_the_commands(lab: Lab) -> None:
    data = bytes(range(256)) * 4096
    assert lab.record("cat", stdin=data).stdout == data


def test_a_closed_output_is_closed_for_the_command_too(lab: Lab) -> None:
    tries = "echo out || echo closed >&2"
    within = lab.run("sh", "-c", f"{ERG} record --quiet -- sh -c '{tries}' >&-")
    assert within.stderr.splitlines()[-1] == b"closed"


def test_a_failed_command_leaves_a_run_that_says_so(lab: Lab) -> None:
    assert lab.record("false").returncode == 1
    assert lab.report()["status"] == "failed (exit code 1)"


def test_a_command_killed_by_a_signal_has_the_exit_code_of_a_shell(lab: Lab) -> None:
    assert lab.record("sh", "-c", "kill -ABRT $$").returncode == 134
    assert lab.report()["status"] == "killed by SIGABRT"


def test_a_command_killed_by_a_signal_without_a_name_is_reported_too(lab: Lab) -> None:
    assert lab.record("sh", "-c", "kill -40 $$").returncode == 168
    assert lab.report()["status"] == "killed by signal 40"


def test_no_such_command_is_one_line_and_no_run(lab: Lab) -> None:
    done = lab.run(ERG, "record", "--", "nosuchcommand", "--option")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"nosuchcommand" in done.stderr
    assert list(lab.path.iterdir()) == []


def test_a_command_that_can_not_be_started_is_one_line_and_no_run(lab: Lab) -> None:
    (lab.path / "data").write_bytes(b"\x7fnot a program")
    (lab.path / "data").chmod(0o755)
    done = lab.run(ERG, "record", "--", "./data")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"./data" in done.stderr
    assert lab.runs() == []


def test_a_mistyped_probe_names_the_right_one_and_starts_nothing(lab: Lab) -> None:
    done = lab.run(ERG, "record", "--probe", "nvmll", "--", "touch", "started")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"did you mean 'nvml'?" in done.stderr
    assert list(lab.path.iterdir()) == []


def test_a_parent_that_ignores_the_end_of_its_children_does_not_hide_it(lab: Lab) -> None:
    ignores = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    around = [PYTHON, "-c", f"{ignores}; os.execv(sys.argv[1], sys.argv[1:])"]
    done = lab.run(*around, ERG, "record", *QUICK, "--out", "run", "--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert lab.report()["status"] == "failed (exit code 3)"


def test_a_mistyped_subcommand_names_the_right_one_and_starts_nothing(lab: Lab) -> None:
    done = lab.run(ERG, "recrod", "--", "touch", "started")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"`erg record`" in done.stderr
    assert list(lab.path.iterdir()) == []


def test_a_directory_in_use_is_refused_before_the_command_starts(lab: Lab) -> None:
    (lab.path / "run").mkdir()
    (lab.path / "run" / "kept").write_text("mine")
    done = lab.record("touch", "started")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (lab.path / "started").exists()
    assert (lab.path / "run" / "kept").read_text() == "mine"
    assert lab.runs() == []


def test_a_background_child_is_not_waited_for_and_keeps_its_output(lab: Lab) -> None:
    background = f"({WAIT_FOR_GO}; echo late; echo late error >&2) & echo early"
    recorder = lab.start_recording(
        "sh", "-c", background, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert recorder.wait(TIMEOUT_S) == 0  # although `go` is not there yet
    (lab.path / "go").touch()
    out, err = recorder.communicate(timeout=TIMEOUT_S)
    assert out == b"early\nlate\n"
    assert err == b"late error\n"
    assert lab.report()["status"] == "finished"


def test_an_output_that_no_background_child_holds_is_closed(lab: Lab) -> None:
    background = f"({WAIT_FOR_GO}) >/dev/null & echo early"
    recorder = lab.start_recording("sh", "-c", background, stdout=subprocess.PIPE)
    assert recorder.stdout is not None
    assert recorder.stdout.read() == b"early\n"  # to its end, although `go` is not there yet
    (lab.path / "go").touch()


def test_an_output_nobody_reads_does_not_hold_up_the_other(lab: Lab) -> None:
    # Nobody reads standard output, so one writer is stuck in it; another has something to say.
    both = "yes out & sleep 1; echo told >&2; wait"
    recorder = lab.start_recording("sh", "-c", both, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert recorder.stderr is not None
    assert recorder.stderr.readline() == b"told\n"


@pytest.mark.parametrize("around", [(), (ERG, "record", *QUICK, "--out", "run", "--")])
def test_a_command_whose_reader_goes_away_is_told_by_sigpipe(
    lab: Lab, around: tuple[str, ...]
) -> None:
    pipeline = 'set -o pipefail; "$@" | head -1; echo "${PIPESTATUS[@]}"'
    done = lab.run("bash", "-c", pipeline, "bash", *around, "yes", "step=1")
    assert done.stdout == b"step=1\n141 0\n"
    assert done.stderr == b""
    if around:
        assert lab.report()["status"] == "killed by SIGPIPE"


def test_a_recorder_inside_a_recorded_command_makes_no_run_of_its_own(lab: Lab) -> None:
    inner = (ERG, "record", "--quiet", "--out", "inner", "--", "sh", "-c", "echo hi; exit 4")
    done = lab.record(*inner)
    assert (done.returncode, done.stdout) == (4, b"hi\n")
    (said,) = done.stderr.decode().splitlines()
    assert said.startswith("erg: the recorder around this command measures it, into ")
    assert str(lab.path / "run") in said
    assert said.endswith("; --out inner is not used")
    assert lab.runs() == [lab.path / "run"]


@pytest.mark.parametrize("secret", [["--api-key", "Hunter2Z"], ["--hf_token=Hunter2Z"]])
def test_a_key_on_the_command_line_reaches_the_command_and_no_file(
    lab: Lab, secret: list[str]
) -> None:
    done = lab.record("echo", *secret)
    assert b"Hunter2Z" in done.stdout
    files = [path for path in (lab.path / "run").rglob("*") if path.is_file()]
    assert len(files) > 2
    assert not [path for path in files if b"Hunter2Z" in path.read_bytes()]
    assert lab.report()["command"][0] == "echo"


def test_printed_steps_are_counted(lab: Lab) -> None:
    lab.record(*script("steps", 20, "print"))
    readings = lab.report()["readings"]
    # The first line opens the window: when its step began is not known.
    assert readings["steps.count"]["value"] == 19
    assert readings["tokens.total"]["value"] == 19 * 256
    assert readings["throughput.tokens_per_s"]["basis"] == "derived"


def test_a_meter_in_the_command_joins_the_run_and_its_steps_win(lab: Lab) -> None:
    lab.record(*script("steps", 20, "meter"))
    assert lab.runs() == [lab.path / "run"]
    assert len(list((lab.path / "run").glob("*/writer.json"))) == 2
    report = lab.report()
    assert report["readings"]["steps.count"]["value"] == 20
    assert report["readings"]["tokens.total"]["value"] == 20 * 256
    assert report["readings"]["throughput.tokens_per_s"]["basis"] == "measured"
    assert report["status"] == "finished"


def test_a_meter_in_a_command_that_prints_nothing_is_not_said_to_have_no_steps(lab: Lab) -> None:
    lab.run(ERG, "record", "--quiet", "--out", "run", "--", "sh", "-c",
            f"{' '.join(script('steps', 5, 'meter'))} >/dev/null")  # fmt: skip
    report = lab.report()
    assert report["readings"]["steps.count"]["value"] == 5
    assert not [note for note in report["notes"] if "no steps" in note]


def test_what_printed_tokens_count_can_be_told(lab: Lab) -> None:
    prints = (
        "import array, fcntl, termios, time\n"
        "for t in 5, 7, 30:\n"
        "    print(f'step={t} tokens={t}')\n"
        "    left = array.array('i', [1])\n"
        "    while left[0]:\n"  # as lines that are read together open the window together
        "        time.sleep(0.001), fcntl.ioctl(1, termios.FIONREAD, left)\n"
    )
    lab.record(PYTHON, "-c", prints, options=(*QUICK, "--tokens-are", "total"))
    assert lab.report()["readings"]["tokens.total"]["value"] == 25


def test_lines_that_come_faster_than_they_are_read_are_all_read(lab: Lab) -> None:
    lines = 150_000
    prints = f"print(*(f'step={{i}} tokens=8' for i in range({lines})), sep='\\n')"
    assert lab.record(PYTHON, "-c", prints).stdout.count(b"\n") == lines
    run = Run.open(lab.path / "run")
    assert run.steps("output")["index"][-1] == lines - 1
    assert not [mark for mark in run.marks if mark.name == "rows_dropped"]


def test_a_command_that_prints_no_steps_is_told_what_to_print(lab: Lab) -> None:
    done = lab.record("echo", "hello", options=("--probe", "process"))
    card = " ".join(done.stderr.decode().replace("│", " ").split())
    assert card.count("1 line of output, none that ergmeter recognises") == 1
    reason = lab.report()["readings"]["throughput.tokens_per_s"]["missing"]
    assert "step=3 loss=2.1 tokens=4096" in reason


def test_a_run_can_be_reported_while_it_is_written(lab: Lab) -> None:
    recorder = lab.start_recording("sh", "-c", f"{WAIT_FOR_GO}; exit 3")
    eventually(lambda: list(lab.path.glob("run/[!.]*/samples-*")), "the first hand-over")
    assert lab.report()["status"] == "running"
    (lab.path / "go").touch()
    assert recorder.wait(TIMEOUT_S) == 3
    assert lab.report()["status"] == "failed (exit code 3)"


def test_the_recorder_leaves_no_process_behind(lab: Lab) -> None:
    recorder = lab.start_recording("sh", "-c", "echo a; echo b >&2")
    assert recorder.wait(TIMEOUT_S) == 0

    def group_is_empty() -> bool:
        try:
            os.killpg(recorder.pid, 0)
        except ProcessLookupError:
            return True
        return False

    eventually(group_is_empty, "the end of the recorder's process group")

"""`erg demo`, as a person runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.conftest import environment, quick

if TYPE_CHECKING:
    from ergmeter.records import FloatArray

pytestmark = pytest.mark.frameworks

# One thread: two that spin on two contended cores make a step of 50 ms last a second.
ENVIRONMENT = environment(COLUMNS="120", NO_COLOR="1", **quick())
ERG = "from ergmeter.cli.main import main; main()"
# A shell that starts a test run in the background makes it, and its children, ignore Ctrl-C.
HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
SECONDS = (2, 5, 40)
ENOUGH_STEPS = 8  # the loss has fallen by one after six


def erg(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + ERG, *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A short demo: its run, what it printed, what it said beside that.

    Two seconds are some twenty steps. On a machine that is busy with other things they may be two,
    of which nothing can be said, and the demo is given longer.
    """
    for seconds in SECONDS:
        out = tmp_path_factory.mktemp("demo") / "run"
        done = erg("demo", "--seconds", str(seconds), "--device", "cpu", "--out", str(out))
        assert done.returncode == 0, done.stderr
        if len(losses(out)) >= ENOUGH_STEPS:
            break
    return out, done.stdout, done.stderr


def losses(run: Path) -> FloatArray:
    """The loss of every training step; data and evaluation spans have none."""
    every = np.asarray(Run.open(run).steps()["loss"], dtype=np.float64)
    return every[np.isfinite(every)]


@pytest.fixture(scope="module")
def report(finished: tuple[Path, str, str]) -> dict[str, Any]:
    done = erg("report", str(finished[0]), "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_card_shows_tokens_step_time_and_memory(finished: tuple[Path, str, str]) -> None:
    card = finished[1]
    for title in ("tokens/s", "step time", "memory"):
        assert title in card
    assert len(card[card.index("╭") :].splitlines()) <= 16


def test_energy_is_shown_or_absent_with_its_reason(
    finished: tuple[Path, str, str], report: dict[str, Any]
) -> None:
    energy = report["readings"]["energy.run_j"]
    if "missing" in energy:
        start = " ".join(energy["missing"].split()[:3])
        assert f"energy  {start}" in finished[1]
    else:
        assert energy["value"] > 0
        assert "energy  no" not in finished[1]


def test_it_says_what_was_learned_and_where_to_look_next(finished: tuple[Path, str, str]) -> None:
    out, printed, _ = finished
    assert "loss on tales it never saw: " in printed
    for hint in (f"erg explain {out}", "erg record -- ", "erg doctor"):
        assert hint in " ".join(printed.split())
    assert " --open" in printed.splitlines()[-1]  # the page


def test_without_a_terminal_standard_error_holds_one_line(finished: tuple[Path, str, str]) -> None:
    said = {f"training 0.6 M parameters on cpu for {seconds} s\n" for seconds in SECONDS}
    assert finished[2] in said


def test_the_figures_agree_with_each_other(report: dict[str, Any]) -> None:
    value = {key: found.get("value") for key, found in report["readings"].items()}
    assert report["status"] == "finished"
    assert report["settings"] == {"parameters": 586_624, "warmup_steps": 3, "dtype": "fp32"}
    # 6 a weight that is multiplied (3 layers and the head), and attention on top.
    weights = 3 * (2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 352) + 128 * 256
    assert 6 * weights < value["compute.model_flops_per_token"] < 7.5 * weights
    assert report["readings"]["utilization.mfu_frac"].get("basis", "assumed") == "assumed"
    assert value["tokens.per_step"] * value["throughput.steps_per_s"] == pytest.approx(
        value["throughput.tokens_per_s"]
    )
    assert 0 < value["tokens.padding_frac"] < 1
    computed, real, bearing = (
        value[f"throughput.{which}_tokens_per_s"] for which in ("computed", "real", "loss")
    )
    assert computed > real > bearing > 0
    assert real == pytest.approx(computed * (1 - value["tokens.padding_frac"]))


def test_the_loss_falls(finished: tuple[Path, str, str]) -> None:
    loss = losses(finished[0])
    assert loss[0] == pytest.approx(5.55, abs=0.2)  # ln 256: it knew nothing
    assert loss[-1] < loss[0] - 1


def test_ctrl_c_keeps_the_run_shows_the_card_and_exits_130(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", HEARS_CTRL_C + ERG, "demo", "--seconds", "600"]
    with subprocess.Popen(
        [*command, "--device", "cpu", "--out", str(out)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        wait_for_steps(out, 10)
        child.send_signal(signal.SIGINT)
        printed, said = child.communicate(timeout=90)
    assert child.returncode == 130, said
    assert "failed (KeyboardInterrupt" in printed
    assert "step time" in printed
    assert "Traceback" not in said


def wait_for_steps(run: Path, rows: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (run / "run.json").exists() and len(Run.open(run).steps()["loss"]) >= rows:
            return
        time.sleep(0.2)
    pytest.fail(f"the demo had not made {rows} rows in 90 s")


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    done = erg(
        "demo", "--out", str(tmp_path / "run"), before="import sys; sys.modules['torch'] = None; "
    )
    assert done.returncode == 1
    assert done.stderr == "erg: the demo needs torch: pip install 'ergmeter[torch]'\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seconds", ["0.5", "3601", "soon"])
def test_seconds_out_of_range_are_a_usage_error(seconds: str) -> None:
    done = erg("demo", "--seconds", seconds)
    assert done.returncode == 2
    assert "--seconds" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_help_loads_no_torch() -> None:
    says = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    done = erg("demo", "--help", before=says)
    assert done.returncode == 0
    assert done.stdout.endswith("False\n")

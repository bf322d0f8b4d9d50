"""A real Trainer of transformers, recorded by its output and by the hook, its script untouched."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import QUICK, Program, needs, reported, script, warmed

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

needs("transformers")

LLAMA = "transformers.models.llama.modeling_llama"
PRINTED = (*QUICK, "--no-hook")  # what can be told from its output alone

_TIMED = re.compile(
    r"('(?:train_runtime|train_\w+_per_second)': )'[^']*'|\d+:\d\d|[\d.]+ ?(?:it/s|s/it)|\?it/s"
)


def without_times(printed: bytes) -> list[str]:
    """What was printed, line by line, but for how long it took."""
    lines = printed.decode().replace("\r", "\n").split("\n")
    return [
        _TIMED.sub("TIME", line) for line in lines if "it/s]" not in line and "s/it]" not in line
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Scripts without `erg`, each with its folder: two plain, and the second with our callback."""
    words: dict[str, list[Any]] = {
        "trainer": ["hf_trainer", "truth.json"],
        "untouched": ["hf_either_way"],
        "callback": ["hf_either_way", "run"],
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in words}
    loads = ("light", "torch._dynamo", "transformers.trainer", LLAMA)
    done = warmed(*(Program(script(*words[n])[1:], folders[n], loads) for n in words))
    for one in done:
        assert one.returncode == 0, one.stderr
    return {name: (one, folders[name]) for name, one in zip(words, done, strict=True)}


def test_a_recorded_trainer_prints_what_it_prints_alone_and_its_tokens_are_right(
    lab: Lab, alone: dict[str, Any]
) -> None:
    without, folder = alone["trainer"]
    within = lab.record(*script("hf_trainer", "recorded.json"), options=PRINTED)
    assert within.returncode == 0
    assert without_times(within.stdout) == without_times(without.stdout.encode())
    assert len(without_times(within.stdout)) > 20

    tokens = json.loads((lab.path / "recorded.json").read_text())
    assert tokens == json.loads((folder / "truth.json").read_text())
    report = lab.report()
    readings = report["readings"]
    steps = readings["steps.count"]["value"]
    # All, or those after the first line, or after those that were read together with it.
    assert len(tokens) / 2 <= steps <= len(tokens)
    # Totals of five digits are printed rounded, but here they have four.
    assert readings["tokens.total"]["value"] == sum(tokens[-int(steps) :])
    assert readings["tokens.per_step"]["value"] == pytest.approx(tokens[0])
    assert readings["throughput.tokens_per_s"]["basis"] == "derived"
    assert readings["throughput.tokens_per_s"]["value"] == pytest.approx(
        readings["tokens.total"]["value"] / readings["time.window_s"]["value"], rel=0.001
    )
    assert report["status"] == "finished"


def without_bars(printed: bytes) -> list[bytes]:
    """What was printed but for bars of progress, which are drawn again as time goes by."""
    lines = printed.replace(b"\r", b"\n").split(b"\n")
    return [line for line in lines if line.strip() and b"%|" not in line]


def losses(printed: bytes) -> list[bytes]:
    return re.findall(rb"'loss': '[^']*'", printed)


def truth(out: bytes) -> dict[str, Any]:
    [line] = [line for line in out.decode().splitlines() if line.startswith("TRUTH ")]
    found: dict[str, Any] = json.loads(line.removeprefix("TRUTH "))
    return found


def test_the_hook_and_the_callback_say_the_same_of_one_script_and_change_nothing_of_it(
    lab: Lab, alone: dict[str, Any]
) -> None:
    options = ("--quiet", "--warmup-steps", "3")
    within = lab.record(*script("hf_either_way"), out="hook", options=options)
    assert within.returncode == 0, within.stderr.decode()
    bare, _ = alone["untouched"]
    own_line, folder = alone["callback"]
    assert losses(within.stdout) == losses(bare.stdout.encode()) != []
    assert without_bars(within.stderr) == without_bars(bare.stderr.encode())
    assert losses(own_line.stdout.encode()) == losses(bare.stdout.encode())
    assert len(Run.open(lab.path / "hook").trainings) == 1
    ways = [
        (reported(folder / "run"), truth(own_line.stdout.encode())),
        (lab.report("hook"), truth(within.stdout)),
    ]
    shares = []
    for report, own in ways:
        readings = report["readings"]
        assert readings["tokens.total"]["value"] == own["tokens"]
        assert readings["steps.count"]["value"] == own["steps"] == 17
        # Two runs of one machine differ by more than two ways of measuring: each by its own clock.
        found, (least_s, most_s) = readings["throughput.tokens_per_s"], bounds_s([own])
        assert own["tokens"] / most_s <= found["value"] <= own["tokens"] / least_s
        assert found["basis"] == "measured"
        # MFU goes with tokens/s: of the same run, its FLOPs a token are what can differ.
        shares.append(readings["utilization.mfu_frac"]["value"] / found["value"])
    assert shares[0] == pytest.approx(shares[1], rel=1e-9)
    parameters = {report["settings"]["parameters"] for report, _ in ways}
    assert len(parameters) == 1

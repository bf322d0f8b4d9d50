"""nanoGPT's own train.py, unchanged, under `erg record` on an H200."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run

DATA = Path(__file__).parents[2] / "data" / "h200_run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("nanogpt")
    with tarfile.open(DATA / "nanogpt.tar.gz") as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.mark.parametrize(
    ("name", "layers", "width", "context", "mfu"),
    [("gpt2-eager", 12, 768, 1024, 0.312), ("nano-char", 6, 384, 256, 0.124)],
)
def test_mfu_is_that_of_a_calculation_by_hand(
    runs: Path, name: str, layers: int, width: int, context: int, mfu: float
) -> None:
    """6 FLOPs a parameter of the products, and causal attention: 12 LHQT halved.

    The vocabulary of bytes is small (96 here); a token sees half the context.
    """
    readings = summarize(Run.open(runs / name)).readings
    speed, share = readings["throughput.tokens_per_s"], readings["utilization.mfu_frac"]
    assert isinstance(speed, Reading)
    assert isinstance(share, Reading)
    products = layers * 12 * width**2 + 96 * width
    per_token = 6 * products + 6 * layers * width * (context + 1)
    assert share.value == pytest.approx(speed.value * per_token / 989.5e12, rel=0.002)
    assert share.value == pytest.approx(mfu, rel=0.005)


def test_hardware_counters_that_were_read_too_seldom_explain_nothing(runs: Path) -> None:
    """They were read twice, 9.8 s and 3.7 s apart, for a window of 7.8 s.

    By their mean the device idled 34 % of the time, by their interval from none of it to 62 %. It
    was at its power limit throughout, and the driver's utilisation says 96.6 %.
    """
    explained = explain(evidence_of(Run.open(runs / "gpt2-eager")))
    shares = {block.title: block.share_frac for block in explained.blocks}
    assert not [title for title in shares if title.startswith("launch-bound")]
    assert shares["idle inside steps"] == pytest.approx(1 - 0.966 - 0.002, abs=0.001)
    assert "read too seldom for so short a window" in str(explained.missing)
    assert any("let the run last longer" in command for command in explained.record_next)


def test_a_small_model_waits_for_launches(runs: Path) -> None:
    blocks = explain(evidence_of(Run.open(runs / "nano-char"))).blocks
    assert max(block.share_frac for block in blocks if "launch-bound" in block.title) > 0.4


def test_the_whole_run_ends_with_the_command(runs: Path) -> None:
    """Not with the recorder, which had FLOPs to count and files to close: 0.28 s later here."""
    run = Run.open(runs / "gpt2-eager")
    at_s = {mark.name: (mark.t_ns - run.start_ns) / 1e9 for mark in run.writers[0].marks}
    assert at_s["closed"] - at_s["ended"] == pytest.approx(0.285, abs=0.001)
    readings = summarize(run).readings
    lasted = readings["time.run_s"]
    assert isinstance(lasted, Reading)
    assert lasted.value == pytest.approx(at_s["ended"], abs=1e-6)
    tokens = readings["throughput.whole_run_tokens_per_s"]
    assert isinstance(tokens, Reading)
    assert tokens.value == pytest.approx(261 * 16384 / at_s["ended"], rel=1e-6)

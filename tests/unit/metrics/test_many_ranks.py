"""64 ranks on 8 nodes: the values of a large run, and that it is not all in memory at once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.evidence import samples
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run

BENCH = Path(__file__).parents[3] / "bench"
NODES, GPUS, HOURS = 8, 8, 0.05


@pytest.fixture(scope="module")
def bench() -> Any:
    """The bench that writes such runs, and knows what is in them."""
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("ranks_scale", BENCH / "ranks_scale.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


@pytest.fixture(scope="module")
def run(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = bench.written(tmp_path_factory.mktemp("large") / "run", bench.Shape(NODES, HOURS))
    return path


def value(readings: dict[str, Any], key: str) -> float:
    found = readings[key]
    assert isinstance(found, Reading), found
    return found.value


def test_what_64_ranks_on_8_nodes_came_to(bench: Any, run: Path) -> None:
    """180 s of steps of 2 s; each GPU draws 600 + 60 sin t W; rank 37 is late."""
    found = summarize(Run.open(run)).readings
    assert value(found, "tokens.total") == 64 * 90 * 8192
    assert value(found, "steps.count") == 90
    truth_j = 64 * float(bench.joules(180.0) - bench.joules(0.02))
    assert value(found, "energy.run_j") == pytest.approx(truth_j, rel=1e-3)
    assert value(found, "energy.mean_w") == pytest.approx(64 * 600, rel=0.01)
    spread = found["ranks.spread_frac"]
    assert isinstance(spread, Reading)
    assert spread.value == pytest.approx(0.3 / 2, rel=0.02)
    assert spread.note.startswith("rank 37 on node-004 comes 300 ms later to each step")


def test_figures_are_the_same_with_hardly_anything_kept_in_memory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = summarize(Run.open(run))
    held = []
    let_go = samples.SampleColumns._let_go

    def watched(self: samples.SampleColumns, *, but: int) -> None:
        let_go(self, but=but)
        held.append(self._readings)

    monkeypatch.setattr(samples, "MAX_READINGS", 5_000)
    monkeypatch.setattr(samples.SampleColumns, "_let_go", watched)
    assert summarize(Run.open(run)) == whole
    # A node's power alone is 15 000 readings, of eight nodes 120 000.
    assert max(held) < 40_000

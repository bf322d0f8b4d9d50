"""`erg plot`: several charts at once, what is never replaced, and what is refused with a hint."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ergmeter.metrics.summarize import evidence_of
from ergmeter.runlog.reader import Run
from ergmeter.views.charts.time_charts import time_charts
from ergmeter.views.render.html import rendered
from tests.runs import even_steps, run_of
from tests.unit.metrics.test_explain_made import made

pytest.importorskip("vl_convert")

Erg = Callable[..., tuple[int, str, str]]
NOBODY = 65534


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a device that has no allocator, no node beside it, and no loss."""
    return made(tmp_path / "run").path


def test_all_is_every_chart_that_can_be_drawn_and_why_not_the_rest(
    erg: Erg, run: Path, tmp_path: Path
) -> None:
    code, out, err = erg("plot", run, "--kind", "all", "-o", tmp_path / "new" / "plots")
    assert code == 0
    written = {one.name for one in (tmp_path / "new" / "plots").iterdir()}
    assert {str(tmp_path / "new" / "plots" / one) for one in written} == set(out.splitlines())
    assert written == {
        f"{kind}.svg"
        for kind in (
            *("phases", "power", "energy", "activity", "clocks", "steps", "ladder", "waterfall"),
            *("time_spent", "energy_spent", "step_times", "roofline"),
        )
    }
    reasons = dict(re.findall(r"^erg: no plot of (.*?): (.+)$", err, re.MULTILINE))
    # Those that share a reason are in one line with it.
    assert set(reasons) == {
        *("memory, temperature", "loss"),
        "the node's CPU, beside accelerators, the node's disks, the node's network",
    }
    assert reasons["loss"].startswith("no step has a loss")


def test_kinds_can_be_repeated_and_one_that_can_not_be_drawn_is_a_failure(
    erg: Erg, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plots"
    kinds = ("--kind", "waterfall", "--kind", "loss", "--kind", "waterfall")
    code, told, err = erg("plot", run, *kinds, "-o", out, "--format", "png")
    assert (code, told) == (1, f"{out}/waterfall.png\n")
    assert err.startswith("erg: no plot of loss: no step has a loss")
    assert (out / "waterfall.png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_can_be_drawn_no_folder_is_made(erg: Erg, run: Path, tmp_path: Path) -> None:
    code, _, _ = erg("plot", run, "--kind", "loss", "--kind", "memory", "-o", tmp_path / "plots")
    assert code == 1
    assert not (tmp_path / "plots").exists()


def test_a_waterfall_is_drawn_with_its_figures(erg: Erg, run: Path, tmp_path: Path) -> None:
    erg("plot", run, "--kind", "waterfall", "-o", tmp_path / "w.svg")
    text = (tmp_path / "w.svg").read_text()
    for said in ("idle inside steps · 10.0 % · 500 J", "the model's FLOPs (MFU) · 40.0 % · 2 kJ"):
        assert f">{said}</text>" in text
    assert "100 % is 989.5 TFLOP/s dense bf16" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kind", "waterfal"), "no kind 'waterfal' of plot; did you mean waterfall? There are"),
        (("--kind", "zzz"), "no kind 'zzz' of plot; there are phases, power,"),
        (("other", "third"), "one run; `erg compare {run} other third --html FILE` draws several"),
        (("--format", "png"), "-o x.svg is not --format png: the name says what it will be"),
        (("--kind", "all"), "-o x.svg: 18 plots do not go into one file; name a directory"),
    ],
)
def test_misuse_is_one_line_with_what_to_do(
    erg: Erg,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = erg("plot", run, *arguments, "-o", "x.svg")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said.format(run=run) in err
    assert not Path("x.svg").exists()


@pytest.mark.parametrize("content", ["my drawing", "<svg><title>mine</title></svg>"])
def test_what_is_no_plot_of_ours_is_not_replaced(
    erg: Erg, run: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "plots").mkdir()
    kept = tmp_path / "plots" / "power.svg"
    kept.write_text(content)
    for target in (kept, kept.parent):
        code, out, err = erg("plot", run, "-o", target)
        assert (code, out) == (2, "")
        assert err == (
            f"erg: -o: {kept} exists and is not a plot, so it is not replaced; name another\n"
        )
    assert kept.read_text() == content


@pytest.mark.parametrize("name", ["x.svg", "x.png"])
def test_a_plot_that_is_replaced_is_named(erg: Erg, run: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    assert erg("plot", run, "-o", path) == (0, f"{path}\n", "")
    assert erg("plot", run, "--kind", "steps", "-o", path) == (0, f"{path} (replaced)\n", "")


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder that anybody can read, as pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_that_takes_no_file_is_refused_before_the_work(erg: Erg, everybodys: Path) -> None:
    run, folder = made(everybodys / "run").path, everybodys / "closed"
    folder.mkdir(mode=0o555)
    assert erg("card", run)[0] == 0  # loads what nobody may not read
    try:
        if os.geteuid() == 0:  # whom nothing is closed to
            os.seteuid(NOBODY)
        found = [
            erg(*command)
            for command in (
                ("plot", run, "-o", folder / "x.svg"),
                ("plot", run, "--kind", "all", "-o", folder / "plots"),
                ("report", run, "--html", folder / "x.html"),
                ("card", run, "-o", folder / "x.md"),
            )
        ]
    finally:
        os.seteuid(os.getuid())
    names = ("-o {}/x.svg", "-o {}/plots", "--html {}/x.html", "-o {}/x.md")
    said = [f"{one.format(folder)}: the directory {folder} can't be written to" for one in names]
    assert found == [(2, "", f"erg: {one}; name another\n") for one in said]


def test_a_single_line_has_no_legend_and_several_have(erg: Erg, run: Path, tmp_path: Path) -> None:
    for kind in ("power", "activity"):
        erg("plot", run, "--kind", kind, "-o", tmp_path / f"{kind}.svg")
    assert "role-legend" not in (tmp_path / "power.svg").read_text()
    assert "role-legend" in (tmp_path / "activity.svg").read_text()
    charts = time_charts(evidence_of(Run.open(run)), ("power", "activity"))
    power, activity = (rendered("figure", chart) for chart in charts)
    assert "legend" not in power
    assert '<ul class="legend"><li class="c1">SMs</li><li class="c2">' in activity


def test_points_on_the_frame_of_a_file_are_whole(erg: Erg, tmp_path: Path) -> None:
    """The first step begins with the run: nothing cuts its dot in half."""
    path = run_of(tmp_path / "bare", steps=even_steps(20)).path
    erg("plot", path, "--kind", "steps", "-o", tmp_path / "steps.svg")
    assert "clip-path" not in (tmp_path / "steps.svg").read_text()

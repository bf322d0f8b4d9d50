"""`%%erg` in a real Jupyter kernel, which nbconvert runs, and the notebook among the examples."""

from __future__ import annotations

import base64
import html
import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from ergmeter.units import percent
from ergmeter.views.reading_text import column_text
from tests.e2e.conftest import environment, needs, reported

if TYPE_CHECKING:
    from types import ModuleType

needs("nbconvert", "ipykernel")

ROOT = Path(__file__).parents[2]
ON_CARD = ("throughput.tokens_per_s", "time.step_s", "utilization.mfu_frac")
PLAIN, HTML = "text/plain", "text/html"
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@cache
def example() -> ModuleType:
    """The script that makes the example."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "scripts/example_notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executed(folder: Path, cells: tuple[tuple[str, str], ...], **variables: str) -> list[Any]:
    """The outputs of each code cell, in a kernel of its own, which is in this folder."""
    path = folder / "notebook.ipynb"
    path.write_text(json.dumps(example().notebook(cells)))
    done = example().executed(path, "--allow-errors", environment=environment(**variables))
    return [cell["outputs"] for cell in done["cells"] if cell["cell_type"] == "code"]


def run_cells(folder: Path, *sources: str, **variables: str) -> list[Any]:
    """The outputs of these cells, after that which loads the extension."""
    cells = tuple(("code", source) for source in ("%load_ext ergmeter", *sources))
    loaded, *outputs = executed(folder, cells, **variables)
    assert loaded == []
    return outputs


def printed(outputs: list[Any]) -> str:
    """What a cell printed, its results and the tracebacks of its errors."""
    parts = []
    for output in outputs:
        parts += [output.get("text", ""), output.get("data", {}).get(PLAIN, "")]
        parts += output.get("traceback", [])
    return _COLOURS.sub("", "\n".join("".join(part) for part in parts))


def page_of(outputs: list[Any]) -> str:
    """The HTML of the last output that has any."""
    pages = [output["data"][HTML] for output in outputs if HTML in output.get("data", {})]
    return "".join(pages[-1])


def chart_in(page: str) -> str:
    """The chart that is in an image of a page, which asks for nothing else."""
    (source,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert not re.search(r"<script|<link|\son\w+=|https?://", page)
    return base64.b64decode(source).decode()


def reading_of(stored: dict[str, Any]) -> Reading:
    """A reading of the JSON of `erg report`."""
    return Reading(**{**stored, "impossible": stored["impossible"] or ""})


def text_in(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


@pytest.mark.frameworks
def test_the_example_shows_a_card_and_a_chart_with_the_numbers_of_its_run(tmp_path: Path) -> None:
    outputs = executed(tmp_path, example().CELLS)
    assert not any(output["output_type"] == "error" for cell in outputs for output in cell)
    _, _, trained, reading, steps = outputs
    (path,) = (tmp_path / "runs").iterdir()
    stored = reported(path, "--window", "training")["readings"]
    page = page_of(trained)
    for key in ON_CARD:
        text = column_text(reading_of(stored[key]))
        assert text in printed(trained), key
        assert text in text_in(page), key
    chart = chart_in(page)
    assert chart.startswith("<svg")
    assert "from the peak to what was achieved" in text_in(chart)
    mfu = percent(stored["utilization.mfu_frac"]["value"])
    assert f"the model's FLOPs (MFU) · {mfu}" in text_in(chart)
    assert str(reading_of(stored["throughput.tokens_per_s"])) in text_in(page_of(reading))
    assert "tokens_computed" in page_of(steps)
    run = Run.open(path)
    assert (run.status, len(run.to_arrow()), set(run.steps()["tokens_computed"])) == (
        *("finished", 300),
        {1024.0},
    )


def test_the_stored_example_is_of_these_cells_and_names_no_machine() -> None:
    text = example().EXAMPLE.read_text()
    stored = json.loads(text)
    sources = [(cell["cell_type"], cell["source"]) for cell in stored["cells"]]
    want = "make it again: python scripts/example_notebook.py"
    assert [(kind, "".join(source)) for kind, source in sources] == list(example().CELLS), want
    outputs = [cell["outputs"] for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert "tokens/s" in printed(outputs[2])
    assert chart_in(page_of(outputs[2])).startswith("<svg")
    assert not re.search(r"/(home|root|tmp|work|Users)/|runs/20", text)


@pytest.mark.frameworks
def test_trainings_of_cells_are_seen_whole_and_apart(tmp_path: Path) -> None:
    """Whatever a cell before has loaded or made; between cells nothing is measured."""
    loop = "\n".join(
        (
            "from torch import nn",
            "def made(width):",
            "    model = nn.Sequential(nn.Embedding(9, width), nn.Linear(width, 9))",
            "    return model, torch.optim.SGD(model.parameters(), lr=0.1)",
            "def train(model, optimizer, steps):",
            "    for _ in range(steps):",
            "        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()",
            "        optimizer.step()",
        )
    )
    meter = "\n".join(
        (
            "%%erg --out own",
            "from ergmeter import Meter",
            "train(*early, 4)",
            "open_one = Meter().start()",
            "for _ in range(5):",
            "    with open_one.step(tokens=100): train(*early, 1)",
        )
    )
    whole = "--warmup-steps 0"
    outputs = run_cells(
        tmp_path,
        f"%%erg --out inside {whole}\nimport torch\n{loop}\nearly = made(4)\ntrain(*early, 7)",
        f"%%erg --out again {whole}\ntrain(*early, 8)",
        "train(*early, 9); late = made(5)",
        "%%erg --out two\ntrain(*late, 10); train(*made(6), 11)",
        meter,
        "open_one.step_end()",
        OMP_NUM_THREADS="1",
    )
    for name, steps in (("inside", 7), ("again", 8)):
        run = Run.open(tmp_path / name)
        assert run.steps()["tokens_computed"].tolist() == [6.0] * steps, name
        assert len(run.trainings) == 1
        assert run.flops, name
        assert not [mark for mark in run.marks if mark.name == "step_starts_not_seen"]
        assert f"{steps} steps" in printed(outputs[("inside", "again").index(name)])
    assert outputs[2] == []
    two = Run.open(tmp_path / "two")
    counts = [len(two.training(number).to_arrow()) for number in (1, 2)]
    assert counts == [10, 11]
    assert printed(outputs[3]).count("╭─") == 2
    own = Run.open(tmp_path / "own")
    assert sorted(own.steps()["tokens_computed"].tolist()) == [6.0] * 4 + [100.0] * 5
    assert "the Meter is closed" in printed(outputs[5])
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("*/.hook"))


def test_a_cell_without_steps_and_one_that_fails_have_cards_and_misuse_has_a_line(
    tmp_path: Path,
) -> None:
    outputs = run_cells(
        tmp_path,
        "%%erg --name nap --out nap\nimport time\ntime.sleep(0.01)\n'the result'",
        "%%erg --out failed\nbefore = 1\n1 / 0",
        "(before, erg_run.status, erg_run.path.name)",
        "%%erg --out wrong\n1 +",
        "%%erg --help\nraise SystemExit",
        "%erg -h",
        "%%erg --nam x\nunmeasured = True",
        "%%erg --name 'x\nunmeasured = True",
        "%%erg --out nap\nunmeasured = True",
        "%%erg --peak much\nunmeasured = True",
        "%erg",
        "from ergmeter import Meter; open_one = Meter('open').start()",
        "%%erg\nunmeasured = True",
        "open_one.close(); import os; ('unmeasured' in globals(), 'ERGMETER_RUN' in os.environ)",
    )
    nap, failed, after, wrong, help_text, short_help, *misuse, _, measured, last = outputs
    assert "'the result'" in printed(nap)
    assert "nap · finished" in printed(nap)
    assert "no steps: no optimizer of torch stepped in the cell" in printed(nap)
    assert "failed (ZeroDivisionError)" in printed(failed)
    assert printed(failed).count("ZeroDivisionError: division by zero") == 1
    assert "1 / 0" in printed(failed)
    assert [output["ename"] for output in failed if output["output_type"] == "error"] == [
        "ZeroDivisionError"
    ]
    assert printed(after).strip() == "(1, 'failed (ZeroDivisionError: division by zero)', 'failed')"
    assert "failed (SyntaxError)" in printed(wrong)
    assert printed(wrong).count("SyntaxError: invalid syntax") == 1
    for text in (printed(help_text), printed(short_help)):
        assert text.startswith("Usage: %%erg [OPTIONS]")
        assert "--warmup-steps" in text
    words = (
        "No such option '--nam'",
        "No closing quotation",
        "nap exists and is not empty",
        "'much'",
        "a cell is measured: begin it with %%erg",
    )
    for output, word in zip(
        [*misuse, measured], [*words, "into open: end that first"], strict=True
    ):
        (line,) = printed(output).strip().splitlines()
        assert line.startswith("UsageError: %%erg: ")
        assert word in line
    assert printed(last).strip() == "(False, False)"


def test_under_erg_record_a_cell_is_measured_once(tmp_path: Path) -> None:
    (output,) = run_cells(tmp_path, "%%erg\n1", ERGMETER_RUN=str(tmp_path / "around"))
    assert f"measured already, into {tmp_path / 'around'}" in printed(output)


def test_without_ipython_there_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ergmeter

    monkeypatch.setitem(sys.modules, "IPython", None)
    with pytest.raises(ergmeter.PluginError) as raised:
        ergmeter.load_ipython_extension(None)
    assert str(raised.value) == "%load_ext ergmeter needs IPython: pip install ipykernel"


@pytest.mark.frameworks
def test_a_trainer_is_seen_in_measured_cells_alone(tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    source = (ROOT / "examples" / "hf_trainer.py").read_text()
    begin, _, made = source.rpartition("\nTrainer(")
    trainer = f"trainer = Trainer({made}".replace(".train()", "")
    outputs = run_cells(
        tmp_path,
        f"import sys; sys.argv = ['x', '4']\n{begin}",
        trainer,
        "%%erg --out made_before\ntrainer.train()",
        f"%%erg --out made_inside\n{trainer}\ntrainer.train()",
        "trainer.train()",
        "%%erg --out again\ntrainer.train()",
        OMP_NUM_THREADS="1",
    )
    assert not [output for cell in outputs for output in cell if output["output_type"] == "error"]
    for name in ("made_before", "made_inside", "again"):
        steps = Run.open(tmp_path / name).to_pandas()
        trained = steps[steps["phase"] == "train"]
        assert trained["tokens_computed"].tolist() == [4 * 256] * 4, name
    assert trained["loss"].notna().all()
    assert not (tmp_path / "runs").exists()

"""Tags and notes of a run, wherever the run is shown: as they are, and never as markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.runlog.manage.labels import LABELS_FILE, annotate, tag
from tests.runs import even_steps, run_of

Erg = Callable[..., tuple[int, str, str]]
NOTE = "hot <img src=x onerror=alert(1)> [red]a|b[/red] \x1b[31m*c*"
SHOWN = "hot <img src=x onerror=alert(1)> [red]a|b[/red] [31m*c*"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = run_of(tmp_path / "runs" / "one", steps=even_steps(20, tokens_computed=5)).path
    tag(path, add=["baseline", "h200"])
    annotate(path, "the first")
    annotate(path, NOTE)
    return path


def test_the_card_shows_them_as_they_are(erg: Erg, run: Path) -> None:
    _, out, _ = erg("report", run)
    assert re.search(r"tags +baseline, h200 ", out)
    assert SHOWN in " ".join(out.replace("│", " ").split())
    assert "\x1b" not in out
    assert out.index("the first") < out.index("hot <img")


def test_json_has_them_as_they_were_written(erg: Erg, run: Path) -> None:
    labels = json.loads(erg("report", run, "--json")[1])["labels"]
    assert labels["tags"] == ["baseline", "h200"]
    assert [one["text"] for one in labels["notes"]] == ["the first", NOTE]
    (listed,) = json.loads(erg("list", run.parent, "--json")[1])
    assert listed["notes"] == labels["notes"]


def test_the_model_card_has_them_escaped(erg: Erg, run: Path) -> None:
    _, out, _ = erg("card", run)
    assert "\n- tags: baseline, h200\n" in out
    assert r": hot &lt;img src=x onerror=alert(1)&gt; \[red\]a\|b\[/red\] \[31m\*c\*" in out


def test_the_list_has_the_last_note_of_a_run_and_how_many_there_are(
    erg: Erg, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(run.parent / "[b]two", steps=even_steps(20, tokens_computed=5))
    _, out, _ = erg("list", run.parent)
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[-1] == f"note on one (the last of 2): {SHOWN}"
    assert any(line.startswith("[b]two ") for line in lines)
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, erg("list", run.parent)[1].splitlines())) <= 60


def test_without_them_nothing_is_said(erg: Erg, tmp_path: Path) -> None:
    path = run_of(tmp_path / "runs" / "bare", steps=even_steps(20, tokens_computed=5)).path
    assert "tags" not in erg("report", path)[1]
    assert "Tags and notes" not in erg("card", path)[1]
    assert json.loads(erg("report", path, "--json")[1])["labels"] == {"tags": [], "notes": []}
    assert "note" not in erg("list", path.parent)[1]


def test_broken_ones_cost_no_figure_and_are_told(erg: Erg, run: Path) -> None:
    (run / LABELS_FILE).write_text("{broken")
    code, out, _ = erg("report", run)
    assert code == 0
    assert re.search(r"tokens/s +5 ", out)
    assert re.search(r"tags and notes +can't be read: ", out)
    whole = json.loads(erg("report", run, "--json")[1])
    assert f"{LABELS_FILE}: not JSON" in whole["labels"]["missing"]
    assert whole["readings"]["throughput.tokens_per_s"]["value"] == 5.0
    (run / LABELS_FILE).unlink()
    (run / LABELS_FILE).mkdir()  # what the system refuses to read
    assert re.search(r"tags and notes +can't be read: ", erg("report", run)[1])

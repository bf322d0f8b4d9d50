"""What `print` and a notebook show of runs, summaries, comparisons and readings."""

from __future__ import annotations

import base64
import re
import sys
from html import unescape
from pathlib import Path

import pytest

from ergmeter import Reading, Run, Summary, summarize
from ergmeter.compare.comparison import compare
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.sources import read_entries
from ergmeter.records import Mark
from ergmeter.units import NS_PER_S
from tests.runs import GPU, add_writer, even_steps, make_run

EVIL = "<script>alert(1)</script>"


def run_of(path: Path, *, seconds: float = 0.5) -> Run:
    made = make_run(path, name=path.name if "name" not in path.name else EVIL)
    marks = [Mark(1, "probe_failed", f"{EVIL} & co")]
    steps = even_steps(40, seconds=seconds, tokens_computed=1000, tokens_real=600)
    add_writer(made, steps=steps, settings={"warmup_steps": 2}, devices=[GPU], marks=marks)
    return Run.open(made)


def text_in(markup: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", markup))


def check_safe(markup: str) -> None:
    """No script, no request, and no text of the run as markup."""
    assert not re.search(r"<(script|link|style|iframe)|\son\w+=|https?://", markup)
    assert set(re.findall(r"<(\w+)", markup)) <= {"pre", "span", "img", "p"}


def test_a_summary_prints_its_card_in_79_columns(tmp_path: Path) -> None:
    summary = summarize(run_of(tmp_path / "name"))
    lines = str(summary).splitlines()
    assert max(map(len, lines)) == 79
    assert lines[0].startswith("╭─ <script>alert(1)</script> · finished")
    assert "tokens/s       1200  < 0.1 %" in str(summary)
    assert "\x1b" not in str(summary)
    assert f"{summary}" == str(summary)
    markup = summary._repr_html_()
    check_safe(markup)
    assert text_in(markup).splitlines() == lines


def test_a_card_is_of_the_settings_of_its_summary(tmp_path: Path) -> None:
    from ergmeter import Settings

    run = run_of(tmp_path / "a")
    assert "30 steps in 15 s, after 10 steps of warm-up" in str(
        summarize(run, Settings(warmup_steps=10))
    )
    assert "38 steps in 19 s, after 2 steps of warm-up" in str(summarize(run))


def test_a_summary_that_was_made_by_hand_prints_its_fields() -> None:
    summary = Summary("a", "finished", {"time.step_s": Reading(1.0, "s", "measured")})
    assert "".join(str(summary).split()) == "".join(repr(summary).split())
    check_safe(summary._repr_html_())


def test_a_run_has_a_chart_below_its_card(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    run = run_of(tmp_path / "name")
    markup = run._repr_html_()
    check_safe(markup)
    (source,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', markup)
    chart = base64.b64decode(source).decode()
    assert chart.startswith("<svg")
    assert "<script" not in chart
    assert "where the time went" in text_in(chart)
    assert run._repr_mimebundle_(include=None, exclude=None) == {
        "text/plain": str(summarize(run)),
        "text/html": markup,
    }


def test_without_the_chart_library_there_is_the_line_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    markup = run_of(tmp_path / "a")._repr_html_()
    assert text_in(markup).endswith("a chart needs vl_convert: pip install 'ergmeter[html]'")
    assert "tokens/s" in markup
    check_safe(markup)


def test_a_comparison_prints_its_verdicts_and_table(tmp_path: Path) -> None:
    for name, seconds in (("a/1", 0.5), ("a/2", 0.51), ("b/1", 0.4), ("b/2", 0.41)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        run_of(tmp_path / name, seconds=seconds)
    entries = read_entries([tmp_path / "a", tmp_path / "b"])
    comparison = compare(entries, CompareOptions(("source",)))
    text = str(comparison)
    assert "tokens/s" in text
    assert re.search(r"b against \S*a", text)
    assert max(map(len, text.splitlines())) <= 79
    markup = comparison._repr_html_()
    check_safe(markup)
    assert text_in(markup).strip() == text.strip()


def test_a_reading_is_escaped_and_has_its_note_beside_it() -> None:
    reading = Reading(192642.0, "tokens/s", "measured", 187e3, 198.3e3, f'{EVIL} "quoted"')
    assert str(reading) == "192,642 tokens/s (187,000-198,300), measured"
    markup = reading._repr_html_()
    assert text_in(markup) == str(reading)
    assert "&lt;script&gt;" in markup
    assert markup.count('"') == 2


def test_a_run_is_a_table_of_pandas_polars_and_arrow(tmp_path: Path) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    run = run_of(tmp_path / "a")
    table = run.to_arrow()
    assert table.column_names[:2] == ["start_ns", "end_ns"]
    assert {"tokens_computed", "tokens_real", "time", "writer"} <= set(table.column_names)
    frame, polar = run.to_pandas(), run.to_polars("steps")
    assert isinstance(frame, pandas.DataFrame)
    assert isinstance(polar, polars.DataFrame)
    assert list(frame.columns) == polar.columns == table.column_names
    assert (
        frame["end_ns"].tolist()
        == polar["end_ns"].to_list()
        == [number * NS_PER_S // 2 for number in range(1, 41)]
    )
    assert run.to_arrow("marks")["name"].to_pylist()
    from ergmeter import UsageError

    with pytest.raises(UsageError, match="no table 'step'; there are samples, steps, reported"):
        run.to_pandas("step")


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_table_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from ergmeter import PluginError

    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PluginError) as raised:
        getattr(run_of(tmp_path / "a"), f"to_{name}")()
    assert str(raised.value) == f"to_{name} needs {name}: pip install {name}"

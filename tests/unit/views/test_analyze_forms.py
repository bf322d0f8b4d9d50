"""The numbers of `erg analyze` are the same on a terminal, in Markdown, in HTML and in JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.compat.nki_llama import analyze_compat
from ergmeter.neuron.analysis import Analysis, AnalysisRequest, Watch, analyze
from ergmeter.neuron.score import Baseline
from ergmeter.views.calculate.analyze import console_document, document
from tests.e2e.test_analyze import bar
from tests.unit.neuron.graphs import config, one_dot, write
from tests.unit.views.test_four_forms import cells, forms_of, is_in, leaves, numbers, words

DATA = Path(__file__).parents[2] / "data"
# Sums, shares and logarithms of what the JSON has, and numbers in sentences.
LEFT_OUT = frozenset({"log2 of the ratio", "of all", "of this job", "formula", "from", "ratio"})
LEFT_OUT |= {"what it counts that exact does not"}


@pytest.mark.parametrize("analyzed", [analyze, analyze_compat])
@pytest.mark.parametrize("throughput", [None, 4000.0])
def test_all_forms_have_the_same_numbers(
    tmp_path: Path, analyzed: Callable[[AnalysisRequest, Watch], Analysis], throughput: float | None
) -> None:
    write(tmp_path / "cache" / "MODULE_1+0", one_dot(3, 5, 7, config(45), config(None)))
    write(tmp_path / "cache" / "MODULE_2+0", one_dot(1, 2, 3))
    lines = [bar(step, 600 + 32 * step, 2.0) for step in range(1, 21)]
    (tmp_path / "t.log").write_text("\r".join(lines) + "\n")
    request = AnalysisRequest(
        str(DATA / "neuron" / "llama3_8b_sft.yaml"), str(DATA / "configs" / "llama-3.1-8b.json"),
        str(tmp_path / "cache"), str(tmp_path / "t.log"), throughput=throughput,
        detailed=True, calculate_score=True, per_file_scores=True, baseline=Baseline(10.0, 1.0),
    )  # fmt: skip
    analysis = analyzed(request, lambda *_: None)
    shown = document(analysis, most_graphs=20)
    printed = set(map(float, words(" | ".join(cells(shown, "html")))))
    for name, text in forms_of(shown).items():
        assert printed <= numbers(text), name
    data = {1.0, *leaves(shown.data)}
    for cell in cells(shown, "html", left_out=LEFT_OUT):
        assert [word for word in words(cell) if not is_in(word, data)] == [], cell
    console = forms_of(console_document(analysis, per_file=True))["terminal"]
    assert printed <= numbers(console)

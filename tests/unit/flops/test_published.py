"""Published results are reproduced under their own conventions, and their faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import published

FIGURES = published.compared()


def _name(one: published.Compared) -> str:
    return f"{one.source[:20]} {one.model} {one.seq_len} {one.device} {one.what}"


@pytest.mark.parametrize("one", [f for f in FIGURES if not f.flag], ids=_name)
def test_a_published_figure_is_reproduced(one: published.Compared) -> None:
    assert one.agrees, f"printed {one.printed}, ours {one.ours:.3f}, allowed {one.allowed:.3f}"


@pytest.mark.parametrize("one", [f for f in FIGURES if f.flag], ids=_name)
def test_a_figure_whose_source_is_wrong_is_told(one: published.Compared) -> None:
    assert not one.agrees


def test_most_of_the_rows_are_there() -> None:
    assert len(published.rows()) >= 150
    assert len({one.convention for one in FIGURES}) >= 8


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "published.md"
    assert page.read_text("utf-8") == published.page(), "run ./dev docs"

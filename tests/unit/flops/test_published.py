"""Published results are reproduced under their own conventions, and their faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import published

ROWS = published.rows()  # counted by the tests, and not wherever this file is collected


def _name(row: dict[str, str]) -> str:
    return f"{row['source'][:20]} {row['model']} {row['seq_len']} {row['device']}"


@pytest.mark.parametrize("row", [one for one in ROWS if not one["flag"]], ids=_name)
def test_published_figures_are_reproduced(row: dict[str, str]) -> None:
    for one in published.of(row):
        assert one.agrees, (
            f"{one.what}: printed {one.printed}, ours {one.ours:.3f}, allowed {one.allowed:.3f}"
        )


@pytest.mark.parametrize("row", [one for one in ROWS if one["flag"]], ids=_name)
def test_figures_whose_source_is_wrong_are_told(row: dict[str, str]) -> None:
    assert not any(one.agrees for one in published.of(row))


def test_most_of_the_rows_are_there() -> None:
    assert len(published.rows()) >= 150
    assert len({one.convention for one in published.compared()}) >= 8


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "published.md"
    assert page.read_text("utf-8") == published.page(), "run ./dev docs"

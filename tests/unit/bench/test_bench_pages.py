"""What the pages of a bench say, and of what: cut off, by another way, in bytes."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from ergmeter.bench.overview import Overview
from ergmeter.bench.tables import as_table
from ergmeter.views.bench import report_document
from ergmeter.views.gate import cells_page
from ergmeter.views.render.html import html as page_of
from tests.unit.bench.rows import compare, gate, repeats, row

pytest.importorskip("vl_convert")


def page(*rows: dict[str, Any], most: int | None = None) -> str:
    found = Overview(most=most)
    found.add(as_table([{**one, "index": number} for number, one in enumerate(rows)]))
    document = report_document(found, name="b", page=Path("page.html"))
    return words(page_of(document), "matrices")


def compared(new: list[dict[str, Any]], ref: list[dict[str, Any]], *rules: str) -> str:
    sides = as_table(new), as_table(ref)
    found = compare(*sides)
    judged = gate(*sides, rules)
    return page_of(cells_page(found, judged, new="new", ref="ref"))


def words(whole: str, part: str) -> str:
    inner = re.search(rf'<section id="{part}".*?</section>', whole, re.DOTALL)
    assert inner is not None
    return html.unescape(re.sub(r"<[^>]+>", " ", inner[0]))


def test_what_is_said_of_a_cut_bench_is_said_of_what_is_shown() -> None:
    failed = [row(num_gpus=n, status="oom") for n in range(3)]
    said = page(*failed, row(num_gpus=9, tokens_per_s=1.0), most=3)
    assert "The first 3 of 4 configurations: --all shows the others." in said
    assert "No cell that is shown has: tokens/s, tokens/s per device" in said
    said = page(row(num_gpus=9, tokens_per_s=1.0), *failed, most=3)
    assert "No cell that is shown has: tokens/s per device" in said
    whole = page(row(num_gpus=9, tokens_per_s=1.0))
    assert "configurations: --all" not in whole
    assert "No cell has: tokens/s per device" in whole


def test_memory_is_that_of_the_table() -> None:
    said = page(row(num_gpus=1, memory_hf_peak_bytes=2e9), row(num_gpus=2))
    assert "memory in tensors, peak (hf)" in said
    assert "2 GB" in said
    assert "memory" not in said.partition("No cell has:")[2]
    assert page(row(tokens_per_s=1.0)).partition("No cell has:")[2].rstrip().endswith("memory.")


def test_a_page_has_the_gates_verdicts_the_worst_first_and_every_change() -> None:
    steady = [1000.0, 1004.0, 996.0]
    ref = [
        *repeats("same", "real_tokens_per_s", steady, loss=2.0),
        *repeats("slower", "real_tokens_per_s", steady, loss=2.0),
        *repeats("gone", "real_tokens_per_s", steady),
    ]
    new = [
        *repeats("same", "real_tokens_per_s", steady, loss=2.0),
        *repeats("slower", "real_tokens_per_s", [900.0, 904.0, 896.0], loss=2.0),
        *repeats("fresh", "real_tokens_per_s", steady),
    ]
    whole = compared(new, ref, "tokens_per_s -3%", "loss +-1%")
    rows = re.findall(r"<tr><td[^>]*>(\w+)</td><td[^>]*>(\w+)</td><td[^>]*>([^<]*)</td>", whole)
    assert rows[:4] == [
        ("worse", "slower", "tokens_per_s -3%"),
        ("inconclusive", "gone", ""),
        ("pass", "same", "tokens_per_s -3%"),
        ("pass", "same", "loss +-1%"),
    ]
    assert "missing in NEW: gone" in words(whole, "changes")
    assert "slower" in words(whole, "changes")


def test_a_difference_of_bytes_has_its_unit_and_the_worst_is_first() -> None:
    def side(**sizes: float) -> list[dict[str, Any]]:
        pairs = sizes.items()
        return [one for name, at in pairs for one in repeats(name, "memory_hf_peak_bytes", [at])]

    new, ref = side(a=9e9, b=20e9, c=11e9), side(a=10e9, b=10e9, c=10e9)
    whole = compared(new, ref, "peak_memory +500000000")
    assert '"NEW minus REF, GB"' in whole
    points = re.search(r'"name": ?"limits", ?"values": ?\[([^\]]*)', whole)
    assert points is not None
    assert set(re.findall(r'"v": ?([-\d.]+)', points[1])) == {"0.5"}
    table = words(whole, "ratios")
    order = [name for name in re.findall(r"\s([abc])\s", table) if name]
    assert order[:3] == ["b", "c", "a"]
    assert "+10 GB" in table

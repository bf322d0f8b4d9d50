"""Timestamps as logs have them, against Python's own calendar."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.importers.engine.timestamps import stamp_ns
from ergmeter.importers.keyvalue import KeyValueImporter
from tests.unit.importers.captured import marks, steps
from tests.unit.importers.programs import from_file

STYLES = {
    "%Y-%m-%d %H:%M:%S,%f step=1": True,
    "[%Y-%m-%d %H:%M:%S.%f: ] x": True,
    "[NeMo I %Y-%m-%d %H:%M:%S] x": True,
    "%Y-%m-%dT%H:%M:%S.%fZ x": True,
    "%Y/%m/%d %H:%M:%S x": True,
    "%m/%d/%Y %H:%M:%S - INFO - x": True,
    "%a %b %d %H:%M:%S %Y x": True,
    "[%Y-%m-%d-%H%M%S][I] x": True,
    "I%m%d %H:%M:%S.%f 1234 x.py:1] x": False,
    "%b %d %H:%M:%S host x": False,
    "[rank0]: %Y-%m-%d %H:%M:%S x": True,
}
moments = st.datetimes(datetime(2001, 1, 1), datetime(2099, 12, 31))


@given(moments, st.sampled_from(list(STYLES)))
def test_a_stamp_is_read_in_the_style_it_comes_in(moment: datetime, style: str) -> None:
    moment = moment.replace(tzinfo=timezone.utc)
    moment = moment if "%f" in style else moment.replace(microsecond=0)
    if not STYLES[style]:
        if (moment.month, moment.day) == (1, 1):
            return
        moment = moment.replace(year=2000) if moment.month != 2 else moment.replace(2000, day=5)
    since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)
    assert stamp_ns(moment.strftime(style)) == since // timedelta(microseconds=1) * 1000


def test_of_a_date_with_slashes_a_month_is_none_above_twelve() -> None:
    day = stamp_ns("2025-06-13 10:00:00")
    assert day is not None
    for text in ("06/13/2025 10:00:00", "13/06/2025 10:00:00", "25/06/13 10:00:00",
                 "06/13/25 10:00:00"):  # fmt: skip
        assert stamp_ns(f"[{text}] step=1") == day, text


@pytest.mark.parametrize("text", [
    "Epoch 0:  1%| | 795/77225 [9:07:58<878:01:48, 41.36s/it, loss=3.1]",
    " 5%|x| 7/12 [00:01<00:02, 4.9it/s]", "step=3 took 00:01:02", "99:99:99 x", "[25:00:00] x",
    "2026-13-45 10:00:00 x", "99/99/2025 10:00:00", "",
])  # fmt: skip
def test_what_is_no_stamp_is_none(text: str) -> None:
    assert stamp_ns(text) is None


def test_times_of_day_go_on_past_midnight() -> None:
    records = from_file(
        KeyValueImporter(),
        "[23:59:50] step=1 loss=2", "[23:59:58] step=2 loss=2", "[00:00:06] step=3 loss=2",
        "[00:00:14] step=4 loss=2",
    )  # fmt: skip
    assert [(s.index, s.window.duration_s) for s in steps(records)] == [(2, 8), (3, 8), (4, 8)]
    assert "which have no date" in marks(records, "assumed")[0]

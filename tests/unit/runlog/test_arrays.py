"""Arrays made by their buffers are those that pyarrow itself would make."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.runlog.arrays import as_numpy, numbers, texts

WHOLE = st.integers(-(2**62), 2**62)


@given(st.lists(st.none() | WHOLE))
def test_integers_with_gaps(values: list[int | None]) -> None:
    assert numbers(values, pa.int64()).equals(pa.array(values, pa.int64()))


@given(st.lists(st.none() | st.floats(allow_nan=False)))
def test_floats_with_gaps(values: list[float | None]) -> None:
    assert numbers(tuple(values), pa.float64()).equals(pa.array(values, pa.float64()))


@given(st.lists(st.none() | st.sampled_from(["", "GPU-0", "größer", "雪"])))
def test_texts_of_a_vocabulary(values: list[str | None]) -> None:
    made = texts(values, ["GPU-0", "", "雪", "größer"])
    assert made.cast(pa.string()).equals(pa.array(values, pa.string()))


@given(
    st.lists(st.lists(st.none() | st.floats(-1e9, 1e9), max_size=9), max_size=6), st.integers(0, 5)
)
def test_columns_come_back_as_numpy_also_when_sliced(
    chunks: list[list[float | None]], skip: int
) -> None:
    column = pa.chunked_array([pa.array(chunk, pa.float64()) for chunk in chunks], pa.float64())
    column = column.slice(skip)
    flat = [value for chunk in chunks for value in chunk][skip:]
    expected = np.array([np.nan if value is None else value for value in flat])
    np.testing.assert_array_equal(as_numpy(column), expected)


def test_integers_without_gaps_stay_integers() -> None:
    column = pa.chunked_array([pa.array([2**60 + 1, 5])])
    assert as_numpy(column).tolist() == [2**60 + 1, 5]

"""Converts Python values to Arrow arrays and Arrow columns to numpy, by their buffers.

`pa.array` and `to_numpy` import pandas to check for pandas objects. That costs half a second and
80 MB inside a training, or before a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

# Not `to_pandas_dtype`: pyarrow 25 imports pandas for it, even for an integer type.
_NUMPY: dict[pa.DataType, Any] = {
    getattr(pa, name)(): getattr(np, name)
    for name in ("int8", "int16", "int32", "int64", "float32", "float64")
}


_FEW_CHUNKS = 8


def numbers(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Make an Arrow array of integers or floats; None becomes null."""
    dtype = _NUMPY[kind]
    absent = values.count(None)
    if not absent:
        return _array(kind, np.array(values, dtype=dtype), None, 0)
    valid = np.array([value is not None for value in values])
    filled = np.array([0 if value is None else value for value in values], dtype=dtype)
    return _array(kind, filled, valid, absent)


def texts(values: Sequence[str | None], vocabulary: Sequence[str]) -> pa.Array:
    """Make a dictionary array of texts, all in the vocabulary; None becomes null."""
    codes = {text: code for code, text in enumerate(vocabulary)}
    indices = numbers([None if v is None else codes[v] for v in values], pa.int16())
    return pa.DictionaryArray.from_arrays(indices, _strings(vocabulary))


def as_numpy(column: pa.ChunkedArray) -> Any:  # noqa: ANN401  an array of the column's own type
    """Return a column of numbers as numpy array; with nulls, as floats with NaN for them."""
    if column.num_chunks > _FEW_CHUNKS:  # a live file has one for each hand-over
        column = pa.chunked_array([column.combine_chunks()])
    chunks = [_chunk_as_numpy(chunk) for chunk in column.chunks if len(chunk)]
    if not chunks:
        return np.empty(0, dtype=_NUMPY[column.type])
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def present(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Return the rows where a column of numbers is neither null nor NaN, and their values."""
    rows, values = [], []
    first = 0
    for chunk in (column.combine_chunks(),) if column.num_chunks > _FEW_CHUNKS else column.chunks:
        data, valid = _data_and_valid(chunk)
        own = np.arange(len(data)) if valid is None else np.flatnonzero(valid)
        floats = np.asarray(data if valid is None else data[own], dtype=np.float64)
        absent = np.isnan(floats)
        if absent.any():
            own, floats = own[~absent], floats[~absent]
        rows.append(own + first if first else own)
        values.append(floats)
        first += len(chunk)
    if len(rows) == 1:
        return rows[0], values[0]
    return np.concatenate([np.empty(0, np.int64), *rows]), np.concatenate([np.empty(0), *values])


def _chunk_as_numpy(chunk: pa.Array) -> Any:  # noqa: ANN401
    values, valid = _data_and_valid(chunk)
    return values if valid is None else np.where(valid, values, np.nan)


def _data_and_valid(chunk: pa.Array) -> tuple[Any, Any]:
    """Return an array's numbers and a mask of the valid ones; the mask is None if all are."""
    validity, data = chunk.buffers()
    start, end = chunk.offset, chunk.offset + len(chunk)
    values = np.frombuffer(data, dtype=_NUMPY[chunk.type], count=end)[start:]
    if not chunk.null_count:
        return values, None
    valid = np.unpackbits(np.frombuffer(validity, np.uint8), count=end, bitorder="little")[start:]
    return values, valid.view(bool)


def _strings(values: Sequence[str]) -> pa.Array:
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _array(kind: pa.DataType, values: Any, valid: Any, absent: int) -> pa.Array:  # noqa: ANN401
    validity = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(
        kind, len(values), [validity, pa.py_buffer(values)], null_count=absent
    )

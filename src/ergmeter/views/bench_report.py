"""What a bench came to: its cells by configuration, on the terminal, as Markdown and as CSV."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ergmeter.units import duration, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa
    from rich.console import RenderableType

_MOST = 200  # rows on a terminal; a file has them all
_HEADS = ("cell", "status", "tokens/s", "/device", "samples/s", "loss", "memory", "time")
_NAMES = (
    *("scenario", "framework_config", "model_name_or_path", "num_gpus", "peft_method"),
    *("torch_dtype", "per_device_train_batch_size", "gradient_accumulation_steps", "packing"),
    *("max_seq_length", "learning_rate", "effective_batch_size"),
)
_SHORT = {"num_gpus": "gpus", "per_device_train_batch_size": "batch", "max_seq_length": "length"}
_BARE = ("scenario", "framework_config", "model_name_or_path", "peft_method", "torch_dtype")
_COLORS = {"ok": "green", "pending": "dim", "running": "cyan", "skipped": "dim"}
_MEMORY = (
    ("memory_hf_peak_bytes", "hf"),
    ("memory_allocator_peak_bytes", "torch"),
    ("memory_nvidia_peak_bytes", "nvidia"),
    ("memory_nvidia_mean_bytes", "nvidia mean"),
    ("memory_process_peak_bytes", "host"),
)

_MEMORY_SAID = {
    "hf": "in tensors, as the Trainer tells it",
    "torch": "in tensors, as torch's allocator tells it",
    "nvidia": "on the fullest device above its first reading",
    "nvidia mean": "above the first reading, mean of the devices",
    "host": "resident on the host",
}


def page(found: pa.Table, *, most: int = _MOST) -> RenderableType:
    """A line for each configuration, its repeats averaged; then what failed, and why."""
    lines = _lines(found)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in _HEADS:
        is_text = head in ("cell", "status", "memory")
        table.add_column(head, min_width=12 if head == "cell" else None, no_wrap=not is_text)
    for line in lines[:most]:
        table.add_row(*[Text(cell) for cell in line])
    parts: list[RenderableType] = [_totals(found), table]
    if len(lines) > most:
        parts.append(Text(f"and {len(lines) - most} more: --format csv has all of them", "dim"))
    parts += [Text(line, "red") for line in _troubles(found)[:most]]
    parts += [Text(line, "dim") for line in notes(found)]
    return Group(*parts)


def markdown(found: pa.Table) -> str:
    """The same, to paste."""
    lines = [markdown_row(_HEADS), markdown_row("---" for _ in _HEADS)]
    lines += [markdown_row(line) for line in _lines(found)]
    lines += ["", *(f"- {line}" for line in (*_troubles(found), *notes(found)))]
    return "\n".join(lines).rstrip() + "\n"


def notes(found: pa.Table) -> list[str]:
    """How the figures are to be read."""
    kinds = set(found["tokens_counted"].to_pylist()) - {None}
    said = []
    if "computed" in kinds:
        said.append("tokens/s marked * counts padding, as the program did: real ones are not known")
    used = [f"{one}: {_MEMORY_SAID[one]}" for one in _memory_used(found)]
    if used:
        said.append(f"memory is the highest of the repeats; {', '.join(used)}")
    if "trainer" in set(found["rates_from"].to_pylist()):
        said.append(
            "rates that transformers printed are of the whole training, its first steps included"
        )
    return said


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(one.replace('|', '/') for one in cells)} |"


def _totals(found: pa.Table) -> Text:
    counts = Counter(found["status"].to_pylist())
    parts: list[Any] = [(f"{found.num_rows} cells", "bold")]
    for status, number in counts.most_common():
        parts += ["  ", (f"{number} {status}", _COLORS.get(str(status), "red"))]
    return Text.assemble(*parts)


def _lines(found: pa.Table) -> list[tuple[str, ...]]:
    rows = found.to_pylist()
    shown = [name for name in _NAMES if len({row[name] for row in rows}) > 1] or ["scenario"]
    if {"per_device_train_batch_size", "effective_batch_size"} <= set(shown):
        shown.remove("effective_batch_size")  # it follows from the other, but for accumulation
    groups: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["group"] or row["index"]].append(row)
    return [_line(group, shown) for group in groups.values()]


def _line(rows: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> tuple[str, ...]:
    ok = [row for row in rows if row["status"] == "ok"] or list(rows)
    star = "*" if any(row["tokens_counted"] == "computed" for row in ok) else ""
    counts = Counter(row["status"] for row in rows)
    status = ", ".join(f"{n} {s}" if len(rows) > 1 else s for s, n in counts.most_common())
    return (
        name(rows[0], shown),
        status,
        _mean(ok, "tokens_per_s", star),
        _mean(ok, "tokens_per_s_per_device", star),
        _mean(ok, "samples_per_s"),
        _mean(ok, "loss"),
        _peak(ok),
        _time(ok),
    )


def name(row: Mapping[str, Any], shown: Sequence[str]) -> str:
    """What a cell is called: the settings that tell it from the others."""
    parts = [
        str(row[one]) if one in _BARE else f"{_SHORT.get(one, one)} {row[one]}"
        for one in shown
        if row[one] not in (None, "")
    ]
    return ", ".join(parts) or f"cell {row['index']}"


def _values(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    return [row[column] for row in rows if row[column] is not None]


def _mean(rows: Sequence[Mapping[str, Any]], column: str, mark: str = "") -> str:
    found = _values(rows, column)
    return significant(sum(found) / len(found)) + mark if found else "-"


def _peak(rows: Sequence[Mapping[str, Any]]) -> str:
    for column, source in _MEMORY:
        found = _values(rows, column)
        if found:
            return f"{scaled(max(found), 'B')} {source}"
    return "-"


def _memory_used(found: pa.Table) -> list[str]:
    """The kinds of memory that the table shows."""
    rows = found.select([column for column, _ in _MEMORY]).to_pylist()
    first = (next((kind for c, kind in _MEMORY if row[c] is not None), None) for row in rows)
    return sorted({kind for kind in first if kind})


def _time(rows: Sequence[Mapping[str, Any]]) -> str:
    found = _values(rows, "runtime_s")
    return duration(sum(found) / len(found)) if found else "-"


def _troubles(found: pa.Table) -> list[str]:
    """What failed and what is not what it says, with the number of the cell's directory."""
    said = []
    for row in found.select(["index", "status", "reason", "claims_broken"]).to_pylist():
        if row["status"] not in ("ok", "pending", "running", "skipped"):
            said.append(
                f"cell {row['index']}: {row['status']}: {row['reason'] or 'no reason known'}"
            )
        if row["claims_broken"]:
            said.append(f"cell {row['index']} is not what it says: {row['claims_broken']}")
    return said

"""The document of `erg hlo`: FLOPs counted from HLO modules.

A total is followed by what the count omits: loops whose length depends on data, kernels that do not
state their MACs, and custom calls.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ergmeter.hlo import FileCount, ModuleCount
from ergmeter.hlo.reading import reader_name
from ergmeter.neuron.kernels import LEGEND, mark, percent
from ergmeter.units import number_of, scaled
from ergmeter.views.document import Document, HeadlinePart, Note, Paragraph, Part, Table, columns_of

_MOST_NAMES = 5
_INDENT = "  "


def document(
    counted: Sequence[FileCount], *, by: str, left_out: Mapping[str, int], verbose: bool
) -> Document:
    """Return the chosen table, the total and what it omits, files left out, and failures."""
    counts = [file.count for file in counted if file.count]
    parts: list[Part] = [*_counted(counted, counts, by)] if counts else []
    parts += [
        _dim(f"left out: {number_of(number, 'file')}, {why}") for why, number in left_out.items()
    ]
    in_table = bool(counts) and by == "module"
    parts += [Note("serious", line) for line in failures(counted, in_table=in_table)]
    if verbose:
        parts.append(_dim(f"reader: {reader_name()}"))
    title = f"Multiply-accumulates of {number_of(len(counted), 'HLO module')}"
    return Document(title, tuple(parts), _data(counted, left_out=left_out))


def _counted(
    counted: Sequence[FileCount], counts: Sequence[ModuleCount], by: str
) -> Iterator[Part]:
    yield _modules(counted) if by == "module" else _table(counts, by)
    if by == "module":
        bounds = {count.bound for count in counts}
        yield from (_dim(f"{_SIGNS[b]} {meaning}") for b, meaning in _BOUNDS if b in bounds)
        marks = {mark(count) for count in counts if count.macs}
        yield from (_dim(f"{m} {meaning}") for m, meaning in LEGEND.items() if m in marks)
    if by == "computation" and len(counts) > 1:
        yield _dim(f"computations of the same name in {len(counts)} modules are added up")
    yield from _total(counts)
    yield from map(Paragraph, _scopes(counts))
    yield from (Note("minor", line) for line in _open(counts))


def _dim(text: str) -> Paragraph:
    return Paragraph(text, style="dim")


def _data(counted: Sequence[FileCount], *, left_out: Mapping[str, int]) -> dict[str, Any]:
    """Return all counts as JSON."""
    counts = [file.count for file in counted if file.count]
    return {
        "files": [_file(file) for file in counted],
        "counted": len(counts),
        "failed": len(counted) - len(counts),
        "left_out": dict(left_out),
        "macs": sum(count.macs for count in counts),
        "macs_loop_once": sum(count.macs_loop_once for count in counts),
        "nki_macs": sum(count.nki_macs for count in counts),
        "reader": reader_name(),
    }


def _file(file_count: FileCount) -> dict[str, Any]:
    head: dict[str, Any] = {
        "path": str(file_count.path),
        "size_bytes": file_count.size_bytes,
        "error": file_count.error,
    }
    if file_count.count is None:
        return head
    count = file_count.count
    derived = (
        "bound", "flops", "nki_macs", "nki_calls", "nki_calls_known", "nki_share_frac",
        "nki_share_missing",
    )  # fmt: skip
    return head | asdict(count) | {name: getattr(count, name) for name in derived}


def _table(counts: Sequence[ModuleCount], by: str) -> Table:
    if by == "kernel":
        return _kernels(counts)
    sums = _sum(count.by_op if by == "op" else count.by_computation for count in counts)
    total = sum(sums.values())
    rows = (
        (name, f"{macs:,}", percent(macs / total) if total else "-")
        for name, macs in sums.most_common()
    )
    return Table(columns_of(by, "MACs", "share"), tuple(rows))


def _sum(tallies: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sums by name over several tallies."""
    sums: Counter[str] = Counter()
    for tally in tallies:
        sums.update(tally)
    return sums


def _modules(counted: Sequence[FileCount]) -> Table:
    """Return a row for each module below its directory; a common file name is in the caption."""
    shared, same, places = _places(counted)
    rows: list[tuple[str, ...]] = []
    above = shared
    for file, path in zip(counted, places, strict=True):
        if file.count:
            depth = len(path.parent.relative_to(shared).parts)
            headings = _headings(above.relative_to(shared), path.parent.relative_to(shared))
            rows += [(heading, "", "", "") for heading in headings]
            above = path.parent
            count = file.count
            nki = f"{percent(count.nki_macs / count.macs)}{mark(count)}" if count.macs else "-"
            sign = f"{_SIGNS[count.bound]} " if count.bound else ""
            name = _INDENT * (depth - 1) + path.name
            rows.append((name, f"{sign}{count.macs:,}", nki, f"{count.instructions:,}"))
    title = f"{shared}, each {same}" if same else str(shared)
    return Table(columns_of("module", "MACs", "NKI", "instr."), tuple(rows), title)


def _headings(above: Path, here: Path) -> Iterator[str]:
    """Yield new directories, one a line: full paths are wider than a terminal."""
    for depth, name in enumerate(here.parts):
        if above.parts[: depth + 1] != here.parts[: depth + 1]:
            yield f"{_INDENT * depth}{name}/"


def _places(counted: Sequence[FileCount]) -> tuple[Path, str | None, list[Path]]:
    """Return the common directory, the common file name if any, and each path."""
    paths = [file.path.absolute() for file in counted]
    same = paths[0].name if len(paths) > 1 and len({path.name for path in paths}) == 1 else None
    places = [path.parent if same else path for path in paths]
    return Path(os.path.commonpath([path.parent for path in places])), same, places


def _kernels(counts: Sequence[ModuleCount]) -> Table:
    calls: Counter[tuple[str, str, int | None]] = Counter()
    for count in counts:
        for kernel in count.kernels:
            name = kernel.function or kernel.target
            calls[name, kernel.state, kernel.macs_per_call] += kernel.calls
    rows = []
    for (name, state, macs), times in calls.most_common():
        each = f"{macs:,}" if macs is not None else f"- ({state})"
        rows.append((name, f"{times:,}", each, f"{macs * times:,}" if macs is not None else "-"))
    return Table(columns_of("kernel", "calls", "MACs a call", "MACs"), tuple(rows))


def _total(counts: Sequence[ModuleCount]) -> Iterator[Part]:
    macs = sum(count.macs for count in counts)
    once = sum(count.macs_loop_once for count in counts)
    of = "" if len(counts) == 1 else f" in {len(counts)} modules, each executed once"
    bound = bound_of(counts)
    words = f"{bound} " if bound else ""
    yield HeadlinePart(text=f"{words}{macs:,} MACs ({scaled(2 * macs, 'FLOP')}){of}")
    if once != macs:
        yield _dim(f"{once:,} if every loop is counted once, as XLA's cost analysis does")
    stated = sum(count.nki_calls_known for count in counts)
    calls = sum(count.nki_calls for count in counts)
    if calls:
        nki = sum(count.nki_macs for count in counts)
        state = "call states its" if calls == 1 else "calls state their"
        yield Paragraph(f"{nki:,} of them in NKI kernels ({stated} of {calls} {state} MACs)")


def bound_of(counts: Sequence[ModuleCount]) -> str:
    """Return the bound of a sum of counts, as `ModuleCount.bound`."""
    bounds = {count.bound for count in counts} - {""}
    return bounds.pop() if len(bounds) == 1 else "about" if bounds else ""


def _scopes(counts: Sequence[ModuleCount]) -> Iterator[str]:
    """Yield whether counts are of one device or of all."""
    modules = Counter((count.scope, count.devices) for count in counts)
    for (scope, devices), number in modules.items():
        which = "" if len(modules) == 1 else f"{number} of {len(counts)} modules: "
        yield which + scope_in_words(scope, devices)


def scope_in_words(scope: str, devices: int | None) -> str:
    """Return whose work a count is: one device's or all devices'."""
    if scope == "one device":
        shared = f", one of {devices} that the module is partitioned over" if devices else ""
        return f"the work of one device{shared}"
    every = f"all {devices} devices" if devices else "all devices"
    if scope == "all devices":
        return f"the work of {every} together: the module is annotated and not yet partitioned"
    return (
        f"products inside shard_map are the work of one device, those outside of {every}: the"
        " module is not yet partitioned"
    )


def _open(counts: Sequence[ModuleCount]) -> Iterator[str]:
    """Yield what the total omits or only bounds."""
    calls = _sum({kernel.state: kernel.calls} for count in counts for kernel in count.kernels)
    yield from (_unknown(calls[state], *words) for state, words in _UNKNOWN.items() if calls[state])
    unknown = _sum(count.unknown_calls for count in counts).most_common()
    if unknown:
        names = [f"{target} ({times:,} call{'s'[: times != 1]})" for target, times in unknown]
        yield f"not counted: custom calls that may contain products: {_some(names)}"
    yield from _uncounted(counts)
    if any(op.startswith("complex-") for count in counts for op in count.by_op):
        yield "complex products are counted as 4 real MACs each (XLA's cost analysis: as 1)"
    loops = [name for count in counts for name in count.unknown_loops]
    if loops:
        yield (
            "counted once, though they may run more often (loops as long as data says, functions"
            f" applied to elements): {_some(loops)}"
        )
    branches = [name for count in counts for name in count.uneven_branches]
    if branches:
        yield f"at most: the costliest branch was counted of: {_some(branches)}"


def _uncounted(counts: Sequence[ModuleCount]) -> Iterator[str]:
    """Yield operations other than products, with their calls and FLOPs."""
    calls = _sum(count.uncounted_calls for count in counts)
    flops = _sum(count.uncounted_flops for count in counts)
    names = [
        f"{op} ({times:,} call{'s'[: times != 1]}, {scaled(flops[op], 'FLOP')} by"
        f" {_FORMULAS.get(op, 'its formula')})"
        for op, times in calls.most_common()
    ]
    if names:
        yield f"not counted, as they are not matrix products: {', '.join(names)}"


_FORMULAS = {
    "cholesky": "n^3/3",
    "triangular-solve": "n^2 a right-hand side",
    "fft": "5 N log2 N, half of it for real points",
}
# Signs before a count, and their meaning.
_SIGNS = {"at least": "≥", "at most": "≤", "about": "≈"}
_BOUNDS = (
    ("at least", "at least: something of it is not counted, or counted once: see below"),
    ("at most", "at most: the costliest branch of a conditional was taken: see below"),
    ("about", "neither: some of it is not counted, and a costliest branch was taken: see below"),
)


# Singular and plural.
_UNKNOWN = {
    "absent": ("that does not state its MACs", "that do not state their MACs"),
    "unreadable": ("whose configuration can't be read", "whose configurations can't be read"),
}


def _unknown(calls: int, text: str, many: str) -> str:
    if calls == 1:
        return f"not counted: 1 call of an NKI kernel {text}"
    return f"not counted: {calls} calls of NKI kernels {many}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def failures(counted: Sequence[FileCount], *, in_table: bool) -> Iterator[str]:
    """Yield each kind of error once, with the number of files and an example."""
    kinds: dict[str, list[str]] = {}
    for file, name in zip(counted, _names(counted, in_table=in_table), strict=True):
        if file.error:
            kinds.setdefault(re.sub(r"\d+", "N", file.error), []).append(f"{name}: {file.error}")
    for first, *others in kinds.values():
        yield f"{first} (and {len(others)} more like it)" if others else first


def _names(counted: Sequence[FileCount], *, in_table: bool) -> list[str]:
    """Return file names relative to the table's title, else to the working directory."""
    if not counted:
        return []
    if in_table:
        shared, _, places = _places(counted)
        return [str(path.relative_to(shared)) for path in places]
    here = Path.cwd()
    paths = [file.path.absolute() for file in counted]
    return [str(p.relative_to(here)) if p.is_relative_to(here) else str(p) for p in paths]

"""The share of NKI kernels in compiled graphs, with what is not known about it.

The trap: a kernel whose work is unknown counted as no work. A kernel states its multiply-adds in
its configuration; newer ones leave them out, some configurations can't be read, and a norm truly
has none. The original folds all three into 0, and a graph full of kernels reads as one without.
Here they are three states, and a ratio with unknown kernels in it is called a lower bound.
Statistics are over every graph that multiplies: without the zeros a minimum is never 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.shares import LOWER_BOUND, UNCERTAIN, mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.hlo import FileCount, Kernel, ModuleCount
    from ergmeter.neuron.job.compile_cache import GraphFile


@dataclass(frozen=True, slots=True)
class GraphResult:
    """One graph: what it multiplies, and how much of that in NKI kernels."""

    path: str
    name: str
    module: str | None
    compiler: str | None
    macs: int
    nki_macs: int
    error: str | None = None
    runs: int = 1
    kernels: tuple[Kernel, ...] = ()
    doubts: dict[str, int] = field(default_factory=dict)  # what the count could not know
    mark: str = ""  # behind its NKI ratio, where that is not known whole

    @property
    def is_lower_bound(self) -> bool:
        """Whether its ratio may be larger, for kernels whose work is not known, but not smaller."""
        return self.mark == LOWER_BOUND

    @property
    def is_uncertain(self) -> bool:
        """Whether other work is not known, so that its ratio may be larger or smaller."""
        return self.mark == UNCERTAIN

    @property
    def nki_ratio(self) -> float | None:
        """NKI multiply-adds over all; None for a graph that multiplies nothing."""
        return self.nki_macs / self.macs if self.macs else None


def graph_result(counted: FileCount, file: GraphFile, *, runs: int = 1) -> GraphResult:
    """A file's count, with what its path says of it."""
    name = file.path.rpartition("/")[2]
    if counted.count is None:
        why = counted.error or "not counted"
        return GraphResult(file.path, name, file.module, file.compiler, 0, 0, why, runs)
    count = counted.count
    return GraphResult(
        path=file.path,
        name=name,
        module=file.module,
        compiler=file.compiler,
        macs=count.macs,
        nki_macs=count.nki_macs,
        runs=runs,
        kernels=count.kernels,
        doubts=_doubts(count),
        mark=mark(count),
    )


def _doubts(count: ModuleCount) -> dict[str, int]:
    found = {
        "loops whose number of rounds is not known, counted once": len(count.unknown_loops),
        "branches of unequal work, the larger counted (at most)": len(count.uneven_branches),
    }
    for op, calls in count.uncounted_calls.items():
        found[f"calls of {op}, which is no matrix product and not counted"] = calls
    for target, calls in count.unknown_calls.items():
        found[f"calls of {target}, whose work is not known"] = calls
    return {text: number for text, number in found.items() if number}


@dataclass(frozen=True)
class NkiSummary:
    """All graphs together."""

    total: int
    successful: int
    counted: int  # of those: all, or those that ran
    macs: int | None
    nki_macs: int | None
    overall_ratio: float | None
    average_ratio: float | None
    least_ratio: float | None
    most_ratio: float | None
    graphs_with_nki: int
    graphs_without_nki: int
    graphs_without_macs: int
    calls: dict[str, int]  # kernel calls by state: known, absent, unreadable
    kernels: list[dict[str, Any]]
    unreadable: list[dict[str, Any]]
    doubts: dict[str, int]
    weighting: str
    is_uncertain: bool  # as one of its graphs is

    @property
    def is_lower_bound(self) -> bool:
        """Whether there are kernels whose work is not known, and nothing else is unknown."""
        has_unknown = bool(self.calls.get("absent") or self.calls.get("unreadable"))
        return has_unknown and not self.is_uncertain


def summarize(results: Sequence[GraphResult], *, weighted: bool) -> NkiSummary:
    """The graphs of a cache together; `weighted`: each as often as it ran, and those alone."""
    readable = [result for result in results if result.error is None]
    good = [result for result in readable if result.runs]
    macs = sum(result.macs * result.runs for result in good)
    nki = sum(result.nki_macs * result.runs for result in good)
    weights = [(r, one.runs) for one in good if (r := one.nki_ratio) is not None]
    ratios, runs = [ratio for ratio, _ in weights], sum(times for _, times in weights)
    with_nki = sum(1 for ratio in ratios if ratio > 0)
    calls: Counter[str] = Counter()
    doubts: Counter[str] = Counter()
    for result in good:
        doubts.update(result.doubts)
        for kernel in result.kernels:
            calls[kernel.state] += kernel.calls
    return NkiSummary(
        total=len(results),
        successful=len(readable),
        counted=len(good),
        macs=macs if good else None,
        nki_macs=nki if good else None,
        overall_ratio=nki / macs if macs else None,
        average_ratio=sum(r * times for r, times in weights) / runs if runs else None,
        least_ratio=min(ratios, default=None),
        most_ratio=max(ratios, default=None),
        graphs_with_nki=with_nki,
        graphs_without_nki=len(ratios) - with_nki,
        graphs_without_macs=len(good) - len(ratios),
        calls={state: calls[state] for state in ("known", "absent", "unreadable")},
        kernels=_kernels(good),
        unreadable=_unreadable(good),
        doubts=dict(doubts),
        weighting="each graph as often as it ran" if weighted else "each graph once",
        is_uncertain=any(result.is_uncertain for result in good),
    )


def _kernels(results: Sequence[GraphResult]) -> list[dict[str, Any]]:
    """Kernels by name and state, those with the most work first."""
    found: dict[tuple[str | None, str, str], dict[str, Any]] = {}
    for result in results:
        for kernel in result.kernels:
            key = (kernel.function, kernel.target, kernel.state)
            names = {"function": key[0], "target": key[1], "macs_state": key[2]}
            row = found.setdefault(key, {**names, "calls": 0, "macs": None})
            row["calls"] += kernel.calls
            if kernel.macs_per_call is not None:
                row["macs"] = (row["macs"] or 0) + kernel.calls * kernel.macs_per_call
    return sorted(found.values(), key=lambda row: (-(row["macs"] or 0), -row["calls"]))


def _unreadable(results: Sequence[GraphResult]) -> list[dict[str, Any]]:
    """Where a kernel's configuration can't be read, once for each file."""
    rows = []
    for result in results:
        calls = sum(kernel.calls for kernel in result.kernels if kernel.state == "unreadable")
        if calls:
            rows.append({"file_path": result.path, "module_name": result.module, "calls": calls})
    return rows

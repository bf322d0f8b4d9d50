"""The share of NKI kernels in the work of compiled graphs, and how certain it is.

A kernel states its multiply-adds (MACs) in its configuration. Newer kernels omit them, some
configurations can't be read, and a norm has 0. The original script counts all three as 0. Here they
are three states, and a ratio with unknown kernels is a lower bound. Statistics are over every graph
with matrix products, including those with a ratio of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ergmeter.hlo import FileCount, Kernel, ModuleCount
from ergmeter.neuron.compile_cache import GraphFile
from ergmeter.units import number_of, significant

# A share that is neither 0 nor 1 is never printed as 0 or 100 %: it gets more digits instead.


LOWER_BOUND, UNCERTAIN = "*", "~"
LEGEND = {
    LOWER_BOUND: "a lower bound: kernels that do not state their MACs, or not readably",
    UNCERTAIN: "not certain: loops or calls whose work is not known",
}

_MOST_DIGITS = 17  # a float has no more


def mark(count: ModuleCount) -> str:
    """Return the mark of a graph's NKI share: a lower bound, uncertain, or "" if it is exact.

    Unknown MACs of kernels can only raise the share; other unknown work can lower it.
    """
    if count.unknown_loops or count.unknown_calls:
        return UNCERTAIN
    return LOWER_BOUND if count.nki_calls_known < count.nki_calls else ""


def percent(frac: float) -> str:
    """Return a share in percent, with four significant digits or more.

    >>> percent(0.25), percent(0.99997), percent(1.0)
    ('25 %', '99.997 %', '100 %')
    """
    value, digits = 100 * frac, 4
    while value != 100 and digits < _MOST_DIGITS and significant(value, digits) == "100":
        digits += 1
    return f"{significant(value, digits)} %"


def decimals(value: float, digits: int, *, full: float = 1.0) -> str:
    """Return a share of `full` with `digits` decimals or more.

    >>> decimals(0.5, 4), decimals(0.99998, 4), decimals(0.00003, 4), decimals(1.0, 4)
    ('0.5000', '0.99998', '0.00003', '1.0000')
    """
    ends = [end for end in (0.0, full) if value != end]
    while digits < _MOST_DIGITS and any(float(f"{value:.{digits}f}") == end for end in ends):
        digits += 1
    return f"{value:.{digits}f}"


@dataclass(frozen=True, slots=True)
class GraphResult:
    """One compiled graph: its MACs, and how many of them are in NKI kernels."""

    path: str
    name: str
    module: str | None
    compiler: str | None
    macs: int
    nki_macs: int
    error: str | None = None
    runs: int = 1
    kernels: tuple[Kernel, ...] = ()
    doubts: dict[str, int] = field(default_factory=dict)  # what was not counted exactly: number
    mark: str = ""  # printed after an NKI ratio that is not exact

    @property
    def nki_ratio(self) -> float | None:
        """NKI MACs over all MACs; None for a graph without matrix products."""
        return self.nki_macs / self.macs if self.macs else None

    @property
    def work(self) -> int:
        """MACs of all runs of the graph."""
        return self.macs * self.runs


def graph_result(counted: FileCount, file: GraphFile, *, runs: int = 1) -> GraphResult:
    """Return a file's count with the module and the compiler that its path names."""
    names = (file.path, file.path.rpartition("/")[2], file.module, file.compiler)
    count = counted.count
    if count is None:
        return GraphResult(*names, 0, 0, counted.error or "not counted", runs)
    return GraphResult(
        *names, count.macs, count.nki_macs, None, runs, count.kernels, _doubts(count), mark(count)
    )


def _doubts(count: ModuleCount) -> dict[str, int]:
    doubts = {
        "loops whose number of rounds is not known, counted once": len(count.unknown_loops),
        "branches of unequal work, the larger counted (at most)": len(count.uneven_branches),
    }
    for op, calls in count.uncounted_calls.items():
        doubts[f"calls of {op}, which is no matrix product and not counted"] = calls
    for target, calls in count.unknown_calls.items():
        doubts[f"calls of {target}, whose work is not known"] = calls
    return {text: number for text, number in doubts.items() if number}


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All calls of one kernel in all graphs."""

    function: str | None
    target: str
    macs_state: str
    calls: int
    macs: int | None


@dataclass(frozen=True, slots=True)
class UnreadableConfig:
    """A graph with kernel calls whose configuration can't be read."""

    file_path: str
    module_name: str | None
    calls: int


@dataclass(frozen=True, slots=True)
class NkiSummary:
    """Totals and NKI ratios over all graphs."""

    total: int
    successful: int
    macs: int | None
    nki_macs: int | None
    overall_ratio: float | None
    average_ratio: float | None
    least_ratio: float | None
    most_ratio: float | None
    counted: int = 0  # successful graphs: all or, with --graph-runs, those that ran
    graphs_with_nki: int = 0
    graphs_without_nki: int = 0
    graphs_without_macs: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # by state: known, absent, unreadable
    kernels: tuple[KernelTotal, ...] = ()
    unreadable: tuple[UnreadableConfig, ...] = ()
    doubts: dict[str, int] = field(default_factory=dict)
    weighting: str = ""
    mark: str = ""  # printed after ratios that are not exact

    @property
    def ratios_are_over(self) -> str:
        """The graphs that average, min and max ratio are over, as text."""
        without = self.graphs_without_nki
        graphs = number_of(self.graphs_with_nki + without, "graph")
        multiply = "multiplies" if graphs.startswith("1 ") else "multiply"
        has = "has" if without == 1 else "have"
        return f"{graphs} that {multiply}, of which {without} {has} no NKI MACs"


def summarize(results: Sequence[GraphResult], *, weighted: bool) -> NkiSummary:
    """Return totals over graphs; `weighted`: times the runs of each, so only graphs that ran."""
    readable = [result for result in results if result.error is None]
    good = [result for result in readable if result.runs]
    macs = sum(result.work for result in good)
    nki = sum(result.nki_macs * result.runs for result in good)
    weights = [(r, result.runs) for result in good if (r := result.nki_ratio) is not None]
    ratios, runs = [ratio for ratio, _ in weights], sum(times for _, times in weights)
    with_nki = sum(1 for ratio in ratios if ratio > 0)
    calls: Counter[str] = Counter()
    doubts: Counter[str] = Counter()
    for result in good:
        doubts.update(result.doubts)
        for kernel in result.kernels:
            calls[kernel.state] += kernel.calls
    is_bound = bool(calls["absent"] or calls["unreadable"])
    is_uncertain = any(result.mark == UNCERTAIN for result in good)
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
        unreadable=tuple(_unreadable(good)),
        doubts=dict(doubts),
        weighting="each graph as often as it ran" if weighted else "each graph once",
        mark=UNCERTAIN if is_uncertain else LOWER_BOUND if is_bound else "",
    )


def _kernels(results: Sequence[GraphResult]) -> tuple[KernelTotal, ...]:
    """Return the totals of each kernel, those with the most MACs first."""
    calls: Counter[tuple[str | None, str, str]] = Counter()
    macs: dict[tuple[str | None, str, str], int] = {}
    for result in results:
        for kernel in result.kernels:
            key = (kernel.function, kernel.target, kernel.state)
            calls[key] += kernel.calls
            if kernel.macs_per_call is not None:
                macs[key] = macs.get(key, 0) + kernel.calls * kernel.macs_per_call
    totals = (KernelTotal(*key, count, macs.get(key)) for key, count in calls.items())
    return tuple(sorted(totals, key=lambda total: (-(total.macs or 0), -total.calls)))


def _unreadable(results: Sequence[GraphResult]) -> Iterator[UnreadableConfig]:
    """Yield the graphs with kernel configurations that can't be read."""
    for result in results:
        calls = sum(kernel.calls for kernel in result.kernels if kernel.state == "unreadable")
        if calls:
            yield UnreadableConfig(result.path, result.module, calls)


def by_work(results: Sequence[GraphResult]) -> list[tuple[GraphResult, float | None]]:
    """Return the readable graphs with their shares of all MACs, the largest first.

    The share is None if no graph has matrix products.
    """
    good = [result for result in results if result.error is None]
    good.sort(key=lambda result: (-result.work, result.path))
    total = sum(result.work for result in good)
    return [(result, result.work / total if total else None) for result in good]

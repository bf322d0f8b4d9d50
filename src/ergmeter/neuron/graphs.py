"""The compiled graphs of a job in its document: one by one, and all together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.score import score_statistics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    File = Mapping[str, Any]
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.parts import Parts
    from ergmeter.neuron.score import Score

# -- ranked ----------------------------------------------------------------------------------------
# Which graphs matter, where a cache holds hundreds?
#
# The trap: a table cut off after so many rows, in the order of the directory. Graphs stand by what
# they multiply, times their runs where those are known; what is below the cut is counted and
# summed, so that the rows and the rest make the whole. A graph that can't be read has no place in
# that order: those are apart, each with its reason.


@dataclass(frozen=True, slots=True)
class RankedGraph:
    """One graph, and its share of all multiply-adds; None where there are none."""

    file: File
    macs_frac: float | None


@dataclass(frozen=True)
class Ranked:
    """The graphs with the most work, what the others come to, and those that can't be read."""

    graphs: tuple[RankedGraph, ...]
    rest: int
    rest_macs_frac: float | None
    failed: tuple[File, ...]


def ranked(files: Sequence[File], *, most: int) -> Ranked:
    """So many graphs at most, those with the most work first."""
    good = [file for file in files if file["status"] == "success"]
    good.sort(key=lambda file: (-_work(file), str(file["file_path"])))
    whole = sum(map(_work, good))
    rest = good[most:]
    return Ranked(
        tuple(RankedGraph(file, _work(file) / whole if whole else None) for file in good[:most]),
        len(rest),
        sum(map(_work, rest)) / whole if whole else None,
        tuple(file for file in files if file["status"] != "success"),
    )


def _work(file: File) -> int:
    """Multiply-adds, as often as the graph ran; once where that is not known."""
    runs = file.get("runs")
    return int(file["hlo_macs"]) * (1 if runs is None else int(runs))


# -- graphs ----------------------------------------------------------------------------------------


def graph_documents(parts: Parts) -> list[dict[str, Any]]:
    """The graphs one by one."""
    return [_file(result, parts) for result in parts.results]


def nki_document(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    """`nki_analysis`; the reasons of what is null go to `missing`."""
    summary = parts.summary
    if summary is None:
        return {"summary": {}}
    ratios = {
        "total_hlo_macs": summary.macs,
        "total_nki_macs": summary.nki_macs,
        "overall_nki_ratio": summary.overall_ratio,
        "average_nki_ratio": summary.average_ratio,
        "min_nki_ratio": summary.least_ratio,
        "max_nki_ratio": summary.most_ratio,
    }
    files = graph_documents(parts)
    figures: dict[str, Any] = {
        "total_files": summary.total,
        "successful_analyses": summary.successful,
        "failed_analyses": summary.total - summary.successful,
        **ratios,
        **score_statistics(file.get("training_score") for file in files),
        "ratios_are_over": _ratios_are_over(summary),
        "files_with_nki_macs": summary.graphs_with_nki,
        "files_without_nki_macs": summary.graphs_without_nki,
        "files_without_macs": summary.graphs_without_macs,
        "is_lower_bound": summary.is_lower_bound,
        "is_uncertain": summary.is_uncertain,
        "weighting": summary.weighting,
        "kernel_calls": summary.calls,
    }
    why = next((one.text for one in parts.findings if one.about == "no_hlo"), None)
    why = why or "no graph that could be read has a matrix product"
    if parts.request.graph_runs is not None and not any(one.runs for one in parts.results):
        why = f"none of the graphs ran, by {parts.request.graph_runs}"
    missing.update({key: why for key, value in ratios.items() if value is None})
    if parts.request.per_file_scores and parts.score_missing is not None:
        missing["average_score"] = parts.score_missing
    whole: dict[str, Any] = {"summary": figures}
    if parts.request.detailed:
        whole["per_file_metrics"] = files
    return whole | {
        "kernels": summary.kernels,
        "unreadable_kernel_configs": summary.unreadable,
        "not_known": summary.doubts,
        "left_out": parts.found.left_out if parts.found else {},
        "failed": [
            {"module_name": one.module, "file_path": one.path, "error": one.error}
            for one in parts.results
            if one.error is not None
        ],
    }


def _ratios_are_over(summary: NkiSummary) -> str:
    without = summary.graphs_without_nki
    count = summary.graphs_with_nki + without
    graphs = "1 graph that multiplies" if count == 1 else f"{count} graphs that multiply"
    return f"{graphs}, of which {without} {'has' if without == 1 else 'have'} no NKI MACs"


def _file(result: GraphResult, parts: Parts) -> dict[str, Any]:
    """One graph, under the original's names."""
    whole: dict[str, Any] = {
        "status": "success" if result.error is None else "error",
        "file_path": result.path,
        "file_name": result.name,
        "module_name": result.module,
        "neuronxcc_version": result.compiler,
    }
    if result.error is not None:
        # The zeros are the original's, for its readers; they are in no sum here.
        return whole | {"error": result.error, "hlo_macs": 0, "nki_macs": 0, "nki_ratio": 0.0}
    whole |= {
        "hlo_macs": result.macs,
        "nki_macs": result.nki_macs,
        "nki_ratio": result.nki_ratio,
        "is_lower_bound": result.is_lower_bound,
        "is_uncertain": result.is_uncertain,
        "runs": result.runs if parts.request.graph_runs is not None else None,
        "kernels": [
            {
                "function": kernel.function,
                "target": kernel.target,
                "macs_state": kernel.state,
                "calls": kernel.calls,
                "macs_per_call": kernel.macs_per_call,
            }
            for kernel in result.kernels
        ],
        "not_known": result.doubts,
    }
    if parts.request.per_file_scores and parts.score and parts.score_missing is None:
        own = replace(parts.score, nki_ratio=result.nki_ratio)
        whole["training_score"] = file_score(own) | {
            "is_lower_bound": result.is_lower_bound,
            "is_uncertain": result.is_uncertain,
        }
    return whole


def file_score(found: Score) -> dict[str, Any]:
    """A graph's own score: the job's factors with the graph's NKI ratio."""
    return {
        "score": found.value,
        "mfu_improvement": found.mfu_improvement,
        "throughput_improvement": found.throughput_improvement,
        "loss_improvement": found.loss_improvement,
        "convergence_rate": found.convergence_rate,
        "nki_flop_ratio": found.nki_ratio,
    }

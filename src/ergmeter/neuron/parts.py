"""What the document of a job is made from, and what an analysis comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ergmeter.importers.log import ParsedLog
    from ergmeter.neuron.advice import AdviceFinding
    from ergmeter.neuron.figures import Figures
    from ergmeter.neuron.job.compile_cache import CachedGraphs
    from ergmeter.neuron.job.job import NeuronJob
    from ergmeter.neuron.job.machine import Machine
    from ergmeter.neuron.job.pace import Throughput
    from ergmeter.neuron.job.request import AnalysisRequest
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.score import Score


@dataclass(frozen=True)
class Parts:
    """What a document is made from; the graphs come last."""

    request: AnalysisRequest
    job: NeuronJob
    machine: Machine
    pace: Throughput
    figures: Figures
    log: ParsedLog | None
    found: CachedGraphs | None = None
    results: tuple[GraphResult, ...] = ()
    summary: NkiSummary | None = None
    findings: tuple[AdviceFinding, ...] = ()
    score: Score | None = None
    score_missing: str | None = None  # why no score is known, of the job or of any graph


class Analysis(NamedTuple):
    """The document of a job, its graphs one by one, and what they were made from."""

    document: dict[str, Any]
    files: list[dict[str, Any]]
    parts: Parts | None = None  # None: the original's numbers, which keep no steps

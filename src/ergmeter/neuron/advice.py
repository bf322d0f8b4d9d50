"""Findings that explain a surprising metric: no graphs, no NKI share, a low or impossible MFU.

Each finding is specific to the job's inputs: which directory was searched, why a ratio is zero,
what MFU would be if a value is in another unit. There is no general advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ergmeter.hlo.files import SHOWN_NAMES, STUBS, WRAPPED
from ergmeter.metrics.definitions.compute import HFU
from ergmeter.neuron.compile_cache import CachedGraphs, abbreviated_list, name_in
from ergmeter.neuron.kernels import LOWER_BOUND, GraphResult, NkiSummary, percent
from ergmeter.neuron.mfu import ORIGINAL, Figures, Machine
from ergmeter.neuron.training_job import NeuronJob
from ergmeter.neuron.training_log import Throughput
from ergmeter.records import Reading
from ergmeter.units import number_of, significant

# nki-llama's guide calls 30 to 70 % typical for language models.
_LOW_FRAC = 0.3


@dataclass(frozen=True, slots=True)
class AdviceFinding:
    """A text that explains a metric, and its subject."""

    about: str  # no_hlo, nki_ratio, graph_runs, log_disagrees, low_mfu, mfu_above_peak
    text: str


def about_graphs(
    graphs: CachedGraphs | None, directory: str, *, named_in_yaml: str | None = None
) -> Iterator[str]:
    """Explain why no graph was counted. `graphs` None: the default directory does not exist."""
    if graphs is None:
        text = f"no HLO: {directory} (the default --compile-dir) does not exist; pass the"
        text += " compile cache of this job"
        if named_in_yaml and named_in_yaml != directory:
            text += f" (the YAML's compiler_cache_url is {named_in_yaml})"
        yield text
    elif graphs.left_out and not graphs.chosen:  # an empty choice is refused before
        yield f"no HLO in {directory} but {graphs.left_out[STUBS]} {WRAPPED}"
    elif not graphs.chosen:
        files = sorted(str(path) for path in Path(directory).rglob("*") if path.is_file())
        near = [path for path in files if path.endswith((".pb", ".neff", ".hlo.txt"))]
        there = "a cache holds neuronxcc-<version>/MODULE_<hash>/model.hlo_module.pb"
        if near:
            there = f"what is there looks like {', '.join(near[:3])}"
        looked = f"looked in {directory} and all below it at {number_of(len(files), 'file')}"
        looked += f" for {SHOWN_NAMES}"
        yield f"no HLO found: {looked}; {there}"


def about_kernels(summary: NkiSummary) -> Iterator[str]:
    """Explain an NKI ratio that is zero or a lower bound."""
    if not summary.counted:
        return
    calls = summary.calls
    stated, absent, unreadable = calls["known"], calls["absent"], calls["unreadable"]
    if not stated + absent + unreadable:
        graphs = number_of(summary.counted, "graph")
        yield (
            f"NKI ratio 0: no NKI kernel is called in {graphs}; compiled"
            " with the kernels switched on, and graphs of this job?"
        )
    if not summary.nki_macs and stated and not absent + unreadable:
        yield (
            f"NKI ratio 0: {number_of(stated, 'kernel call')} with 0 multiply-adds stated, as norms"
            " and other kernels without matrix products have"
        )
    bound = f"the NKI ratio is {'a lower bound' if summary.mark == LOWER_BOUND else 'incomplete'}"
    bound = bound if summary.nki_macs else "NKI ratio 0"
    if absent:
        stating = "with no multiply-adds stated (no mac_count)"
        yield f"{bound}: {number_of(absent, 'kernel call')} {stating}"
    if unreadable:
        yield (
            f"{bound}: {number_of(unreadable, 'kernel call')} with a configuration that can't be"
            f" read, in {len(summary.unreadable)} of the graphs"
        )


def about_runs(results: Sequence[GraphResult], runs: dict[str, int], path: str) -> Iterator[str]:
    """List modules that are only among the graphs, or only in the file of --graph-runs."""
    good = [result for result in results if result.error is None]
    silent = [result for result in good if name_in(runs, result.module) is None]
    if silent:
        macs, left = (sum(result.macs for result in them) for them in (good, silent))
        share = f", with {percent(left / macs)} of the MACs if each graph ran once" if macs else ""
        of_graphs = f"{len(silent)} of {number_of(len(good), 'graph')}"
        yield f"{of_graphs} {_are(len(silent))} not in {path}: not counted{share}"
    strange = runs.keys() - {name_in(runs, result.module) for result in results}
    if strange:
        yield (
            f"{number_of(len(strange), 'module')} of {path} {_are(len(strange))} not among the"
            f" graphs: {abbreviated_list(strange)}"
        )


def about_mfu(
    figures: Figures,
    job: NeuronJob,
    machine: Machine,
    throughput: Throughput,
    *,
    is_printed: bool = True,
) -> list[AdviceFinding]:
    """Explain a low MFU, or one above the peak, from the inputs.

    `is_printed`: the throughput was printed or given, so it could be in another unit (tokens/s).
    """
    if not isinstance(figures.mfu, Reading) or throughput.seq_per_s is None:
        return []
    mfu = figures.mfu.value
    if figures.mfu.impossible:
        rate = throughput.seq_per_s if is_printed else None
        return [AdviceFinding("mfu_above_peak", text) for text in _above(mfu, job, machine, rate)]
    if mfu >= _LOW_FRAC:
        return []
    return [AdviceFinding("low_mfu", text) for text in _low(mfu, figures, job, machine)]


def _above(mfu: float, job: NeuronJob, machine: Machine, printed: float | None) -> Iterator[str]:
    yield f"MFU {percent(mfu)} is above the peak, so an input is wrong"
    as_tokens = mfu / job.seq_len
    if printed is not None and as_tokens < 1:
        yield (
            f"if {significant(printed)} are tokens/s, not sequences/s, it is"
            f" {percent(as_tokens)} (sequences of {job.seq_len})"
        )
    yield (
        f"the peak is that of {number_of(machine.cores or 0, 'core')} on"
        f" {number_of(machine.nodes, 'node')} of {machine.backend}: were there more"
        " (--num-nodes, --devices)?"
    )


def _low(mfu: float, figures: Figures, job: NeuronJob, machine: Machine) -> Iterator[str]:
    yield (
        f"peak: {number_of(machine.cores or 0, 'core')} of {machine.backend}"
        f" ({machine.nodes} x {machine.cores_per_node}), {machine.dtype}; a job on fewer cores"
        " reads too low by that factor (--devices, --num-nodes)"
    )
    most = max(figures.mfu_by_convention.items(), key=lambda item: item[1])
    if job.lora is None and most[1] > mfu:
        yield (
            f"convention: this is under {figures.work.chosen.convention}; {most[0]} counts the most"
            f" FLOPs and gives {percent(most[1])}"
        )
    if job.lora is not None and ORIGINAL in figures.mfu_by_convention:
        yield (
            "LoRA: gradients of frozen weights are not computed and not counted; counted as full"
            f" training it reads {percent(figures.mfu_by_convention[ORIGINAL])} ({ORIGINAL})"
        )
    hfu = figures.utilization[HFU]
    if isinstance(hfu, Reading) and hfu.value > mfu:
        yield (
            f"recomputation ({job.checkpointing}): the hardware computed"
            f" {percent(hfu.value)} of its peak (HFU)"
        )
    if job.replicas is not None and 1 < job.replicas <= 1 / mfu:
        yield (
            f"throughput: if it is that of one of the {job.replicas} replicas, MFU is"
            f" {percent(mfu * job.replicas)}"
        )
    if job.pipeline_stages > 1 and job.micro_batches is not None:
        # A pipeline's idle share is (p - 1) / (m + p - 1) with m micro-batches and p stages.
        idle = (job.pipeline_stages - 1) / (job.micro_batches + job.pipeline_stages - 1)
        batches = f"{job.micro_batches} micro-batch{'' if job.micro_batches == 1 else 'es'}"
        yield (
            f"pipeline: {job.pipeline_stages} stages with {batches}"
            f" are idle {percent(idle)} of the time; a larger global batch shrinks that"
        )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"

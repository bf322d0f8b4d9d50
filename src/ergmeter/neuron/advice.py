"""Findings that explain a surprising metric: no graphs, no NKI share, a low or impossible MFU.

Each finding is made from the inputs of this job: which directory was searched, why a ratio is zero,
what MFU would be if a value was meant in another unit. General advice is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.hlo.files import SHOWN_NAMES, WRAPPED
from ergmeter.neuron.compile_cache import abbreviated_list, name_in
from ergmeter.neuron.kernels import percent
from ergmeter.neuron.mfu import ORIGINAL
from ergmeter.records import Reading
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.neuron.compile_cache import CachedGraphs
    from ergmeter.neuron.instance import Machine
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.mfu import Figures
    from ergmeter.neuron.throughput import Throughput
    from ergmeter.neuron.training_job import NeuronJob

# The guide calls 30 to 70 % typical for language models.
_LOW_FRAC = 0.3


@dataclass(frozen=True, slots=True)
class AdviceFinding:
    """A finding and its subject."""

    about: str  # no_hlo, nki_ratio, graph_runs, log_disagrees, low_mfu, mfu_above_peak
    text: str


def about_graphs(
    graphs: CachedGraphs | None, directory: str, *, named_in_yaml: str | None = None
) -> list[AdviceFinding]:
    """Explains why no graph was counted. `graphs` None: the default directory does not exist."""
    if graphs is None:
        text = f"no HLO: {directory} (the default --compile-dir) does not exist; pass the"
        text += " compile cache of this job"
        if named_in_yaml and named_in_yaml != directory:
            text += f" (the YAML's compiler_cache_url is {named_in_yaml})"
        return [AdviceFinding("no_hlo", text)]
    if graphs.chosen:
        return []
    if graphs.hlo_files:  # stubs: a choice that leaves nothing is refused before
        return [AdviceFinding("no_hlo", f"no HLO in {directory} but {graphs.hlo_files} {WRAPPED}")]
    text = (
        f"no HLO found: looked in {directory} and all below it at"
        f" {_number(graphs.other_files, 'file')} for"
        f" {SHOWN_NAMES}"
    )
    if graphs.near:
        text += f"; what is there looks like {', '.join(graphs.near)}"
    else:
        text += "; a cache holds neuronxcc-<version>/MODULE_<hash>/model.hlo_module.pb"
    return [AdviceFinding("no_hlo", text)]


def about_kernels(summary: NkiSummary) -> list[AdviceFinding]:
    """Explains an NKI ratio that is zero or a lower bound."""
    if not summary.counted:
        return []
    calls = summary.calls
    stated, absent, unreadable = calls["known"], calls["absent"], calls["unreadable"]
    if not stated + absent + unreadable:
        text = (
            f"NKI ratio 0: no NKI kernel is called in {_number(summary.counted, 'graph')}; compiled"
            " with the kernels switched on, and graphs of this job?"
        )
        return [AdviceFinding("nki_ratio", text)]
    findings = []
    if not summary.nki_macs and stated and not absent + unreadable:
        text = (
            f"NKI ratio 0: {_calls(stated)} with 0 multiply-adds stated, as norms and other kernels"
            " without matrix products have"
        )
        findings.append(AdviceFinding("nki_ratio", text))
    bound = f"the NKI ratio is {'a lower bound' if summary.is_lower_bound else 'incomplete'}"
    bound = bound if summary.nki_macs else "NKI ratio 0"
    if absent:
        text = f"{bound}: {_calls(absent)} with no multiply-adds stated (no mac_count)"
        findings.append(AdviceFinding("nki_ratio", text))
    if unreadable:
        text = (
            f"{bound}: {_calls(unreadable)} with a configuration that can't be read, in"
            f" {len(summary.unreadable)} of the graphs"
        )
        findings.append(AdviceFinding("nki_ratio", text))
    return findings


def about_runs(
    results: Sequence[GraphResult], runs: dict[str, int], path: str
) -> list[AdviceFinding]:
    """Lists modules that only the graphs or only the file of runs has."""
    good = [result for result in results if result.error is None]
    silent = [result for result in good if name_in(runs, result.module) is None]
    texts = []
    if silent:
        macs, left = (sum(result.macs for result in them) for them in (good, silent))
        share = f", with {percent(left / macs)} of the MACs if each graph ran once" if macs else ""
        texts.append(
            f"{len(silent)} of {_number(len(good), 'graph')} {_are(len(silent))} not in {path}:"
            f" not counted{share}"
        )
    named = {name_in(runs, result.module) for result in results}
    strange = runs.keys() - named
    if strange:
        texts.append(
            f"{_number(len(strange), 'module')} of {path} {_are(len(strange))} not among the"
            f" graphs: {abbreviated_list(strange)}"
        )
    return [AdviceFinding("graph_runs", text) for text in texts]


def about_mfu(
    figures: Figures,
    job: NeuronJob,
    machine: Machine,
    throughput: Throughput,
    *,
    is_printed: bool = True,
) -> list[AdviceFinding]:
    """Explains a low MFU, or one above the peak, from the inputs.

    `is_printed`: the throughput was read or given as such, so that its unit may be another.
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


def _above(mfu: float, job: NeuronJob, machine: Machine, printed: float | None) -> list[str]:
    texts = [f"MFU {percent(mfu)} is above the peak, so an input is wrong"]
    as_tokens = mfu / job.seq_len
    if printed is not None and as_tokens < 1:
        texts.append(
            f"if {significant(printed)} are tokens/s, not sequences/s, it is"
            f" {percent(as_tokens)} (sequences of {job.seq_len})"
        )
    texts.append(
        f"the peak is that of {_number(machine.cores or 0, 'core')} on"
        f" {_number(machine.nodes, 'node')} of {machine.backend}: were there more"
        " (--num-nodes, --devices)?"
    )
    return texts


def _low(mfu: float, figures: Figures, job: NeuronJob, machine: Machine) -> list[str]:
    texts = [
        f"peak: {_number(machine.cores or 0, 'core')} of {machine.backend}"
        f" ({machine.nodes} x {machine.cores_per_node}), {machine.dtype}; a job on fewer cores"
        " reads too low by that factor (--devices, --num-nodes)"
    ]
    most = max(figures.mfu_by_convention.items(), key=lambda item: item[1])
    if job.lora is None and most[1] > mfu:
        texts.append(
            f"convention: this is under {figures.convention}; {most[0]} counts most and says"
            f" {percent(most[1])}"
        )
    if job.lora is not None and ORIGINAL in figures.mfu_by_convention:
        texts.append(
            "LoRA: gradients of frozen weights are not computed and not counted; counted as full"
            f" training it reads {percent(figures.mfu_by_convention[ORIGINAL])} ({ORIGINAL})"
        )
    if isinstance(figures.hfu, Reading) and figures.hfu.value > mfu:
        texts.append(
            f"recomputation ({job.checkpointing}): the hardware computed"
            f" {percent(figures.hfu.value)} of its peak (HFU)"
        )
    if job.replicas is not None and 1 < job.replicas <= 1 / mfu:
        texts.append(
            f"throughput: if the figure is that of one of the {job.replicas} replicas, MFU is"
            f" {percent(mfu * job.replicas)}"
        )
    texts += _bubble(job)
    return texts


def _bubble(job: NeuronJob) -> list[str]:
    """The idle share of a pipeline: (p - 1) / (m + p - 1), m micro-batches, p stages."""
    if job.pipeline_stages < 2 or job.micro_batches is None:
        return []
    idle = (job.pipeline_stages - 1) / (job.micro_batches + job.pipeline_stages - 1)
    return [
        f"pipeline: {job.pipeline_stages} stages with {_number(job.micro_batches, 'micro-batch')}"
        f" are idle {percent(idle)} of the time; a larger global batch shrinks that"
    ]


def _calls(count: int) -> str:
    return _number(count, "kernel call")


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"

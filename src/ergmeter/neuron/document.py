"""The metrics of a job as JSON: the original's keys in their order, then what it does not say.

Readers of the original's file find every key where it was. A value that is not known is null, and
`missing` has its reason under the same key.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.neuron.graphs import nki_document
from ergmeter.neuron.job.log_figures import log_document
from ergmeter.neuron.job.machine import BACKENDS
from ergmeter.neuron.job.request import DEFAULT_COMPILE_DIR
from ergmeter.neuron.original import (
    PEAK_TFLOP_PER_S_PER_NODE,
    VERSION,
    impossible_mfu,
    original_figures,
)
from ergmeter.neuron.score import REMARK
from ergmeter.records import Missing, Reading, weakest
from ergmeter.version import __version__

if TYPE_CHECKING:
    from ergmeter.neuron.job.machine import Machine
    from ergmeter.neuron.job.request import AnalysisRequest
    from ergmeter.neuron.parts import Parts

# -- origins ---------------------------------------------------------------------------------------
# How each headline figure was obtained: its basis, its interval, and over what.
#
# Only the pace of a log has an interval, that of its rows; what is made of it by multiplication has
# the same one, scaled. The score has the pace in it twice, in MFU and as throughput, so its edges
# are squared. A figure that was given on the command line has none: nobody said how sure.


_TERA = 1e12


def origins(parts: Parts) -> dict[str, dict[str, Any]]:
    """By the document's key; what is not known has no entry, and its reason is in `missing`."""
    pace, found = parts.pace, parts.figures
    origin: dict[str, dict[str, Any]] = {
        "tflop_per_sequence": as_origin(
            Reading(found.model_flops, "", "derived", note=f"{found.convention}, from config.json")
        )
    }
    if pace.seq_per_s is not None:
        rate = Reading(pace.seq_per_s, "", pace.basis, pace.low, pace.high, pace.said)
        how = pace.how or "as given by --throughput"
        origin["throughput_seq_per_sec"] = as_origin(rate) | {"formula": how}
        basis = weakest("derived", pace.basis)
        work = Reading(pace.seq_per_s, "", basis, pace.low, pace.high, found.convention)
        origin["tflops_per_second"] = as_origin(work, factor=found.model_flops / _TERA)
    for key, share in (("mfu_percent", found.mfu), ("hfu_percent", found.hfu)):
        if isinstance(share, Reading):
            origin[key] = as_origin(share, factor=100.0)
    summary = parts.summary
    if summary is not None and summary.overall_ratio is not None:
        note = f"counted in {summary.counted} compiled graphs, {summary.weighting}"
        share = Reading(summary.overall_ratio, "", "derived", note=note)
        origin["overall_nki_ratio"] = as_origin(share)
    score = _score(parts)
    return origin if score is None else origin | {"training_score": as_origin(score)}


def _score(parts: Parts) -> Reading | None:
    """The score, where all its factors are known."""
    value = None if parts.score is None else parts.score.value
    pace, mfu, summary = parts.pace, parts.figures.mfu, parts.summary
    if value is None or summary is None or pace.seq_per_s is None or not isinstance(mfu, Reading):
        return None
    basis, said = weakest(mfu.basis, pace.basis), "a product of five factors, given or found"
    is_whole = not (summary.is_lower_bound or summary.is_uncertain)
    if not is_whole or pace.low is None or pace.high is None:
        return Reading(value, "", basis, note=said)
    low, high = (value * (end / pace.seq_per_s) ** 2 for end in (pace.low, pace.high))
    note = f"{said}; its interval is that of the pace, squared"
    return Reading(value, "", basis, low, high, note)


def as_origin(reading: Reading, *, factor: float = 1.0) -> dict[str, Any]:
    """A reading without its value, its edges in another unit."""
    low, high = (None if end is None else end * factor for end in (reading.low, reading.high))
    return {"basis": reading.basis, "low": low, "high": high, "note": reading.note}


# -- inputs ----------------------------------------------------------------------------------------
# What an analysis was made from: each file and each size, and who said so.
#
# The trap: a page that outlives the command that made it. "Batch 64" may be the YAML's, the log's,
# an option's or an assumption, and a year later nobody knows. So each input keeps its source.


Input = dict[str, Any]


def inputs(parts: Parts) -> list[Input]:
    """Files, then sizes, in the order in which they are read."""
    job, machine, pace, peak = parts.job, parts.machine, parts.pace, parts.machine.core_flops_per_s
    devices_from = job.devices_from if job.devices is not None else "assumed, see the notes"
    form = None if parts.log is None else f"--log-file, read as {parts.log.format}"
    return [
        *files_read(parts.request, log_from=form),
        _input("sequences a step", job.batch_size, job.batch_from),
        _input("tokens a sequence", job.seq_len, job.seq_len_from),
        _input("sequences per second", pace.seq_per_s, pace.said),
        _input("nodes", job.nodes, job.nodes_from),
        _input("devices of a node", machine.devices_per_node, devices_from),
        _input("cores in all", machine.cores, "devices, and what a device is"),
        _input("type of products", job.dtype, job.dtype_from),
        _input("TFLOP/s of a core", peak / 1e12, machine.source),
        _input("recomputation", job.checkpointing, "the YAML"),
    ]


def files_read(request: AnalysisRequest, *, log_from: str | None = None) -> list[Input]:
    """The files that were named, or looked for."""
    directory = request.compile_dir
    cache_from = "--compile-dir" if directory else "the default of --compile-dir"
    found = [
        _input("training's YAML", request.config, "--config"),
        _input("model", request.model_config, "--model-config"),
        _input("log", request.log_file, log_from or "--log-file"),
        _input("compile cache", directory or DEFAULT_COMPILE_DIR, cache_from),
    ]
    if request.graph_runs is not None:
        found.append(_input("runs of each graph", request.graph_runs, "--graph-runs"))
    return found


def compat_inputs(
    request: AnalysisRequest, *, batch_size: int, seq_len: int, seq_per_s: float, rate_from: str
) -> list[Input]:
    """The same, of what the original knows."""
    return [
        *files_read(request),
        _input(
            "sequences a step", batch_size, "--batch-size" if request.batch_size else "the YAML"
        ),
        _input("tokens a sequence", seq_len, "--seq-len" if request.seq_len else "the YAML"),
        _input("sequences per second", seq_per_s, rate_from),
        _input("nodes", request.num_nodes or 1, "--num-nodes" if request.num_nodes else "assumed"),
    ]


def _input(what: str, value: str | float | None, source: str) -> Input:
    return {"what": what, "value": value, "from": "not given" if value is None else source}


# -- document --------------------------------------------------------------------------------------


FORMAT = "ergmeter analyze 1"


def document(parts: Parts) -> dict[str, Any]:
    """Everything."""
    job, found, pace = parts.job, parts.figures, parts.pace
    missing: dict[str, str] = {}
    whole: dict[str, Any] = {
        "model_config": parts.request.model_config,
        "batch_size": job.batch_size,
        "sequence_length": job.seq_len,
        "num_nodes": job.nodes,
        "hardware_backend": parts.machine.backend,
        "throughput_seq_per_sec": pace.seq_per_s,
        "mfu_percent": _percent("mfu_percent", found.mfu, missing),
        "tflops_per_second": _tera(found.flops_per_s),
        "throughput_tflops_per_node": _tera(found.flops_per_s_per_node),
        "seq_per_second_per_node": None if pace.seq_per_s is None else pace.seq_per_s / job.nodes,
        "time_per_batch_seconds": None
        if pace.seq_per_s is None
        else job.batch_size / pace.seq_per_s,
        "nki_analysis": nki_document(parts, missing),
    }
    if pace.seq_per_s is None:
        for key, value in whole.items():
            if value is None:
                missing.setdefault(key, pace.said)
    if parts.log is not None:
        whole["log_metrics"] = log_document(parts.log, pace)
    whole |= _document_score(parts, missing)
    whole |= _beyond(parts, missing)
    theirs = (whole["original_count"] or {}).get("mfu_percent")
    if theirs is not None and impossible_mfu(theirs):
        whole["impossible"]["original_count.mfu_percent"] = impossible_mfu(theirs)["mfu_percent"]
    return whole


def _percent(key: str, found: Reading | Missing, missing: dict[str, str]) -> float | None:
    if isinstance(found, Missing):
        missing[key] = found.reason
        return None
    return 100 * found.value


def _tera(flops: float | None) -> float | None:
    return None if flops is None else flops / _TERA


def _document_score(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    if not parts.request.calculate_score or parts.score is None:
        return {}
    found, base, pace = parts.score, parts.request.baseline, parts.pace
    if parts.score_missing is not None:
        missing["training_score"] = parts.score_missing
    elif found.value is None:
        missing["training_score"] = "the NKI ratio is not known: " + missing.get(
            "overall_nki_ratio", "no graphs"
        )
    mfu = parts.figures.mfu
    return {
        "training_score": found.value,
        "training_score_breakdown": {
            "base_mfu": base.mfu_percent,
            "base_throughput": base.throughput_seq_per_s,
            "achieved_mfu": 100 * mfu.value if isinstance(mfu, Reading) else None,
            "is_mfu_impossible": isinstance(mfu, Reading) and bool(mfu.impossible),
            "achieved_throughput": pace.seq_per_s,
            "mfu_improvement": found.mfu_improvement,
            "throughput_improvement": found.throughput_improvement,
            "nki_flop_ratio": found.nki_ratio,
            "loss_improvement": found.loss_improvement,
            "convergence_rate": found.convergence_rate,
            "nki_factor": found.nki_factor,
            "score_offset": found.offset,
            "score_without_nki": found.without_nki,
            "is_lower_bound": parts.summary is not None and parts.summary.is_lower_bound,
            "is_uncertain": parts.summary is not None and parts.summary.is_uncertain,
            "remark": REMARK,
        },
    }


def _beyond(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    """What the original's document has no key for."""
    found, job, machine = parts.figures, parts.job, parts.machine
    return {
        "format": FORMAT,
        "compat": None,
        "batch_size_from": job.batch_from,
        "sequence_length_from": job.seq_len_from,
        "convention": found.convention,
        "convention_formula": CONVENTIONS[found.convention].formula,
        "tflop_per_sequence": found.model_flops / _TERA,
        "hardware_tflop_per_sequence": _tera(found.hardware_flops),
        "hfu_percent": _percent("hfu_percent", found.hfu, missing),
        "mfu_basis": None if isinstance(found.mfu, Missing) else found.mfu.basis,
        "mfu_note": None if isinstance(found.mfu, Missing) else found.mfu.note,
        "throughput_basis": parts.pace.said,
        "obtained": origins(parts),
        "inputs": inputs(parts),
        "conventions": {
            name: {
                "tflop_per_sequence": flops / _TERA,
                "mfu_percent": None
                if name not in found.mfu_by_convention
                else 100 * found.mfu_by_convention[name],
            }
            for name, flops in found.by_convention.items()
        },
        "original_count": _original(parts, missing),
        "peak": _peak(machine),
        "devices_per_node": machine.devices_per_node,
        "parameters": found.params,
        "parameters_trained": found.params_trained,
        "lora": None if job.lora is None else {"r": job.lora.r, "targets": list(job.lora.targets)},
        "checkpointing": job.checkpointing,
        "versions": {
            "ergmeter": __version__,
            "model": model_version(parts.request.model_config),
            "neuronxcc": list(parts.found.compilers) if parts.found else [],
        },
        "impossible": _impossible(parts),
        "findings": [{"about": one.about, "text": one.text} for one in parts.findings],
        "notes": [*job.notes, *machine.notes, *found.notes],
        "missing": missing,
    }


def _impossible(parts: Parts) -> dict[str, str]:
    """By key, why a value of this document cannot be right."""
    shares = {"mfu_percent": parts.figures.mfu, "hfu_percent": parts.figures.hfu}
    return {
        key: one.impossible
        for key, one in shares.items()
        if isinstance(one, Reading) and one.impossible
    }


def _original(parts: Parts, missing: dict[str, str]) -> dict[str, Any] | None:
    """What the original makes of the same sequences per second, and why its FLOPs are others."""
    found, request, rate = parts.figures, parts.request, parts.pace.seq_per_s
    if found.original_flops is None:
        return None
    nodes = request.num_nodes or 1
    peak = PEAK_TFLOP_PER_S_PER_NODE.get(request.hw_backend)
    mfu = None
    if peak is None:
        missing["original_count.mfu_percent"] = (
            f"the original knows peaks of trn1 and trn2 alone, not of {request.hw_backend}"
        )
    elif rate is None:
        missing["original_count.mfu_percent"] = parts.pace.said
    else:
        mfu = original_figures(
            request.model_config,
            batch_size=parts.job.batch_size,
            seq_len=parts.job.seq_len,
            seq_per_s=rate,
            nodes=nodes,
            backend=request.hw_backend,
        ).mfu_percent
    flops = found.original_flops
    return {
        "version": VERSION,
        "tflop_per_sequence": flops / _TERA,
        "tflops_per_second": None if rate is None else flops * rate / _TERA,
        "mfu_percent": mfu,
        "num_nodes": nodes,
        "peak_tflops_per_second": None if peak is None else nodes * peak,
        "over_exact_tflop_per_sequence": {
            reason: extra / _TERA for reason, extra in found.differences
        },
    }


def _peak(machine: Machine) -> dict[str, Any]:
    cores, backend = machine.cores, BACKENDS[machine.backend]
    return {
        "dtype": machine.dtype,
        "tflops_per_second_per_core": machine.core_flops_per_s / _TERA,
        "tflops_per_second_per_chip": machine.chip_flops_per_s / _TERA,
        "cores_per_chip": backend.cores_per_chip,
        "cores_per_node": machine.cores_per_node,
        "cores": cores,
        "tflops_per_second_per_node": None
        if machine.cores_per_node is None
        else machine.cores_per_node * machine.core_flops_per_s / _TERA,
        "tflops_per_second": None if cores is None else cores * machine.core_flops_per_s / _TERA,
        "source": machine.source,
    }


def model_version(path: str) -> dict[str, Any]:
    """What identifies a model's configuration: its own words, and a checksum of the file."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        return {"dimensions": path}
    content = file.read_bytes()
    fields = json.loads(content)
    return {
        "name": fields.get("_name_or_path"),
        "model_type": fields.get("model_type"),
        "transformers_version": fields.get("transformers_version"),
        "config_sha256": hashlib.sha256(content).hexdigest(),
    }

"""Stores an analysis as a run: the log's steps, the FLOPs of a step, and the analysis's results.

The steps are imported as in `erg import`. The results are stored under `analysis` in the header of
the run's writer, and replace the values that metrics compute from the steps.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ergmeter.errors import UsageError
from ergmeter.importers.importing import ImportRequest, import_log
from ergmeter.neuron.analysis import Analysis, AnalysisRequest, JobDetails
from ergmeter.neuron.document import document
from ergmeter.neuron.earlier_output import EarlierOutput
from ergmeter.neuron.score import with_rate
from ergmeter.records import Flops
from ergmeter.runlog.format import WRITER_FILE
from ergmeter.runlog.settings import Settings
from ergmeter.runlog.writer import amend_header
from ergmeter.units import number_of


def check_run(request: AnalysisRequest, *, is_original: bool) -> None:
    """Raise UsageError if the analysis can't be a run: it needs a log file and our own numbers."""
    if is_original:
        raise UsageError("--run stores our own numbers; leave out --compat")
    if request.log_file is None or not Path(request.log_file).is_file():
        given = f"; {request.log_file} is not a file" if request.log_file else ""
        raise UsageError(f"--run needs --log-file with a regular file: it is read twice{given}")


def write_run(analysis: Analysis, path: Path) -> Path:
    """Store the run; return its directory.

    A log of several runs becomes several runs, as in `erg import`; the last has the results. With
    --throughput, rates and MFU are computed from it and not from the log's steps.
    """
    details, log = analysis.details, analysis.request.log_file
    assert details is not None
    assert log is not None
    flops = tuple(_of_a_step(each, details) for each in details.figures.work.flops.values())
    run = import_log(ImportRequest(log, path, settings=_settings(details), flops=flops)).runs[-1]
    facts = EarlierOutput(log, document(analysis)).entry.facts
    length, batch = analysis.seq_len, details.job.batch_size
    readings = with_rate(analysis.readings, "tokens", length, f"{length} tokens a sequence")
    stored: dict[str, Any] = {"workload": dict(facts)}
    if (rate := analysis.request.throughput) is not None:
        why = f"the analysis used --throughput {rate:g}, not the times of the log's steps"
        stored["no_speed"] = why
        readings = with_rate(readings, "steps", 1 / batch, number_of(batch, "sequence") + " a step")
    stored["analysis"] = {key: asdict(result) for key, result in readings.items()}
    (writer,) = run.path.glob(f"*/{WRITER_FILE}")
    amend_header(writer.parent, **stored)
    return run.path


def _of_a_step(flops: Flops, details: JobDetails) -> Flops:
    """Return the FLOPs of a step, from those of a sequence."""
    batch, computed = details.job.batch_size, flops.hardware_per_step
    return replace(
        flops,
        model_per_step=flops.model_per_step * batch,
        hardware_per_step=None if computed is None else computed * batch,
        tokens_per_step=details.job.seq_len * batch,
        samples_per_step=batch,
    )


def _settings(details: JobDetails) -> Settings:
    """Return the values that the analysis read from YAML and options, as the run's settings."""
    job, machine = details.job, details.machine
    return Settings(
        tokens_per_step=job.batch_size * job.seq_len,
        parameters=details.figures.work.params,
        device=f"{machine.backend}-core",
        dtype=machine.dtype,
        num_devices=machine.cores,
    )

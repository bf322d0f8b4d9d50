"""`erg job`: totals over the runs of a job that was stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import click

from ergmeter.cli.options import PATH, Forms, warn, with_default, with_forms
from ergmeter.errors import FormatError, UsageError


@click.command()
@click.argument("job", required=False)
@with_default("--runs", "directory", type=PATH, default=Path("runs"), help="Directory of its runs.")
@with_forms
def command(job: str | None, directory: Path, forms: Forms) -> int:
    """Show a job's totals over all its runs: goodput, lost steps, energy and time.

    A job is what `--job` or Meter(job=...) calls it; else a scheduler's job (SLURM, PBS, LSF),
    which a requeue keeps, or a launch of torchrun's. Without JOB: that of the newest run.

    \b
    erg job                        the job of the newest run
    erg job pretrain-7b --json     by its name
    """
    from ergmeter.compare.jobs import JobRun, job_results, jobs
    from ergmeter.runlog.format import run_paths
    from ergmeter.runlog.reader import Run
    from ergmeter.views.run.check import job_document

    opened, damaged = [], []
    for path in run_paths(directory):
        try:
            opened.append(Run.open(path))
        except FormatError as error:
            damaged.append(str(error))
    all_jobs = jobs(opened)
    name = job or (list(all_jobs)[-1] if all_jobs else None)
    if name not in all_jobs:
        there = ", ".join(all_jobs) or "none: give --job, or Meter(job=...)"
        which = f"job {name}" if name else "job"
        raise UsageError(f"no {which} in {directory} (there are: {there})")
    parts = [JobRun.of(run) for run in all_jobs[name]]
    forms.show(job_document(name, parts, job_results(parts)))
    damaged += [line for run in all_jobs[name] for line in run.damage]
    return warn(damaged)

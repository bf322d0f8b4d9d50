"""`erg import`: make a run of a log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import flag, path_option, print_json, progress_bar
from ergmeter.cli.run_options import TOKENS_ARE, with_model, with_settings
from ergmeter.units import number_of, scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.importers.importing import Imported
    from ergmeter.records import Flops
    from ergmeter.runlog.settings import Settings

_SHOW_FROM_BYTES = 20_000_000
_REASONS = 3  # why runs began: the most that are shown


@click.command()
@click.argument("log", metavar="LOG")
@path_option("--out", help="The run directory to make. [default: runs/DATE-NAME-xxxx]")
@click.option("--name", help="What to call the run. [default: the log's name]")
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="Who wrote the log: efficientllm, hf_trainer, keyvalue, megatron, nvidia_smi, nxdt,"
    " torchtitan. [default: detected]",
)
@TOKENS_ARE
@flag(
    "--one-device",
    help="Read an nvidia-smi log without an index or UUID column as one device.",
)
@flag("--json", "as_json", help="What was made, as JSON.")
@with_model
@with_settings
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    log: str,
    out: Path | None,
    name: str | None,
    format_name: str | None,
    tokens_are: str | None,
    one_device: bool,
    as_json: bool,
) -> int:
    """Make a run from a training log, for `erg report` and everything else that reads runs.

    Or of the readings that `nvidia-smi --query-gpu=timestamp,... --format=csv -l 1` logged.

    LOG is a file, packed with gzip or not, or - for standard input. A log that has several runs
    one after the other, by step numbers that begin again, makes a run of each.

    \b
    erg import train.log && erg report
    erg import --format nxdt --out runs/trn1 logs/nki-llama_20250610_014432.log
    """
    from ergmeter.importers.importing import ImportRequest, import_log

    request = ImportRequest(log, out, name, format_name, settings, flops, tokens_are, one_device)
    path = Path(log)
    size_bytes = path.stat().st_size if path.is_file() else 0
    is_quiet = size_bytes < _SHOW_FROM_BYTES
    with progress_bar(log, quiet=is_quiet, refresh_per_second=10, time="remaining") as show:
        imported = import_log(
            request, progress=lambda done: show(done, size_bytes, scaled(done, "B"))
        )
    if imported.log.is_cut_off:
        click.echo(
            f"erg: {log}: the compressed log is incomplete; its first part was read", err=True
        )
    if as_json:
        print_json(_document(imported))
    else:
        for line in _lines(imported):
            click.echo(line)
    return 0


def _lines(imported: Imported) -> Iterator[str]:
    log, choice = imported.log, imported.choice
    lines = number_of(log.line_count, "line")
    yield f"{log.path}: {choice.importer.name}, by {choice.recognised!r} ({lines})"
    for run in imported.runs:
        steps = number_of(run.steps, "timed step line")
        is_numbered = run.first_step is not None
        numbers = f", steps {run.first_step} to {run.last_step}" if is_numbered else ""
        if run.readings and not run.steps:
            yield f"{run.path}: {run.readings} readings of devices"
            continue
        yield f"{run.path}: {steps}{numbers}"
        if run.why_no_steps:
            yield run.why_no_steps
    if len(imported.runs) > 1:
        why = list(dict.fromkeys(run.began for run in imported.runs if run.began))
        more = "; ..." if len(why) > _REASONS else ""
        yield f"{len(imported.runs)} runs in one log: {'; '.join(why[:_REASONS])}{more}"
    yield f"erg report {imported.runs[-1].path}"


def _document(imported: Imported) -> dict[str, object]:
    runs = [
        {
            "run": str(run.path),
            "step_lines": run.steps,
            "readings": run.readings,
            "first_step": run.first_step,
            "last_step": run.last_step,
            "began": run.began or None,
            "notes": list(run.notes),
        }
        for run in imported.runs
    ]
    return {
        "log": imported.log.path,
        "format": imported.choice.importer.name,
        "recognised": imported.choice.recognised,
        "bytes": imported.log.bytes_read,
        "lines": imported.log.line_count,
        "runs": runs,
    }

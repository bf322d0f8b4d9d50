"""Makes a row of results for each cell, from what is in its directory.

Sources are the cell's run, the figures that transformers' Trainer printed and the log of
`nvidia-smi`. A row is cached and used again until a file in the directory is newer. Rows are also
read from the files that FMS published; their rows without metrics are failed cells.

The Trainer's tokens per second are one process's and count padding; its samples per second are of
all processes. Our rates are of the steps after the warm-up. The Trainer's totals, which FMS's
programs multiply with the runtime, are of the whole training.
"""

from __future__ import annotations

import csv
import io
import json
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from ergmeter.atomic_write import json_number, read_json, write_json, write_text
from ergmeter.bench.execute import nvidia_smi_logger
from ergmeter.bench.execute.state import RESULTS
from ergmeter.bench.memory import (
    BYTES_PER_MIB,
    NVML,
    SAVED,
    of_devices,
    of_smi,
    of_trainer,
    saved_by_trainer,
)
from ergmeter.bench.plan.cells import Cell, broken_expectations
from ergmeter.bench.tables import (
    ARGUMENTS,
    DONE,
    RATES,
    READING_COLUMNS,
    READING_PARTS,
    VERSION,
    as_table,
    batched,
    from_csv,
    from_parquet,
    is_ours,
    number,
    one_table,
    write,
)
from ergmeter.compare.entry import FAILED
from ergmeter.errors import ErgmeterError, FormatError, NotMeasurable, UsageError
from ergmeter.metrics.catalog import Metric, bench_columns
from ergmeter.metrics.evidence.gpu_use import gpu_use
from ergmeter.metrics.evidence.ranks import need_all
from ergmeter.metrics.evidence.samples import ACCELERATORS
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Reading, mapped
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa

    from ergmeter.metrics.evidence.evidence import Evidence

FROM_RUN, TRAINER = "run", "trainer"
# A row holds these of all ranks. A Meter on one of them tells that rank's.
_OF_ALL = {
    "real_tokens_per_s": "tokens",
    "computed_tokens_per_s": "tokens",
    "padding_frac": "tokens",
    "samples_per_s": "samples",
}
_EACH = ("memory_allocator_devices_bytes", "memory_allocator_ids")


def run_columns(path: Path, missing: dict[str, str], *, num_gpus: int | None) -> dict[str, Any]:
    """The columns that the run at this path fills; reasons for the others go into `missing`."""
    columns = _run_metrics()
    try:
        evidence = evidence_of(Run.open(path))
    except ErgmeterError as error:
        why = str(error) if path.exists() else "the cell left no run"
        missing |= dict.fromkeys((*columns, *_EACH), why)
        return {}
    row = {name: _reading(evidence, metric, missing) for name, metric in columns.items()}
    read = {name: reading for name, reading in row.items() if reading is not None}
    for kind in ("real", "computed"):
        total = read.get(f"{kind}_tokens_per_s")
        column = f"{kind}_tokens_per_s_per_device"
        if total is None:
            continue
        if not evidence.devices("gpu"):
            missing[column] = evidence.why_no_device("accelerator", *ACCELERATORS)
        elif num_gpus:
            read[column] = mapped(total, lambda value: value / num_gpus, impossible="")
        else:
            missing[column] = "how many devices it ran on is not told"
    columns_read: dict[str, Any] = {}
    for name, reading in read.items():
        columns_read[name] = reading.value
        columns_read |= {f"{name}_{part}": getattr(reading, part) for part in READING_PARTS}
    impossible = {name: reading.impossible for name, reading in read.items() if reading.impossible}
    if impossible:
        columns_read["impossible"] = json.dumps(impossible, sort_keys=True)
    if any(name in RATES for name in read):
        columns_read["rates_from"] = FROM_RUN
        columns_read["window"] = evidence.window_kind
    run = evidence.run
    return columns_read | _run_facts(run) | _nvml(run) | _allocators(run, missing)


@cache
def _run_metrics() -> dict[str, Metric]:
    """The metrics of a run that a row has, by column; the headline rate is chosen from them."""
    columns = bench_columns().items()
    return {name: m for name, m in columns if m.scope == "run" and not m.alternatives}


def _reading(evidence: Evidence, metric: Metric, missing: dict[str, str]) -> Reading | None:
    try:
        if metric.column in _OF_ALL:
            need_all(evidence, _OF_ALL[metric.column])
        return metric.reading(evidence)
    except NotMeasurable as error:
        missing[metric.column] = str(error)
    return None


def _run_facts(run: Run) -> dict[str, Any]:
    """Facts in the run's header: its losses are those of the whole training."""
    named = {"loss": "train_loss", "eval_loss": "eval_loss"}
    losses = {name: run.workload.get(key) for name, key in named.items()}
    gpus = [run.devices[id_].name for id_, use in gpu_use(run).items() if use.counts]
    numbers: dict[str, Any] = {n: float(v) for n, v in losses.items() if isinstance(v, int | float)}
    return numbers | ({"device": ", ".join(sorted(set(gpus)))} if gpus else {})


def _nvml(run: Run) -> dict[str, Any]:
    """Memory of each device at the first reading, and at its peak."""
    taken = {
        device: (float(series.values[0]), float(series.values.max()))
        for device, series in sorted(run.series("memory_bytes").items())
        if len(series.values) and device in run.devices and run.devices[device].kind == "gpu"
    }
    return of_devices(taken, NVML) if taken else {}


def _allocators(run: Run, missing: dict[str, str]) -> dict[str, Any]:
    """The allocator's own peak, of each rank on each device that it put something on."""
    peaks = run.series("allocated_peak_bytes")
    allocators = {
        (writer.header.get("rank") or 0, ":".join(device.id.split(":")[-2:])): device.id
        for writer in run.writers
        for device in writer.devices
        if device.kind == "allocator" and device.id in peaks
    }
    if not allocators:
        why = missing.get("memory_allocator_peak_bytes", "no allocator was read")
        missing |= dict.fromkeys(_EACH, why)
        return {}
    return {
        "memory_allocator_ids": " ".join(
            f"rank{rank}/{where}" for rank, where in sorted(allocators)
        ),
        "memory_allocator_devices_bytes": [
            float(peaks[device].values.max()) for _, device in sorted(allocators.items())
        ],
    }


_PRINTED = {
    "loss": "train_loss",
    "eval_loss": "eval_loss",
    "epoch": "epoch",
    "runtime_s": "train_runtime",
    "samples_per_s": "train_samples_per_second",
    "steps_per_s": "train_steps_per_second",
    "computed_tokens_per_s_per_device": "train_tokens_per_second",
}


def fms_figures(results: Mapping[str, Any], num_gpus: int | None) -> dict[str, Any]:
    """What transformers' Trainer printed at the end, as our columns.

    Its train_tokens_per_second counts padding and is one process's; its train_samples_per_second
    is of all processes together.
    """
    row: dict[str, Any] = {ours: number(results.get(name)) for ours, name in _PRINTED.items()}
    per_device = row["computed_tokens_per_s_per_device"]
    is_counted = per_device is not None and num_gpus
    row["computed_tokens_per_s"] = per_device * num_gpus if is_counted else None
    row["rates_from"] = TRAINER if row["runtime_s"] is not None else None
    return row


def with_headline_rate(row: dict[str, Any], missing: Mapping[str, str]) -> dict[str, Any]:
    """The row with its headline rate: of real tokens where they were counted."""
    kind = "real" if row.get("real_tokens_per_s") is not None else "computed"
    for name in ("tokens_per_s", "tokens_per_s_per_device"):
        for part in ("", *(f"_{part}" for part in READING_PARTS)):
            row[f"{name}{part}"] = row.get(f"{kind}_{name}{part}")
    for name in READING_COLUMNS:
        if row.get(name) is not None:
            row[f"{name}_basis"] = row.get(f"{name}_basis") or "reported"
    row["tokens_counted"] = kind if row["tokens_per_s"] is not None else None
    missing = {**_of_tokens(missing), **missing}
    reasons = {name: why for name, why in missing.items() if row.get(name) is None}
    row["missing"] = json.dumps(reasons, sort_keys=True)
    return row


def _of_tokens(missing: Mapping[str, str]) -> dict[str, str]:
    """Why there is no headline rate: for want of what it is chosen from."""
    reasons = {}
    for ending in ("", "_per_device"):
        for kind in ("real", "computed"):  # computed ones are what there is at the least
            why = missing.get(f"{kind}_tokens_per_s{ending}") or missing.get(f"{kind}_tokens_per_s")
            if why:
                reasons[f"tokens_per_s{ending}"] = why
    return reasons


# Column, scale to bytes and theirs: of 30 May 2024 and later, of 27 May, of 21 May.
_MEMORY: dict[str, tuple[str, float]] = {
    "mem_nvidia_mem_reserved": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "mem_peak_torch_mem_alloc_in_bytes": ("memory_hf_peak_bytes", 1.0),
    "mem_torch_mem_alloc_in_bytes": ("memory_hf_alloc_bytes", 1.0),
    "nvidia_mem_reserved": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "peak_torch_mem_alloc_in_bytes": ("memory_hf_peak_bytes", 1.0),
    "torch_mem_alloc_in_bytes": ("memory_hf_alloc_bytes", 1.0),
    "reserved_gpu_mem": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "alloc_gpu_memory_in_bytes": ("memory_hf_seed_bytes", 1.0),
}
TRAINER_METRICS = (
    *("train_runtime", "train_samples_per_second", "train_tokens_per_second", "train_loss"),
)
_NEEDED = ("num_gpus", "per_device_train_batch_size")


def read_fms_file(path: Path) -> pa.Table:
    """The rows of a `benchmarks.csv` or `raw_summary.csv` of any of the three generations."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} can't be read as a table: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    header = reader.fieldnames or []
    if not set(TRAINER_METRICS) & set(header):
        raise FormatError(
            f"{path} is no table of results: it has none of {', '.join(TRAINER_METRICS)}"
            f" ({', '.join(header[:6]) or 'it is empty'}, ...)"
        )
    return as_table([_fms_row(row, line, path) for line, row in enumerate(reader)])


def _fms_row(fms_cells: Mapping[str, str | None], index: int, path: Path) -> dict[str, Any]:
    cells = {name: value.strip() for name, value in fms_cells.items() if name and value}
    gpus = number(cells.get("num_gpus"))
    row: dict[str, Any] = {
        "index": index,
        "repeat": 1,
        "num_gpus": int(gpus) if gpus else None,
        "nodes": 1,
        "scenario": cells.get("scenario"),  # in files of ours
        "path": f"{path}, line {index + 2}",
        "device": cells.get("gpu_device_name"),
        "settings": json.dumps({k: v for k, v in cells.items() if k in ARGUMENTS}, sort_keys=True),
        "raw": json.dumps(cells),
    }
    row |= {name: cells.get(name) for name in ARGUMENTS}
    row["framework_config"] = row["framework_config"] or "none"
    row |= fms_figures(cells, row["num_gpus"])
    row |= _fms_memory(cells)
    row["status"], row["reason"] = _fms_outcome(cells)
    return with_headline_rate(row, {"real_tokens_per_s": "FMS counts padding with the rest"})


def _fms_memory(cells: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for theirs, (ours, scale) in _MEMORY.items():
        # The first generation may have written its unit into the cell.
        value = number(cells.get(theirs, "").removesuffix("MiB").strip())
        if value is not None and ours not in row:
            row[ours] = value * scale
    if "memory_hf_seed_bytes" in row:
        row["memory_hf_peak_prose_bytes"] = row["memory_hf_seed_bytes"]
    if "memory_nvidia_mean_bytes" in row:
        row["memory_nvidia_from"] = "reference"
    return row


def _fms_outcome(cells: Mapping[str, str]) -> tuple[str, str]:
    status = cells.get("status")  # in files of ours, of cells that failed
    if status in FAILED:
        return status, "as the reference says; it does not say why"
    if any(number(cells.get(name)) is not None for name in TRAINER_METRICS):
        return "ok", ""
    read_as = next((name for name in _MEMORY if name.endswith("reserved") and name in cells), None)
    reading = f"; nvidia-smi had read {cells[read_as]} MiB" if read_as else ""
    return "error", f"it failed: the reference has no metrics for it, and does not say why{reading}"


RUNTIME, LOSS = "train_runtime", "train_loss"
# By their names: our column, and whose counts must all be there for it.
_TRAINER_RATES = {
    "train_samples_per_second": ("samples_per_s", "samples"),
    "train_steps_per_second": ("steps_per_s", ""),
    "train_tokens_per_second": ("computed_tokens_per_s", "tokens"),
}
TRAINER_NAMES = (RUNTIME, *_TRAINER_RATES, LOSS, "epoch", "eval_loss")


def trainer_totals(
    printed: Mapping[str, object], run: Path, *, ranks: int | None, loss: float | None
) -> dict[str, float]:
    """Totals by the Trainer's names. `printed` is its output; unknown ones are left out."""
    totals = {
        name: value for name in TRAINER_NAMES if (value := number(printed.get(name))) is not None
    }
    if LOSS not in totals and loss is not None:
        totals[LOSS] = loss
    if not {RUNTIME, *_TRAINER_RATES} <= totals.keys():
        counts, took_s = _counted(run)
        runtime_s = totals.get(RUNTIME) or took_s
        if runtime_s is None:
            return totals
        totals[RUNTIME] = runtime_s
        for name, count in counts.items():
            # Its tokens are those of one process, its samples and steps those of all.
            share = ranks if name == "train_tokens_per_second" else 1
            if name not in totals and share:
                totals[name] = count / share / runtime_s
    return totals


def _counted(path: Path) -> tuple[dict[str, float], float | None]:
    """Of all steps of the run: what they did, and the time from the first to the last."""
    try:
        evidence = evidence_of(Run.open(path), Settings(warmup_steps=0, window=UNBROKEN))
        took_s = evidence.window.duration_s
    except ErgmeterError:
        return {}, None
    counts = {}
    for name, (column, of_all) in _TRAINER_RATES.items():
        try:
            if of_all:
                need_all(evidence, of_all)
            rate = bench_columns()[column].reading(evidence)
        except NotMeasurable:
            continue
        if rate.basis != "reported":  # a rate that was printed is no count
            counts[name] = rate.value * took_s
    return counts, took_s


__all__ = ["batches", "collect", "complete", "load", "table", "write"]

ROW = "row.json"
_INPUTS = (
    *("cell.json", "status.json", "results.json", "run/run.json"),
    *(nvidia_smi_logger.LOG, nvidia_smi_logger.NOTE, f"hf/{SAVED}"),
)
_PREFIX = "exp_"
_ADDED = "measured_by_ergmeter"  # names in results.json that no program told, joined by spaces


def table(directory: Path, *, keep: bool = True) -> pa.Table:
    """One row a cell, in the order of their numbers. Raises FormatError where there are none."""
    return one_table(_of_directory(directory, keep=keep))


def load(path: Path) -> pa.Table:
    """Results from wherever they are: a directory, a table of ours, a published reference."""
    return one_table(batches(path))


def batches(path: Path) -> Iterator[pa.Table]:
    """The same, some hundred rows at a time."""
    if path.is_dir():
        return _of_directory(path, keep=True)
    if not path.is_file():
        raise UsageError(f"{path} is not there: give a directory of results, a Parquet or CSV file")
    if path.suffix == ".parquet":
        return from_parquet(path)
    return from_csv(path) if is_ours(path) else iter([read_fms_file(path)])


def _of_directory(directory: Path, *, keep: bool) -> Iterator[pa.Table]:
    cells = cell_directories(directory)
    if not cells:
        raise FormatError(
            f"{directory} holds no cells ({_PREFIX}0, ...): `erg bench run` makes them"
        )
    return batched(collect(cell, keep=keep) for cell in cells)


def collect(cell: Path, *, keep: bool = True) -> dict[str, Any]:
    """The row of one cell's directory, cached beside it if `keep`."""
    stamp = _stamp(cell)
    cached = read_json(cell / ROW)
    if cached.get("stamp") == stamp:
        return {**cached["row"], "path": str(cell)}  # it may have been moved
    row = _row(cell)
    if keep and row["status"] in DONE:
        _keep(cell / ROW, {"stamp": stamp, "row": row})
    return row


def complete(cell: Path) -> None:
    """Add to an ended cell's results.json what FMS has there: the final figures of its training.

    Those that the program did not print are named in it, so that they are never taken for its own.
    """
    row = collect(cell)
    raw = json.loads(row["raw"])
    figures = json.loads(row["training"] or "{}")
    ours = {name: value for name, value in figures.items() if raw.get(name) in (None, "")}
    if ours and row["status"] in DONE:
        added = {**raw, **ours, _ADDED: " ".join(sorted(ours))}
        write_json(cell / RESULTS, {k: json_number(v) for k, v in sorted(added.items())}, indent=4)
        _keep(cell / ROW, {"stamp": _stamp(cell), "row": row})


def cell_directories(directory: Path) -> list[Path]:
    """The directories of cells in a bench directory, by their numbers."""
    numbered = [
        (int(number), path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (number := path.name.removeprefix(_PREFIX)) != path.name and number.isdigit()
    ]
    return [path for _, path in sorted(numbered)]


# Goes up when a row comes to be made otherwise of the same files: what is kept is then made anew.
_MAKING = 7


def _stamp(cell: Path) -> list[int]:
    """When what a row is made of was last written; the run's own files are written under run/."""
    stamp = [VERSION, _MAKING]
    for name in (*_INPUTS, *nvidia_smi_logger.of_nodes(cell)):
        try:
            stamp.append((cell / name).stat().st_mtime_ns)
        except OSError:
            stamp.append(0)
    return stamp


def _row(cell: Path) -> dict[str, Any]:
    cell_json, status = (read_json(cell / f"{n}.json") for n in ("cell", "status"))
    results = _as_told(read_json(cell / RESULTS))
    arguments = {name: results[name] for name in ARGUMENTS if name in results}
    settings = {**arguments, **(cell_json.get("settings") or {})}
    row = _identity(cell, cell_json, results) | _outcome(status, results)
    row |= {name: _text(settings.get(name)) for name in ARGUMENTS}
    row["framework_config"] = row["framework_config"] or "none"
    row["max_seq_length"] = row["max_seq_length"] or _text(settings.get("max_seq_len"))
    missing: dict[str, str] = {}
    devices = row["num_gpus"] * row["nodes"] if row["num_gpus"] else None
    row |= fms_figures(results, devices)
    row = _with_run(row, run_columns(cell / "run", missing, num_gpus=devices))
    results = {**saved_by_trainer(cell / "hf"), **results}
    row |= of_trainer(results, missing)
    row |= of_smi(cell, row, missing)
    row |= {"settings": json.dumps(settings, sort_keys=True), "raw": json.dumps(results)}
    row["training"] = None
    if row["status"] == "ok":
        figures = trainer_totals(results, cell / "run", ranks=devices, loss=row.get("loss"))
        row["training"] = json.dumps(figures, sort_keys=True)
    return with_headline_rate(row, missing) | {"path": str(cell)}


def _with_run(row: dict[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of one window: the run's own where it has any, and then none of the Trainer's.

    Loss and time of the whole training stay the Trainer's, where it told them.
    """
    printed = {name: row[name] for name in ("loss", "runtime_s") if row.get(name) is not None}
    if measured.get("rates_from"):
        of_run = {_rate_unit(name) for name in measured if name in RATES and name != "rates_from"}
        row = {n: v for n, v in row.items() if n not in RATES or _rate_unit(n) not in of_run}
        if "token" not in of_run and "rates_from" in row:  # it says whose tokens these are
            measured = {name: value for name, value in measured.items() if name != "rates_from"}
    stated = {f"{name}_{part}": None for name in printed for part in READING_PARTS}
    return {**row, **measured, **printed, **stated}


def _rate_unit(column: str) -> str:
    """What a rate counts: tokens are of one source, and so are samples and steps."""
    if column == "padding_frac":
        return "token"
    return next((word for word in ("token", "sample", "step") if word in column), column)


def _identity(
    cell: Path, cell_json: Mapping[str, Any], results: Mapping[str, Any]
) -> dict[str, Any]:
    gpus = cell_json.get("num_gpus") or number(results.get("num_gpus"))
    return {
        "index": int(cell.name.removeprefix(_PREFIX)),
        "id": cell_json.get("id") or "",
        "group": Cell.from_json(cell_json).group if cell_json else "",
        "scenario": cell_json.get("scenario") or "",
        "repeat": cell_json.get("repeat") or 1,
        "num_gpus": int(gpus) if gpus else None,
        "nodes": cell_json.get("nodes") or 1,
    }


def _outcome(status: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    attempts = status.get("attempts") or []
    claims = status.get("claims") or []
    word, reason = status.get("status"), status.get("reason") or ""
    if word is None:  # a directory of the original's: it keeps no status
        word, reason = _original_outcome(results)
    return {
        "status": word,
        "reason": reason,
        "exit_code": status.get("exit_code"),
        "attempts": len(attempts),
        "started": attempts[-1].get("started") if attempts else None,
        "ended": attempts[-1].get("ended") if attempts else None,
        "claims_held": sum(bool(claim.get("held")) for claim in claims),
        "claims_broken": broken_expectations(claims),
    }


def _original_outcome(results: Mapping[str, Any]) -> tuple[str, str]:
    if not results:
        return "pending", ""
    if results.get("dry_run"):
        return "skipped", "a dry run"
    errors = results.get("error_messages")
    if errors:
        error = errors[-1] if isinstance(errors, list) else errors
        return "error", str(error).strip().splitlines()[-1]
    if number(results.get("train_runtime")) is None:
        return "error", "no figures were found in its output: it did not train to the end"
    return "ok", ""


def _as_told(results: Mapping[str, Any]) -> dict[str, Any]:
    """A results.json without what `complete` put into it."""
    added = {_ADDED, *str(results.get(_ADDED, "")).split()}
    return {name: value for name, value in results.items() if name not in added}


def _text(value: object) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(value)


def _keep(path: Path, row: Mapping[str, Any]) -> None:
    """A reader may have no right to write there, and two may come at once."""
    with suppress(OSError):
        write_text(path, json.dumps(row))

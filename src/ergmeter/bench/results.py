"""Makes a row of results from each cell's directory, and comparison entries from rows.

Sources are the cell's run, the metrics that transformers' Trainer printed and the log of
`nvidia-smi`. A row is cached until a file in the cell's directory is newer.

The Trainer's totals, which FMS's programs multiply by the runtime, are of the whole training; our
rates are of the steps after the warm-up.

The FMS guide adds each stage's temporary peak to the total; FMS's program counts a peak only in the
stage that had it. They differ if a model peaks in `init`; both are computed here. The first reading
of `nvidia-smi` is the memory in use before the cell, if the log began before the program. Memory is
stored per device, since a mean hides the device that runs out. The log is preferred to NVML's
probe, which may start when the cell already uses memory.
"""

from __future__ import annotations

import fnmatch
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from ergmeter.atomic_write import json_number, read_json, write_json, write_text
from ergmeter.bench import tables
from ergmeter.bench.execute import state
from ergmeter.bench.execute.state import RESULTS, SMI_LOG, SMI_NOTE
from ergmeter.bench.plan.cells import Cell, broken_expectations
from ergmeter.bench.tables import ARGUMENTS, RATES, READING_PARTS, STAGES, number
from ergmeter.compare.entry import Entry, SourceEntries, Wanted, facts_of
from ergmeter.compare.ledgers import is_ledger
from ergmeter.errors import ErgmeterError, FormatError, NotMeasurable
from ergmeter.importers.nvidia_smi import CsvLog, key_of
from ergmeter.metrics.catalog import Metric, bench_columns
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.gpu_use import gpu_use
from ergmeter.metrics.evidence.ranks import need_all
from ergmeter.metrics.evidence.samples import ACCELERATORS
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Reading, mapped
from ergmeter.runlog.format import RUN_FILE
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings

# These are sums over all ranks: each rank must have recorded the count.
_OF_ALL = {
    "real_tokens_per_s": "tokens",
    "computed_tokens_per_s": "tokens",
    "padding_frac": "tokens",
    "samples_per_s": "samples",
}
_EACH = ("memory_allocator_devices_bytes", "memory_allocator_ids")


def run_columns(
    path: Path, missing: dict[str, str], damaged: list[str], *, num_gpus: int | None
) -> dict[str, Any]:
    """The columns that the run at this path fills; reasons for the others go into `missing`."""
    columns = _run_metrics()
    try:
        evidence = evidence_of(Run.open(path))
    except ErgmeterError as error:
        why = str(error) if path.exists() else "the cell left no run"
        missing |= dict.fromkeys((*columns, *_EACH), why)
        damaged += [why] if isinstance(error, FormatError) and (path / RUN_FILE).exists() else []
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
            missing[column] = "the cell's number of devices is unknown"
    columns_read: dict[str, Any] = {}
    for name, reading in read.items():
        columns_read[name] = reading.value
        columns_read |= {f"{name}_{part}": getattr(reading, part) for part in READING_PARTS}
    impossible = {name: reading.impossible for name, reading in read.items() if reading.impossible}
    if impossible:
        columns_read["impossible"] = json.dumps(impossible, sort_keys=True)
    if any(name in RATES for name in read):
        columns_read["rates_from"] = tables.FROM_RUN
        columns_read["window"] = evidence.window_kind
    run = evidence.run
    columns_read |= _run_facts(run) | _nvml(run) | _allocators(run, missing)
    damaged += run.damage
    return columns_read


@cache
def _run_metrics() -> dict[str, Metric]:
    """The metrics that a row takes from its run, by column; headline rates are added later."""
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
    """Losses and GPU names in the run's header; the losses are of the whole training."""
    named = {"loss": "train_loss", "eval_loss": "eval_loss", MEAN_LOSS: MEAN_LOSS}
    losses = {name: run.workload.get(key) for name, key in named.items()}
    gpus = [run.devices[id_].name for id_, use in gpu_use(run).items() if use.counts]
    numbers: dict[str, Any] = {n: float(v) for n, v in losses.items() if isinstance(v, int | float)}
    return numbers | ({"device": ", ".join(sorted(set(gpus)))} if gpus else {})


def _nvml(run: Run) -> dict[str, Any]:
    """GPU memory columns from NVML: each GPU's first reading and its peak."""
    taken = {
        device: (float(series.values[0]), float(series.values.max()))
        for device, series in sorted(run.series("memory_bytes").items())
        if len(series.values) and device in run.devices and run.devices[device].kind == "gpu"
    }
    return of_devices(taken, NVML) if taken else {}


def _allocators(run: Run, missing: dict[str, str]) -> dict[str, Any]:
    """torch's allocator columns: the peak of each rank on each device where it allocated."""
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


# GPU memory: by the Trainer's own sums, and by `nvidia-smi`.

NVML, SMI = "nvml", "nvidia-smi"
FMS_STAGES = ("init", "train")
SAVED = "all_results.json"
_IS_MEMORY = re.compile(r"_mem_[cg]pu")
_USED = "memory.used"
_LONGEST_LINE = 80  # characters of a damaged file's first line


def saved_by_trainer(saved: Mapping[str, object]) -> dict[str, float]:
    """Return memory metrics and totals of all_results.json, which `Trainer.save_metrics` writes.

    The totals are for a training that printed none. The memory of evaluate and predict is only in
    this file: they print before the memory tracker is read.
    """
    names = (name for name in saved if _IS_MEMORY.search(name) or name in TRAINER_NAMES)
    return {name: value for name in names if (value := number(saved[name])) is not None}


def of_trainer(metrics: Mapping[str, object], missing: dict[str, str]) -> dict[str, float]:
    """Memory columns from what rank 0's Trainer logged with `skip_memory_metrics=False`.

    For each stage: the memory allocated at its end, and its peak; then FMS's sums. The Trainer has
    no peaks of Apple's devices.
    """
    before = number(metrics.get("before_init_mem_gpu"))
    deltas = {
        stage: delta
        for key, stage in STAGES.items()
        if (delta := number(metrics.get(f"{key}_mem_gpu_alloc_delta"))) is not None
    }
    fms = [stage for stage in FMS_STAGES if stage in deltas]
    if before is None or not fms:
        why = _why_no_trainer_memory(metrics)
        missing |= {name: why for name in tables.MEMORY if name.startswith("memory_hf_")}
        return {}
    row = {"memory_hf_before_bytes": before}
    total = before
    peaked: dict[str, float] = {}  # above the end of the stage
    for key, stage in STAGES.items():
        end, peak = (f"memory_hf_{stage}_{what}_bytes" for what in ("alloc", "peak"))
        if stage not in deltas:
            why = "it was not called, or only inside train(), which counts its memory"
            missing |= dict.fromkeys((end, peak), f"the Trainer logged no memory of {stage}: {why}")
            continue
        total += deltas[stage]
        row[end] = total
        above = number(metrics.get(f"{key}_mem_gpu_peaked_delta"))
        if above is None:
            missing[peak] = f"the Trainer's memory tracker has no peak of the stage {stage}"
        else:
            row[peak] = total + above
            peaked[stage] = above
    row["memory_hf_alloc_bytes"] = max(before, *(row[f"memory_hf_{s}_alloc_bytes"] for s in fms))
    no_peak = next((stage for stage in fms if stage not in peaked), None)
    if no_peak is not None:
        names = (
            f"memory_hf_{name}_bytes" for name in ("peak", "peak_prose", "discrepancy", "seed")
        )
        missing |= dict.fromkeys(names, missing[f"memory_hf_{no_peak}_peak_bytes"])
        return row
    highest = max(before, *(row[f"memory_hf_{stage}_peak_bytes"] for stage in fms))
    prose = before + sum(deltas[stage] + peaked[stage] for stage in fms)
    return row | {
        "memory_hf_peak_bytes": highest,
        "memory_hf_peak_prose_bytes": prose,
        "memory_hf_discrepancy_bytes": prose - highest,
        "memory_hf_seed_bytes": prose,  # FMS's first program (May 2024) has the guide's sum
    }


def _why_no_trainer_memory(metrics: Mapping[str, object]) -> str:
    if "before_init_mem_gpu" in metrics:
        return "the Trainer logged no memory of its init or train stage"
    if "before_init_mem_cpu" in metrics:
        return "the Trainer's memory tracker saw no GPU"
    return "the Trainer logged no memory: use --memory huggingface or --skip_memory_metrics False"


def smi_peaks(path: Path) -> dict[str, tuple[float, float]]:
    """Return each device's first reading of memory.used and its highest.

    The file is what `nvidia-smi --query-gpu <any keywords> --format csv` wrote, at any interval.
    """
    log = CsvLog()
    used: dict[str, tuple[float, float]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for row in log.rows(file):
            key, value = key_of(row.cells), row.figure(_USED)
            if value is not None:
                device = row.cells[key] if key else "0"
                first, highest = used.get(device, (value, value))
                used[device] = first, max(highest, value)
    if not log.readings + log.skipped:
        raise NotMeasurable(f"{path.name} has no reading: none was logged before the cell ended")
    if _USED not in log.names:
        raise FormatError(
            f"{path.name}: no column {_USED} in its first line ({log.first[:_LONGEST_LINE]!r});"
            " log with --query-gpu timestamp,name,index,memory.used --format csv"
        )
    if not used:
        raise FormatError(f"{path.name} holds no reading of {_USED}")
    return used


def of_devices(taken: Mapping[str, tuple[float, float]], source: str) -> dict[str, Any]:
    """GPU memory columns. `taken`: the first and the highest reading of each device, in bytes."""
    above = [most - first for first, most in taken.values()]
    return {
        "memory_nvidia_ids": " ".join(taken),
        "memory_nvidia_devices_bytes": above,
        "memory_nvidia_first_bytes": [first for first, _ in taken.values()],
        "memory_nvidia_mean_bytes": sum(above) / len(above),
        "memory_nvidia_peak_bytes": max(above),
        "memory_nvidia_from": source,
    }


def _of_all_nodes(cell: Path, name: str) -> list[Path]:
    """Files of this name in a cell's directory: the plain one, then one per node."""
    stem, _, ending = name.partition(".")
    own = [cell / name] if (cell / name).is_file() else []
    return [*own, *sorted(cell.glob(f"{stem}.node*.{ending}"))]


def _smi_logs(cell: Path) -> dict[str, Path]:
    """A cell's nvidia-smi logs, by prefix for device ids: "node1/", or "" for a single node."""
    paths = _of_all_nodes(cell, SMI_LOG)
    return {"" if path.name == SMI_LOG else f"{path.suffixes[-2][1:]}/": path for path in paths}


def of_smi(
    cell: Path, row: Mapping[str, Any], missing: dict[str, str], damaged: list[str]
) -> dict[str, Any]:
    """GPU memory columns from the cell's nvidia-smi logs, which replace NVML's in `row`.

    Without a usable log NVML's columns stay, with a note that says what is wrong with the log.
    """
    try:
        for path in _of_all_nodes(cell, SMI_NOTE):
            problem = _object(cell, path.name, damaged).get("problem")
            if problem:
                raise NotMeasurable(str(problem))
        logs = _smi_logs(cell)
        nodes = row.get("nodes") or 1
        if logs and len(logs) != nodes:
            raise NotMeasurable(
                f"{len(logs)} of {nodes} nodes left a log of nvidia-smi,"
                " so the peak may be on a node without one"
            )
        devices = {
            f"{node}{device}": readings
            for node, path in logs.items()
            for device, readings in smi_peaks(path).items()
        }
        if devices:
            return of_devices(devices, SMI)
        why = missing.get("memory_device_peak_bytes", "no device's memory was read")
    except (NotMeasurable, FormatError) as error:
        why = str(error)
        damaged += [why] if isinstance(error, FormatError) else []
        if row.get("memory_nvidia_from"):
            return {"memory_nvidia_note": f"read by NVML, not by nvidia-smi: {why}"}
    missing |= {name: why for name in tables.MEMORY if name.startswith("memory_nvidia_")}
    return {}


# Totals of the whole training, under the Trainer's names.

RUNTIME, LOSS = "train_runtime", "train_loss"
MEAN_LOSS = "mean_train_loss"  # what `erg train` calls the Trainer's train_loss in its run
# Trainer's name: our column, and the count that every rank must have recorded.
_TRAINER_RATES = {
    "train_samples_per_second": ("samples_per_s", "samples"),
    "train_steps_per_second": ("steps_per_s", ""),
    "train_tokens_per_second": ("computed_tokens_per_s", "tokens"),
}
TRAINER_NAMES = (RUNTIME, *_TRAINER_RATES, LOSS, "epoch", "eval_loss")


def trainer_totals(
    printed: Mapping[str, object], run: Path, *, ranks: int | None, loss: float | None
) -> dict[str, float]:
    """The whole training's totals by the Trainer's names: as printed, else counted from the run.

    `loss`: used if the Trainer printed none. Totals that neither source has are left out.
    """
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
            # The Trainer's tokens are one process's; its samples and steps are of all processes.
            share = ranks if name == "train_tokens_per_second" else 1
            if name not in totals and share:
                totals[name] = count / share / runtime_s
    return totals


def _counted(path: Path) -> tuple[dict[str, float], float | None]:
    """Tokens, samples and steps of a whole run, by the Trainer's names, and its duration in s."""
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
        if rate.basis != "reported":  # a printed rate has no count behind it
            counts[name] = rate.value * took_s
    return counts, took_s


# Rows of cells.

ROW = "row.json"
_INPUTS = (
    *("cell.json", "status.json", "results.json", "run/run.json"),
    *(SMI_LOG, SMI_NOTE, f"hf/{SAVED}"),
)
_SMI_OF_NODES = "gpu_memory_logs.node*"
# Two keys of results.json with the names, joined by spaces, that the program did not print.
_ADDED, _SAVED = "measured_by_ergmeter", "saved_by_trainer"


def table(directory: Path, *, keep: bool = True) -> pa.Table:
    """Return one row per cell, by cell number. Raises FormatError if there are no cells.

    `keep`: cache each row in its cell's directory.
    """
    return tables.one_table(tables.batched(_of_directory(directory, keep=keep)))


def batches(path: Path) -> Iterator[pa.Table]:
    """Return tables of some hundred rows each, from a directory, our own table or a file of FMS."""
    if path.is_dir():
        return tables.batched(_of_directory(path, keep=True))
    if not path.is_file():
        raise FormatError(f"{path} is not there: give a results directory, a Parquet or CSV file")
    if path.suffix == ".parquet":
        return tables.from_parquet(path)
    return tables.from_csv(path) if tables.is_ours(path) else iter([tables.read_fms_file(path)])


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Return the results at `path` row by row. In a directory's rows, "" and None mean absent."""
    if path.is_dir():
        return _of_directory(path, keep=True)
    return (row for batch in batches(path) for row in batch.to_pylist())


def _of_directory(directory: Path, *, keep: bool) -> Iterator[dict[str, Any]]:
    cells = state.cell_directories(directory)
    if not cells:
        raise FormatError(f"{directory} holds no cells (exp_0, ...): `erg bench run` makes them")
    return (collect(cell, keep=keep) for cell in cells)


def collect(cell: Path, *, keep: bool = True) -> dict[str, Any]:
    """Return the row of a cell's directory; `keep`: cache it there, in row.json."""
    stamp = _stamp(cell)
    cached = read_json(cell / ROW)
    if cached.get("stamp") == stamp:
        row: dict[str, Any] = cached["row"]
        row["path"] = str(cell)  # it may have been moved
        return row
    row = _row(cell)
    if keep and row["status"] in tables.DONE:
        _keep(cell / ROW, {"stamp": stamp, "row": row})
    return row


def complete(cell: Path) -> None:
    """Add the training's final metrics, as FMS has them, to an ended cell's results.json.

    The file lists the names of the added metrics, so that they are not taken for printed ones.
    """
    row = collect(cell)
    raw = json.loads(row["raw"])
    figures = json.loads(row["training"] or "{}")
    ours = {name: value for name, value in figures.items() if raw.get(name) in (None, "")}
    if ours and row["status"] in tables.DONE:
        saved = saved_by_trainer(_object(cell, f"hf/{SAVED}", []))
        names = {_ADDED: ours.keys() - saved.keys(), _SAVED: ours.keys() & saved.keys()}
        added = {**raw, **ours, **{key: " ".join(sorted(names[key])) for key in names}}
        write_json(cell / RESULTS, {k: json_number(v) for k, v in sorted(added.items())}, indent=4)
        _keep(cell / ROW, {"stamp": _stamp(cell), "row": row})


# Increase this when the same files give a different row: cached rows are then made anew.
_MAKING = 9


@cache
def _checksum() -> int:
    """A checksum of the columns: rows are made anew when a plugin adds a metric."""
    return zlib.crc32(" ".join(tables.columns()).encode())


def _stamp(cell: Path) -> list[int]:
    """Version numbers, then when each file that a row is made of was written (0: no such file)."""
    stamp = [tables.VERSION, _MAKING, _checksum()]
    names = state.files_in(cell)
    for name in (*_INPUTS, *sorted(fnmatch.filter(names, _SMI_OF_NODES))):
        written_ns = 0
        with suppress(OSError):
            if name.partition("/")[0] in names:
                written_ns = (cell / name).stat().st_mtime_ns
        stamp.append(written_ns)
    return stamp


def _object(
    folder: Path, name: str, damaged: list[str], hook: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """The object in a JSON file; empty if it is absent, or damaged (noted in `damaged`)."""
    try:
        document = json.loads((folder / name).read_bytes(), object_hook=hook)
        if isinstance(document, dict):
            return document
        damaged.append(f"{name} holds no JSON object")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        damaged.append(f"{name} can't be read: {error}")
    return {}


def damaged_plan(directory: Path) -> list[str]:
    """What is wrong with the plan file of a results directory: one line, or an empty list."""
    damaged: list[str] = []
    _object(directory, state.PLAN, damaged, lambda _cell: {})  # no need to store thousands
    return damaged


def _row(cell: Path) -> dict[str, Any]:
    damaged: list[str] = []
    cell_json, status = (_object(cell, name, damaged) for name in (state.CELL, state.STATUS))
    if any(line.startswith(state.STATUS) for line in damaged):
        reason = f"{state.STATUS} is damaged, so the cell's outcome is unknown"
        status = {"status": "error", "reason": reason}
    results = _as_told(_object(cell, RESULTS, damaged))
    arguments = {name: results[name] for name in ARGUMENTS if name in results}
    settings = {**arguments, **(cell_json.get("settings") or {})}
    row = _identity(cell, cell_json, results, damaged) | _outcome(status, results)
    row |= {name: _text(settings.get(name)) for name in ARGUMENTS}
    row["framework_config"] = row["framework_config"] or "none"
    row["max_seq_length"] = row["max_seq_length"] or _text(settings.get("max_seq_len"))
    missing: dict[str, str] = {}
    devices = row["num_gpus"] * row["nodes"] if row["num_gpus"] else None
    row |= tables.trainer_figures(results, devices)
    saved = saved_by_trainer(_object(cell, f"hf/{SAVED}", damaged))
    row["runtime_s"] = row["runtime_s"] or saved.get(RUNTIME)
    row = _with_run(row, run_columns(cell / "run", missing, damaged, num_gpus=devices))
    totals = {**saved, **results}
    results = {n: totals[n] for n in totals if n in results or n not in TRAINER_NAMES}
    row |= of_trainer(results, missing)
    row |= of_smi(cell, row, missing, damaged) | {"damaged": "; ".join(damaged)}
    row |= {"settings": json.dumps(settings, sort_keys=True), "raw": json.dumps(results)}
    row["training"] = None
    loss = row.pop(MEAN_LOSS, row.get("loss"))
    if row["status"] == "ok":
        figures = trainer_totals(totals, cell / "run", ranks=devices, loss=loss)
        row["training"] = json.dumps(figures, sort_keys=True)
    return tables.with_headline_rate(row, missing) | {"path": str(cell)}


def _with_run(row: dict[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a row with the columns of its run, without mixing rates of two windows.

    Where the run has a rate of tokens, samples or steps, it replaces all of the Trainer's rates of
    that unit. The loss and the runtime stay the Trainer's, if it printed them.
    """
    printed = {name: row[name] for name in ("loss", "runtime_s") if row.get(name) is not None}
    if measured.get("rates_from"):
        of_run = {_rate_unit(name) for name in measured if name in RATES and name != "rates_from"}
        row = {n: v for n, v in row.items() if n not in RATES or _rate_unit(n) not in of_run}
        if "token" not in of_run and "rates_from" in row:  # it names the source of the tokens
            measured = {name: value for name, value in measured.items() if name != "rates_from"}
    stated = {f"{name}_{part}": None for name in printed for part in READING_PARTS}
    return {**row, **measured, **printed, **stated}


def _rate_unit(column: str) -> str:
    """What a rate column counts: "token", "sample" or "step"; else the column's own name."""
    if column == "padding_frac":
        return "token"
    return next((word for word in ("token", "sample", "step") if word in column), column)


def _identity(
    cell: Path, cell_json: Mapping[str, Any], results: Mapping[str, Any], damaged: list[str]
) -> dict[str, Any]:
    group = ""
    try:
        group = Cell.from_json(cell_json).group if cell_json else ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        damaged.append(f"{state.CELL} describes no cell: {type(error).__name__}: {error}")
    gpus = cell_json.get("num_gpus") or number(results.get("num_gpus"))
    return {
        "index": int(cell.name.removeprefix("exp_")),
        "id": cell_json.get("id") or "",
        "group": group,
        "scenario": cell_json.get("scenario") or "",
        "repeat": cell_json.get("repeat") or 1,
        "num_gpus": int(gpus) if gpus else None,
        "nodes": cell_json.get("nodes") or 1,
    }


def _outcome(status: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    attempts = status.get("attempts") or []
    claims = status.get("claims") or []
    word, reason = status.get("status"), status.get("reason") or ""
    if word is None:  # a directory of FMS's program, which writes no status
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
        return "error", "the output has no final metrics: the training did not finish"
    return "ok", ""


def _as_told(results: Mapping[str, Any]) -> dict[str, Any]:
    """The content of results.json without the metrics that `complete` added."""
    keys = (_ADDED, _SAVED)
    added = {*keys, *(name for key in keys for name in str(results.get(key, "")).split())}
    return {name: value for name, value in results.items() if name not in added}


def _text(value: object) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(value)


def _keep(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row to the cache. A failure is ignored: the directory may be read-only."""
    with suppress(OSError):
        write_text(path, json.dumps(row))


# Cells as entries of a comparison.

_USUAL = ("scenario", "num_gpus", "nodes", *ARGUMENTS)
# Not compared: where a cell ran, and max_seq_len, FMS's axis for the argument max_seq_length.
_NO_SETTINGS = ("output_dir", "results_csv", "process_port", "max_seq_len")
_RATES = {
    tables.FROM_RUN: "of the steps after the warm-up",
    tables.TRAINER: "of the whole training, as transformers printed them",
}
_TRACKED = ("_mem_cpu", "_mem_gpu")  # in the names of the Trainer's memory metrics
_SMI_SOURCES = (SMI, "reference")
_CONDITIONS = (
    "scenario",
    "device",
    "rates are",
    "the Trainer's memory tracker was",
    "nvidia-smi beside each cell was",
)
_FACTS_OF_WORK = {
    "model_name_or_path": "model",
    "max_seq_length": "seq_len",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "torch_dtype": "precision",
}
_FACTS = ("id", "scenario", "device", "path", "started", "rates_from", "tokens_counted")


class CellSource:
    """Reads bench results for a comparison: a results directory, one cell, or a file of results."""

    def recognises(self, path: Path) -> bool:
        """True for a bench directory, a cell, a Parquet file, or a CSV file of bench results."""
        if path.is_dir():
            cells = (path, *state.cell_directories(path))
            return (path / state.PLAN).is_file() or any(
                (cell / name).is_file() for cell in cells for name in (state.CELL, RESULTS)
            )
        if path.suffix == ".parquet":
            return True
        if path.suffix != ".csv" or not path.is_file() or is_ledger(path):
            return False
        return tables.is_ours(path) or tables.is_fms(path)

    def read(self, path: Path, wanted: Wanted) -> SourceEntries:  # noqa: ARG002  a row has all
        """Return an entry for each cell, failed ones included; skipped cells are left out."""
        if (path / state.CELL).is_file():
            return SourceEntries((entry_of(collect(path), argument=str(path)),))
        return SourceEntries(tuple(entries(rows(path), argument=str(path))))


def entries(rows: Iterable[dict[str, Any]], *, argument: str = "") -> Iterator[Entry]:
    """Yield an entry for each row whose cell was not skipped."""
    for row in rows:
        if row["status"] == "skipped":
            continue
        try:
            yield entry_of(row, argument=argument)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            where = f"{argument}: the row of cell {row['index']}"
            raise FormatError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def entry_of(row: dict[str, Any], *, argument: str = "") -> Entry:
    """The entry of one row of results."""
    if row["status"] is None:
        raise KeyError("status")
    facts = facts_of({name: row.get(name) for name in _FACTS})
    facts |= facts_of({ours: row.get(name) for name, ours in _FACTS_OF_WORK.items()})
    if row.get("rates_from") == tables.FROM_RUN:
        facts["window"] = row.get("window") or UNBROKEN
    path = row.get("path")
    run = Path(path, "run") if path else None
    run = run if run and run.is_dir() else None
    return Entry(
        path or argument,
        argument,
        facts,
        tables.RowReadings(row),
        run,
        kind="cell",
        status=row["status"],
        reason=row.get("reason") or "",
        broken=row.get("claims_broken") or "",
        settings=_settings(row.get("settings") or "{}", *(row.get(name) for name in _USUAL)),
        configuration_id=row.get("group") or "",
        conditions=_conditions(row),
        again=partial(_again, run, argument) if run else None,
    )


def _again(run: Path, argument: str) -> Entry:
    return entry_of(collect(run.parent, keep=False), argument=argument)


@lru_cache(maxsize=1 << 14)
def _settings(further: str, *usual: object) -> dict[str, Any]:
    """The settings of a cell's configuration; cached, because its repeats share them."""
    others = json.loads(further)
    names = (n for n in sorted(others) if n not in tables.columns() and n not in _NO_SETTINGS)
    settings = {n: None if v == "" else v for n, v in zip(_USUAL, usual, strict=True)}
    return settings | {name: others[name] for name in names}


def _conditions(row: Mapping[str, Any]) -> Mapping[str, str | None]:
    """How a cell was measured, by condition; None where a published file does not say it."""
    raw = row.get("raw") or "{}"
    is_tracked = any(part in raw for part in _TRACKED) and any(
        part in name for name in json.loads(raw) for part in _TRACKED
    )
    is_measured = bool(row.get("id"))
    smi = "on" if row.get("memory_nvidia_from") in _SMI_SOURCES else "off"
    return _shared_conditions(
        row.get("scenario") or None,
        row.get("device"),
        _RATES.get(row.get("rates_from") or ""),
        "on" if is_tracked else "off" if is_measured else None,
        smi if is_measured else None,
    )


@lru_cache(maxsize=256)
def _shared_conditions(*conditions: str | None) -> Mapping[str, str | None]:
    """The conditions by name, one object for all cells that were measured alike."""
    return MappingProxyType(dict(zip(_CONDITIONS, conditions, strict=True)))

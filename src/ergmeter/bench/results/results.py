"""What did the cells of a bench come to? A row for each, in one schema, from their directories.

The trap: figures that are gathered once, when a cell ends, by a program that knew too little. What
a cell left (its run, the Trainer's figures, the log of `nvidia-smi`) is kept, and the row is made
from that; a row that was made before is used again as long as nothing in the cell's directory is
newer, so that thousands of cells are read in seconds.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from ergmeter.bench.execute import nvidia_smi_logger
from ergmeter.bench.execute.judging import plain
from ergmeter.bench.execute.state import RESULTS, write_json
from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.results import references
from ergmeter.bench.results.memory import SAVED, saved_by_trainer
from ergmeter.bench.results.memory_columns import of_smi, of_trainer
from ergmeter.bench.results.run_columns import measured
from ergmeter.bench.results.schema import ARGUMENTS, DONE, RATES, VERSION
from ergmeter.bench.results.tables import batched, from_csv, from_parquet, is_ours, one_table, write
from ergmeter.bench.results.trainer_columns import chosen, fms_figures, number
from ergmeter.bench.results.trainer_totals import trained
from ergmeter.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa

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
    return from_csv(path) if is_ours(path) else iter([references.read(path)])


def _of_directory(directory: Path, *, keep: bool) -> Iterator[pa.Table]:
    cells = _cells(directory)
    if not cells:
        raise FormatError(
            f"{directory} holds no cells ({_PREFIX}0, ...): `erg bench run` makes them"
        )
    return batched(collect(cell, keep=keep) for cell in cells)


def collect(cell: Path, *, keep: bool = True) -> dict[str, Any]:
    """The row of one cell's directory, kept beside it for the next reader if that may write."""
    stamp = _stamp(cell)
    kept = _json(cell / ROW)
    if kept.get("stamp") == stamp:
        return {**kept["row"], "path": str(cell)}  # it may have been moved
    row = _row(cell)
    if keep and row["status"] in DONE:
        _keep(cell / ROW, {"stamp": stamp, "row": row})
    return row


def complete(cell: Path) -> None:
    """Add to an ended cell's results.json what FMS has there: the final figures of its training.

    Those that the program did not print are named in it, so that they are never taken for its own.
    """
    row = collect(cell)
    told = json.loads(row["raw"])
    figures = json.loads(row["training"] or "{}")
    ours = {name: value for name, value in figures.items() if told.get(name) in (None, "")}
    if ours and row["status"] in DONE:
        added = {**told, **ours, _ADDED: " ".join(sorted(ours))}
        write_json(cell / RESULTS, {k: plain(v) for k, v in sorted(added.items())}, indent=4)
        _keep(cell / ROW, {"stamp": _stamp(cell), "row": row})


def _cells(directory: Path) -> list[Path]:
    numbered = [
        (int(number), one)
        for one in (directory.iterdir() if directory.is_dir() else ())
        if (number := one.name.removeprefix(_PREFIX)) != one.name and number.isdigit()
    ]
    return [one for _, one in sorted(numbered)]


# Goes up when a row comes to be made otherwise of the same files: what is kept is then made anew.
_MAKING = 6


def _stamp(cell: Path) -> list[int]:
    """When what a row is made of was last written; the run's own files are written under run/."""
    found = [VERSION, _MAKING]
    for name in (*_INPUTS, *nvidia_smi_logger.of_nodes(cell)):
        try:
            found.append((cell / name).stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return found


def _row(cell: Path) -> dict[str, Any]:
    said, status = (_json(cell / f"{n}.json") for n in ("cell", "status"))
    results = _as_told(_json(cell / RESULTS))
    settings = {**_arguments(results), **dict(said.get("settings") or {})}
    row = _identity(cell, said, results) | _outcome(status, results)
    row |= {name: _text(settings.get(name)) for name in ARGUMENTS}
    row["framework_config"] = row["framework_config"] or "none"
    row["max_seq_length"] = row["max_seq_length"] or _text(settings.get("max_seq_len"))
    missing: dict[str, str] = {}
    devices = row["num_gpus"] * row["nodes"] if row["num_gpus"] else None
    row |= fms_figures(results, devices)
    row = _with_run(row, measured(cell / "run", missing, num_gpus=devices))
    results = {**saved_by_trainer(cell / "hf"), **results}
    row |= of_trainer(results, missing)
    row |= of_smi(cell, row, missing)
    row |= {"settings": json.dumps(settings, sort_keys=True), "raw": json.dumps(results)}
    row["training"] = None
    if row["status"] == "ok":
        figures = trained(results, cell / "run", ranks=devices, loss=row.get("loss"))
        row["training"] = json.dumps(figures, sort_keys=True)
    return chosen(row, missing) | {"path": str(cell)}


def _with_run(row: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of one window: the run's own where it has any, and then none of the Trainer's.

    Loss and time of the whole training stay the Trainer's, where it told them.
    """
    kept = {name: row[name] for name in ("loss", "runtime_s") if row.get(name) is not None}
    if found.get("rates_from"):
        of_run = {_counted(name) for name in found if name in RATES and name != "rates_from"}
        row = {n: v for n, v in row.items() if n not in RATES or _counted(n) not in of_run}
        if "token" not in of_run and "rates_from" in row:  # it says whose tokens these are
            found = {name: value for name, value in found.items() if name != "rates_from"}
    return {**row, **found, **kept}


def _counted(column: str) -> str:
    """What a rate counts: tokens are of one source, and so are samples and steps."""
    if column == "padding_frac":
        return "token"
    return next((one for one in ("token", "sample", "step") if one in column), column)


def _identity(cell: Path, said: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    group = ""
    if said:
        group = Cell.from_json(said).group
    gpus = said.get("num_gpus") or number(results.get("num_gpus"))
    return {
        "index": int(cell.name.removeprefix(_PREFIX)),
        "id": said.get("id") or "",
        "group": group,
        "scenario": said.get("scenario") or "",
        "repeat": said.get("repeat") or 1,
        "num_gpus": int(gpus) if gpus else None,
        "nodes": said.get("nodes") or 1,
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
        "claims_held": sum(bool(one.get("held")) for one in claims),
        "claims_broken": "; ".join(
            f"{one.get('name')}: {one.get('seen')}" for one in claims if not one.get("held")
        ),
    }


def _original_outcome(results: Mapping[str, Any]) -> tuple[str, str]:
    if not results:
        return "pending", ""
    if results.get("dry_run"):
        return "skipped", "a dry run"
    errors = results.get("error_messages")
    if errors:
        said = errors[-1] if isinstance(errors, list) else errors
        return "error", str(said).strip().splitlines()[-1]
    if number(results.get("train_runtime")) is None:
        return "error", "no figures were found in its output: it did not train to the end"
    return "ok", ""


def _as_told(results: Mapping[str, Any]) -> dict[str, Any]:
    """A results.json without what `complete` put into it."""
    added = {_ADDED, *str(results.get(_ADDED, "")).split()}
    return {name: value for name, value in results.items() if name not in added}


def _arguments(results: Mapping[str, Any]) -> dict[str, Any]:
    """What of a results.json is an argument: text that is in the schema under its name."""
    return {name: results[name] for name in ARGUMENTS if name in results}


def _text(value: object) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, list | tuple):
        return " ".join(str(one) for one in value)
    return str(value)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(path: Path, found: Mapping[str, Any]) -> None:
    """A reader may have no right to write there, and two may come at once."""
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        beside.write_text(json.dumps(found), encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)

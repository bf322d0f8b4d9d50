"""The CSV sink: updates, final rows, and SFT-Play's ledger."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import ledger_aliases
from ergmeter.records import Reading
from ergmeter.sinks.csv import CsvSink
from ergmeter.sinks.shared import appended_file
from tests.unit.sinks.updates import RUN, UPDATES, request, update, written

# The header that SFT-Play's own files have.
SFT_PLAY = (
    "model,dataset,backend,optimizer,batch_size,grad_accum,seq_len,steps,precision,seed,notes,"
    "wall_s,warmup_s,tokens_processed,tok_per_s,energy_J,avg_power_W,peak_power_W,J_per_token,"
    "E10k_J,vram_peak_MB,vram_avg_MB"
)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_ledger_has_sft_plays_columns_and_units(tmp_path: Path) -> None:
    path = tmp_path / "energy_results.csv"
    described = {"model": "llama-8b", "batch_size": 4, "notes": "lora_r=32", "host": "n1"}
    final = update(
        120,
        is_final=True,
        time__run_s=Reading(600.5, "s", "measured"),
        tokens__whole_run_total=Reading(5_000_000.0, "tokens", "measured"),
        memory__device_peak_bytes=Reading(24_500_000_000, "B", "measured"),
        energy__joules_per_10k_tokens=Reading(251.0, "J", "derived"),
    )
    sink = CsvSink(request(tmp_path, path=path, ledger=True, columns=described))
    written(sink, UPDATES[0], final)
    assert path.read_text().splitlines()[0] == SFT_PLAY + ",host"
    (row,) = rows(path)
    assert row == {
        **dict.fromkeys(SFT_PLAY.split(","), ""),
        "model": "llama-8b",
        "batch_size": "4",
        "notes": "lora_r=32",
        "host": "n1",
        "steps": "120",
        "wall_s": "600.5",
        "tokens_processed": "5000000",  # of the training, as wall_s; rates are of the window
        "tok_per_s": "12345.6789",
        "energy_J": "3141.5926",
        "avg_power_W": "310.25",
        "J_per_token": "0.0251",
        "E10k_J": "251",
        "vram_peak_MB": "24500",
    }


def test_every_measured_column_of_a_ledger_is_an_alias_of_the_catalogue() -> None:
    names = {alias.name for _, alias in ledger_aliases()}
    assert names == set(appended_file.LEDGER_MEASURED)


def test_what_is_measured_is_not_for_the_user_to_say(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has columns that are measured; remove: energy_J"):
        CsvSink(request(tmp_path, ledger=True, columns={"energy_J": 5, "model": "x"}))
    with pytest.raises(UsageError, match="has columns that are measured; remove: step"):
        CsvSink(request(tmp_path, columns={"step": 5}))


def test_rows_may_be_of_chosen_metrics_by_any_name_and_of_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    options = {"path": path, "metrics": "tok_per_s, mfu", "rows": "final", "columns": {"lr": 3e-4}}
    written(CsvSink(request(tmp_path, **options)), *UPDATES)
    assert path.read_text() == (
        "run,scope,step,wall_s,window,throughput.tokens_per_s,utilization.mfu_frac,lr\n"
        f"{RUN},run,30,1800000030.25,training,{12345.6789 * 0.9!r},{0.4123456789 * 0.9!r},0.0003\n"
    )


def test_a_word_that_is_not_one_of_the_choices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rows must be one of updates, final; got 'last'"):
        CsvSink(request(tmp_path, rows="last"))
    with pytest.raises(UsageError, match="ledger must be true or false; got 'maybe'"):
        CsvSink(request(tmp_path, ledger="maybe"))
    with pytest.raises(UsageError, match="omit metrics= or ledger="):
        CsvSink(request(tmp_path, ledger="true", metrics=["mfu"]))

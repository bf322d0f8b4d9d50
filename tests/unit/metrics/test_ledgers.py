"""Energy ledgers, ours and the original's: what a row is taken for, and which rows are not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ergmeter.compare.ledgers import is_ledger, read_ledger
from ergmeter.errors import FormatError
from ergmeter.records import Missing, Reading

DOCUMENTED = (
    "model,dataset,backend,optimizer,batch_size,grad_accum,seq_len,steps,precision,seed,notes,"
    "wall_s,warmup_s,tokens_processed,tok_per_s,energy_J,avg_power_W,peak_power_W,J_per_token,"
    "E10k_J,vram_peak_MB,vram_avg_MB"
)
# True rate 2 000 tokens/s and 0.1 J/token, 200 W throughout, as the original writes it down:
# 240 000 tokens over 60 s, 12 000 J over 240 000 tokens.
ORIGINAL = (
    "m,sft,bnb,paged_adamw_8bit,2,4,1024,100,fp16,42,lora_r=32_alpha=32,"
    "120.0,60.0,240000,4000.0,12000.0,200.0,220.0,0.05,500.0,10000.0,9000.0"
)
OURS = f"{DOCUMENTED},window_s,train_loss,eval_loss,mfu,energy_low_J,energy_high_J,status,tuning"
OUR_ROW = (
    "m,sft,bnb,AdamW,2,4,1024,100,bf16,42,lora_r=32_alpha=32,"
    "120,60,120000,2000,12000,200,220,0.1,1000,10000,9000,60,1.5,1.7,0.4,11400,12600,finished,lora"
)


def ledger(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "energy_results.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def reading(entry: object, key: str) -> Reading:
    found = entry.figures[key]  # type: ignore[attr-defined]
    assert isinstance(found, Reading), found
    return found


def test_our_row_is_taken_as_it_stands(tmp_path: Path) -> None:
    (entry,) = read_ledger(ledger(tmp_path, OURS, OUR_ROW), argument="x").entries
    assert entry.value("throughput.tokens_per_s") == 2000
    assert entry.value("memory.device_peak_bytes") == 10_000_000_000  # MB are what they say
    assert entry.value("training.loss") == 1.5
    assert entry.value("training.eval_loss") == 1.7
    assert entry.value("utilization.mfu_frac") == 0.4
    assert entry.value("steps.count") == 50  # half of the time, half of the steps
    joules = reading(entry, "energy.joules_per_token")
    assert [joules.low, joules.high] == pytest.approx([0.095, 0.105])
    assert entry.facts["lora_r"] == "32"
    assert not entry.remarks


def test_a_reading_keeps_its_interval_basis_and_note(tmp_path: Path) -> None:
    head = f"{OURS},tok_per_s_low,tok_per_s_high,tok_per_s_basis,tok_per_s_note,vram_peak_MB_low"
    row = f"{OUR_ROW},1990,2010,measured,real tokens,9990"
    (entry,) = read_ledger(ledger(tmp_path, head, row), argument="x").entries
    assert entry.figures["throughput.tokens_per_s"] == Reading(
        2000.0, "tokens/s", "measured", 1990.0, 2010.0, "real tokens"
    )
    assert reading(entry, "memory.device_peak_bytes").low == 9_990_000_000
    assert not [name for name in entry.facts if name.startswith(("tok_per_s", "vram"))]


def test_tokens_are_the_windows_or_the_trainings_by_the_columns_there_are(tmp_path: Path) -> None:
    """A ledger without `window_tokens` has the window's as `tokens_processed`."""
    (old,) = read_ledger(ledger(tmp_path, OURS, OUR_ROW), argument="x").entries
    assert (old.value("tokens.total"), old.value("tokens.whole_run_total")) == (120_000, None)
    head, row = (
        f"{OURS},window_tokens",
        f"{OUR_ROW},120000".replace(",120000,2000,", ",230000,2000,"),
    )
    (new,) = read_ledger(ledger(tmp_path, head, row), argument="x").entries
    assert (new.value("tokens.total"), new.value("tokens.whole_run_total")) == (120_000, 230_000)
    for key in ("throughput.tokens_per_s", "energy.joules_per_token"):
        assert old.value(key) == new.value(key)


def test_carbon_and_cost_are_read_with_their_currency(tmp_path: Path) -> None:
    head = f"{OURS},co2e_g,energy_cost,gpu_cost,currency,co2e_g_low,co2e_g_basis"
    (entry,) = read_ledger(
        ledger(tmp_path, head, f"{OUR_ROW},1.5,0.2,3,EUR,1.4,assumed"), argument="x"
    ).entries
    assert entry.figures["carbon.co2e_g"] == Reading(1.5, "g", "assumed", low=1.4)
    assert reading(entry, "cost.energy").unit == reading(entry, "cost.gpu_whole_run").unit == "EUR"


def test_a_row_of_the_original_gives_the_true_rate_and_a_range_of_energy(tmp_path: Path) -> None:
    (entry,) = read_ledger(ledger(tmp_path, DOCUMENTED, ORIGINAL), argument="x").entries
    assert entry.value("throughput.tokens_per_s") == 2000
    joules = reading(entry, "energy.joules_per_token")
    assert joules.value == pytest.approx(0.1)
    assert joules.basis == "assumed"
    # Nothing drawn in the warm-up; 220 W throughout it.
    assert [joules.low, joules.high] == pytest.approx([0.05, 25200 / 240000])
    assert entry.value("memory.device_peak_bytes") == 10_000 * 2**20  # its MB were MiB
    assert "a row of the original SFT-Play" in entry.remarks[0]


def test_the_original_without_steps(tmp_path: Path) -> None:
    names, cells = DOCUMENTED.split(","), ORIGINAL.split(",")
    at = names.index("steps")
    rows = [",".join(x[:at] + x[at + 1 :]) for x in (names, cells)]
    (entry,) = read_ledger(ledger(tmp_path, *rows), argument="x").entries
    assert entry.value("throughput.tokens_per_s") == 2000
    assert "steps" not in entry.facts


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"energy_J": "0.0", "J_per_token": "0.0"}, "0 J"),
        ({"wall_s": "50.0", "tok_per_s": str(240000 / 1e-9)}, "shorter than its warm-up"),
    ],
)
def test_the_originals_noughts_are_no_figures(
    tmp_path: Path, changed: dict[str, str], why: str
) -> None:
    cells = dict(zip(DOCUMENTED.split(","), ORIGINAL.split(","), strict=True)) | changed
    (entry,) = read_ledger(
        ledger(tmp_path, DOCUMENTED, ",".join(cells.values())), argument="x"
    ).entries
    found = entry.figures["energy.joules_per_token"]
    assert isinstance(found, Missing)
    assert why in found.reason
    assert (entry.value("throughput.tokens_per_s") or 0) < 1e4


def test_documented_columns_of_one_window_are_not_taken_for_the_originals(tmp_path: Path) -> None:
    """Our own table without further columns: 120 000 tokens in a window of 60 s of 121 s."""
    row = ",".join(OUR_ROW.split(",")[:22]).replace(",120,60,", ",121,60,")
    (entry,) = read_ledger(ledger(tmp_path, DOCUMENTED, row), argument="x").entries
    assert entry.value("throughput.tokens_per_s") == 2000
    assert entry.value("energy.joules_per_token") == 0.1
    assert not entry.remarks


def test_broken_rows_are_named_by_line_and_the_others_read(tmp_path: Path) -> None:
    lines = [
        OURS,
        OUR_ROW,
        OUR_ROW.replace(",42,", ",43,")[:60],
        OUR_ROW.replace(",42,", ",44,").replace(",2000,", ",fast,"),
        "",
        OUR_ROW.replace(",42,", ",45,").replace("m,sft", '"m,sft'),
        OUR_ROW.replace(",42,", ",46,"),
        OUR_ROW.replace(",42,", ",47,").replace("finished", "failed"),
        OUR_ROW,
        OURS,
    ]
    found = read_ledger(ledger(tmp_path, *lines), argument="x")
    assert [entry.facts["seed"] for entry in found.ended_well] == ["42", "46"]
    said = [line.partition("energy_results.csv ")[2] for line in found.unused]
    assert [line.split(":")[0] for line in said] == [f"line {n}" for n in (3, 4, 6, 9, 8)]
    assert "cells where the first line has 30" in said[0]
    assert "tok_per_s is not a number: 'fast'" in said[1]
    assert "quotation mark" in said[2]
    assert "the same row as line 2" in said[3]
    assert "did not finish (failed)" in said[4]


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = ledger(tmp_path, "a,b", "1,2")
    assert not is_ledger(path)
    with pytest.raises(FormatError, match="not an energy ledger: its first line has no column"):
        read_ledger(path, argument="x")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(FormatError, match=rf"^{tmp_path}/empty\.csv: the file is empty$"):
        read_ledger(tmp_path / "empty.csv", argument="x")


def test_of_a_long_table_just_the_first_line_is_looked_at(tmp_path: Path) -> None:
    """A terabyte by its size: whoever read it whole would have no memory left."""
    path = ledger(tmp_path, OURS, *[OUR_ROW] * 100)
    with path.open("r+b") as file:
        file.truncate(10**12)
    assert is_ledger(path)


def test_a_pipe_is_no_ledger_and_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "energy_results.csv"
    os.mkfifo(path)
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(is_ledger(path)), daemon=True)
    thread.start()
    thread.join(20.0)
    assert said == [False]

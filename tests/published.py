"""Published results, counted again: what their authors print against what we compute from it.

`python -m tests.published` writes the page docs/published.md; a test holds every row to it.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.graph.adapters import Lora
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import TrainedParts, step_work
from ergmeter.metrics.definitions.peaks import table_peak

DATA = Path(__file__).parent / "data"
# Sources that print enough digits to be held to a twentieth of a percentage point.
PRECISE = ("MosaicML", "PaLM", "nanoGPT")
PRECISE_PP = 0.05
RELATIVE = 0.005
# torchtitan gives a range over two rows, "33 % to 39 %", cut off rather than rounded.
_CUT_OFF = ("torchtitan",)
_PEAKS_APART = 0.0005


@dataclass(frozen=True)
class Compared:
    """One figure of one row: as printed, as counted by us, and how far apart they may be."""

    source: str
    url: str
    model: str
    seq_len: str
    device: str
    convention: str
    what: str  # MFU %, HFU % or TFLOP/s
    printed: float
    ours: float
    allowed: float
    flag: str

    @property
    def off(self) -> float:
        return self.ours - self.printed

    @property
    def agrees(self) -> bool:
        return abs(self.off) <= self.allowed


def rows() -> list[dict[str, str]]:
    with (DATA / "published_results.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def compared() -> list[Compared]:
    return [one for row in rows() for one in of(row)]


def of(row: dict[str, str]) -> list[Compared]:
    """The figures of one row."""
    return _figures(row, _models())


@cache
def _models() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(
        (DATA / "published_models.json").read_text("utf-8")
    )
    return found


def _figures(row: dict[str, str], models: dict[str, dict[str, object]]) -> list[Compared]:
    peak = table_peak(row["device"], row["dtype"]).flops_per_s if row["dtype"] else None
    tokens = row["tokens_per_s_per_device"]
    if not tokens:  # its TFLOP/s over the peak is all there is to check
        assert peak is not None
        ours = float(row["tflops_per_device"]) * 1e12 / peak * 100
        kind = "mfu_pct" if row["mfu_pct"] else "hfu_pct"
        return [_one(row, kind, ours, spread=0)]
    model, hardware = _per_token(row, models)
    speed = float(tokens)
    spread = _half_digit(tokens) / speed if re.fullmatch(r"[0-9]+", tokens) else 0.0
    found = []
    if row["mfu_pct"] and peak:
        found.append(_one(row, "mfu_pct", model * speed / peak * 100, spread=spread))
        if row["hfu_pct"]:
            found.append(_one(row, "hfu_pct", hardware * speed / peak * 100, spread=spread))
    elif row["tflops_per_device"]:
        found.append(_one(row, "tflops_per_device", model * speed / 1e12, spread=spread))
    return found


def _per_token(row: dict[str, str], models: dict[str, dict[str, object]]) -> tuple[float, float]:
    params = int(row["params"]) if row["params"] else None
    if not row["config"]:
        assert row["convention"] == "6nd"
        assert params
        return 6.0 * params, 6.0 * params
    graph = model_graph(ModelConfig(models[row["config"]], where=row["config"]))
    lora = Lora(16, ("q_proj", "v_proj")) if "lora" in row["convention"] else None
    work = step_work(
        graph,
        Batch.of(1, int(row["seq_len"])),
        training=TrainedParts(lora=lora, checkpointing=row["checkpointing"]),  # type: ignore[arg-type]
        chosen=row["convention"],
        params=params,
    )
    chosen = work.chosen
    tokens = chosen.tokens_per_step or 1
    return chosen.model_per_step / tokens, (chosen.hardware_per_step or 0) / tokens


def _one(row: dict[str, str], kind: str, ours: float, *, spread: float) -> Compared:
    printed = float(row[kind])
    if row["source"].startswith(PRECISE):
        allowed = PRECISE_PP if kind == "mfu_pct" else 2 * PRECISE_PP
    else:
        digit = _half_digit(row[kind]) * (2 if row["source"].startswith(_CUT_OFF) else 1)
        # A source that divides by 989.4 or 989 is not told from one that divides by 989.5.
        allowed = max(RELATIVE * printed, digit + (spread + _PEAKS_APART) * printed)
    names = {"mfu_pct": "MFU %", "hfu_pct": "HFU %", "tflops_per_device": "TFLOP/s"}
    return Compared(
        row["source"],
        row["url"],
        row["model"],
        row["seq_len"],
        row["device"],
        row["convention"],
        names[kind],
        printed,
        ours,
        allowed,
        row["flag"],
    )


def _half_digit(text: str) -> float:
    """Half of what the last digit of a printed number stands for; trailing zeros are no digits."""
    whole, _, decimals = text.partition(".")
    if decimals.strip("0"):
        return 0.5 * 10.0 ** -len(decimals)
    zeros = len(whole) - len(whole.rstrip("0"))
    return 0.5 * 10.0**zeros


def page() -> str:
    """The page docs/published.md."""
    found = compared()
    agree = sum(one.agrees for one in found)
    said = [
        "# Published results, counted again",
        "",
        "<!-- Made by `python -m tests.published`; do not edit. -->",
        "",
        "What others printed about their trainings, and what `erg mfu` makes of the tokens per",
        "second they printed beside it, under the convention each source used. A source is held to",
        "0.5 % or to the digits it prints, MosaicML, PaLM and nanoGPT to 0.05 percentage points.",
        "",
        f"{agree} of {len(found)} figures agree. Those that do not are flagged: there the source",
        "contradicts itself, or its formula has a known fault.",
        "",
        "| source | model | tokens | device | convention | figure | printed | ours | off | |",
        "| --- | --- | ---: | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        verdict = "agrees" if one.agrees else f"**{one.flag}**"
        unit = " pp" if "%" in one.what else ""
        said.append(
            f"| {_link(one)} | {one.model} | {one.seq_len} | {one.device or '-'}"
            f" | `{one.convention}` | {one.what} | {one.printed:g} | {one.ours:.2f}"
            f" | {one.off:+.2f}{unit} | {verdict} |"
        )
    return "\n".join(said) + "\n"


def _link(one: Compared) -> str:
    return f"[{one.source}]({one.url})" if one.url else one.source


if __name__ == "__main__":
    print(page(), end="")

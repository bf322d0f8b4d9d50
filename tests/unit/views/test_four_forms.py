"""The numbers of a command's tables and headlines are the same on a terminal, in Markdown, in HTML
and in JSON."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from ergmeter import doctor
from ergmeter.cli.main import main
from ergmeter.cli.options import Forms
from ergmeter.doctor import ProbeFinding
from ergmeter.records import Device
from ergmeter.views.calculate.machine import calibration_document, doctor_document
from ergmeter.views.document import (
    ChartGrid,
    ChartPart,
    Document,
    Frame,
    HeadlinePart,
    Medium,
    Paragraph,
    Part,
    Section,
    Table,
)
from ergmeter.views.render.html import html
from ergmeter.views.render.markdown import markdown
from ergmeter.views.render.terminal import show
from tests.golden.corpus import erg
from tests.golden.running import Case, Runner
from tests.golden.text import html_text
from tests.scripted_server import Script, serving
from tests.unit.hardware.test_calibration import calibration

ANALYSE = (
    "analyze --config neuron/llama3_8b_sft.yaml --model-config neuron/config.json"
    " --compile-dir neuron/cache --calculate-score"
)
LLAMA = "configs/llama-3.1-8b.json --seq-len 4096"
COMMANDS = {
    "explain": ("explain calibrated", "calibrated"),
    "explain without MFU": ("explain stalls", "stalls"),
    "explain nothing": ("explain empty", "empty"),
    "check": ("check plain ranks empty", "plain", "ranks", "empty"),
    "job": ("job pretrain --runs jobs", "jobs"),
    "flops": (f"flops {LLAMA} --batch-size 4 --checkpointing full", "configs"),
    "mfu": (f"mfu {LLAMA} --tokens-per-s 12000 --device h100-sxm", "configs"),
    "mfu decoding": (
        f"mfu {LLAMA} --tokens-per-s 2000 --phase decode --batch-size 16 --device h100-sxm",
        "configs",
    ),
    "estimate": (
        f"estimate {LLAMA} --batch-size 64 --device h100-sxm --num-devices 8 --zero 3"
        " --checkpointing full --tokens 1e9 --mfu 0.4 --price-per-hour 3",
        "configs",
    ),
    "estimate of serving": (f"estimate {LLAMA} --inference --device a100-pcie-40gb", "configs"),
    "hlo": ("hlo hlo", "hlo"),
    "hlo by op": ("hlo hlo --by op", "hlo"),
    "grid": ("grid france",),
    "grids": ("grid",),
    "peaks": ("peaks",),
    "conventions": ("conventions palm",),
    "metrics": ("metrics --md",),
    "list": ("list runs", "runs"),
    "compare": ("compare repeats --group-by backend --anyway --html p.html", "repeats"),
    "compare single runs": ("compare plain phases ranks", "plain", "phases", "ranks"),
    "compare a ledger": ("compare ledgers/first.csv", "ledgers"),
    "compare of analyses": (
        f"{ANALYSE} --throughput 2.1 --output a.json; {ANALYSE} --throughput 2.4 --output b.json;"
        " analyze --compare a.json b.json",
        "neuron",
    ),
    "gate": ("gate repeats/fast-1 repeats/base-1 --noise 1%", "repeats"),
    "gate of a bench": ("gate bench-new bench-ref --rule loss|+-1%", "bench-new", "bench-ref"),
    "gate of ledgers": ("gate ledgers/again.csv ledgers/first.csv", "ledgers"),
    "bench compare": ("bench compare bench-new bench-ref --noise 1%", "bench-new", "bench-ref"),
    "report of metrics": ("report plain --metric tok_per_s --metric AEC --metric mfu", "plain"),
    "bench plan": ("bench plan fms/own/template.yaml --cell-time 60", "fms"),
    "bench list": ("bench list bench-ref", "bench-ref"),
}
# Columns whose numbers the JSON does not have as numbers: shares and differences of those that it
# has, numbers in names and sentences.
LEFT_OUT = frozenset(
    {
        *("share", "of peak", "vs exact", "a token", "lasted"),
        *("metric", "module", "operator", "block", "is", "seen", "gain", "of", "over"),
        *("with", "limited by", "formula, a token", "began", "steps", "run", "GB on a device"),
        *("cell", "note", "made", "spread", "curve"),
    }
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("forms") / "work")


def document_of(runner: Runner, command: str, needs: tuple[str, ...]) -> Document:
    """The document that the last of some commands shows; `|` stands for a space in a word."""
    shown: list[Document] = []

    def catch(_: Forms, document: Document, **__: object) -> None:
        shown.append(document)

    with mock.patch.object(Forms, "show", catch):
        (case,) = erg("forms", command, needs=needs)
        runner.run(case)
    return shown[-1]


def forms_of(document: Document) -> dict[Medium, str]:
    """Everything that each form says, on one line."""
    out = io.StringIO()
    show(document, Console(file=out, width=400))
    plain = re.sub(r"\\(.)", r"\1", markdown(document).replace("<!-- -->", ""))
    page = html_text(html(document))
    return {"terminal": out.getvalue(), "markdown": plain, "html": page}


def words(text: str) -> list[str]:
    """The numbers in a text; a time in two units is one number of seconds.

    Bytes may have a blank before each three digits.
    """
    text = re.sub(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d.])", lambda m: m[0].replace(" ", ""), text)
    text = re.sub(r"(\d+) h (\d\d) min", lambda m: f"{int(m[1]) * 3600 + int(m[2]) * 60} s", text)
    text = re.sub(r"(\d+) min (\d\d) s", lambda m: f"{int(m[1]) * 60 + int(m[2])} s", text)
    found = re.findall(r"(?<![\w.-])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w-])", text)
    return [word.replace(",", "") for word in found]


def numbers(text: str) -> set[float]:
    return set(map(float, words(text)))


def tables(parts: tuple[Part, ...], medium: Medium) -> Iterator[Table]:
    """The tables that a medium shows, and lines to copy as tables."""
    for part in parts:
        if isinstance(part, Section):
            yield from tables(part.parts, medium) if medium in part.media else ()
        elif isinstance(part, ChartPart):
            yield part.table or part.chart.table or Table((), ())
        elif isinstance(part, ChartGrid) and medium == "html":
            yield from (chart.table for chart in part.charts if chart.table)
        elif isinstance(part, Frame):
            yield from tables(part.parts, medium) if medium != "html" else ()
        elif isinstance(part, Table):
            yield part
        elif isinstance(part, Paragraph) and part.is_to_copy:
            yield Table(("line",), ((part.text,),))


def cells(
    document: Document, medium: Medium, *, left_out: frozenset[str] = frozenset()
) -> Iterator[str]:
    for table in tables(document.parts, medium):
        plain = table.without("bar").without("links")
        for row in plain.rows:
            texts = zip(plain.head, row, strict=True)
            yield from (cell for head, cell in texts if head not in left_out)


def headlines(document: Document) -> Iterator[str]:
    for part in document.parts:
        if isinstance(part, HeadlinePart):
            yield f"{part.name} {part.text} {part.about}"


def leaves(value: Any, *, with_texts: bool = False) -> Iterator[float]:
    """Its numbers, and for ratios by how much they are above or below 1, as tables print them."""
    if isinstance(value, dict):
        if value.get("scale") == "ratio":
            ends = map(value.get, ("value", "low", "high"))
            yield from (end - 1.0 for end in ends if end is not None)
        yield from (leaf for v in value.values() for leaf in leaves(v, with_texts=with_texts))
    elif isinstance(value, list | tuple):
        yield from (leaf for v in value for leaf in leaves(v, with_texts=with_texts))
    elif isinstance(value, str) and with_texts:
        yield from numbers(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def is_in(word: str, values: set[float]) -> bool:
    """Whether a printed number is one of these, rounded, in percent or with an SI prefix."""
    number, decimals = abs(float(word)), len(word.partition(".")[2])
    most_off = 0.51 * 10.0**-decimals + 1e-9 * number
    scales = (1.0, 100.0, *(10.0**power for power in (-15, -12, -9, -6, -3, 3, 6)))
    return any(abs(abs(v) * scale - number) <= most_off for v in values for scale in scales)


def check(document: Document, *, in_json: bool = True, with_texts: bool = False) -> None:
    """`with_texts`: the JSON has some numbers in its texts."""
    for medium, text in forms_of(document).items():
        texts = [*cells(document, medium), *headlines(document)]
        printed = set(map(float, words(" | ".join(texts))))
        assert printed
        assert printed <= numbers(text), (medium, sorted(printed - numbers(text)))
    data = {1.0, *leaves(document.data, with_texts=with_texts)}  # 100 % is 1 of itself
    for cell in cells(document, "markdown", left_out=LEFT_OUT) if in_json else ():
        # The spread is half of an interval that the JSON has, which also has a list in its order.
        for word in words(re.sub(r"^\d+\. |\n±.*", "", cell, flags=re.DOTALL)):
            assert is_in(word, data), (word, cell)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_forms_of_a_command_have_the_same_numbers(name: str, runner: Runner) -> None:
    command, *needs = COMMANDS[name]
    document = document_of(runner, command, tuple(needs))
    # By op, the JSON has the counts of each file; facts of compared runs are texts, and the fields
    # of the others are sentences. A list of cells is printed in JSON as it is read.
    in_json = name not in ("hlo by op", "grid", "conventions", "bench plan", "bench list")
    check(
        document,
        in_json=in_json,
        with_texts=name.startswith(("compare", "gate", "metrics", "report")),
    )


@pytest.mark.parametrize("run", ["plain", "phases", "ranks", "calibrated", "served"])
def test_the_forms_of_a_report_have_the_same_numbers(runner: Runner, run: str) -> None:
    """The card on a terminal and in Markdown, the sections of the page, and JSON."""
    document = document_of(runner, f"report {run} --md --html p.html", (run,))
    check(document)
    frame = document.parts[0]
    assert isinstance(frame, Frame)
    printed = numbers(" | ".join(row[2] for row in next(tables((frame,), "terminal")).rows))
    assert len(printed) > 3
    assert printed <= numbers(html_text(html(document)))


def test_the_forms_of_every_metric_have_the_same_numbers(runner: Runner) -> None:
    document = document_of(runner, "report plain --all --json", ("plain",))
    check(document, with_texts=True)


def test_the_forms_of_memory_over_time_have_the_same_numbers(runner: Runner) -> None:
    document = document_of(runner, "report phases --memory --md", ("phases",))
    for text in forms_of(document).values():
        assert {64.9, 46, 40, 29, 33.5, 3.035} <= numbers(text)


@pytest.mark.parametrize("option", ["", " --memory"])
def test_the_forms_of_a_bench_report_have_the_same_numbers(runner: Runner, option: str) -> None:
    """JSON has the values of each cell, so the table is one without repeats."""
    command, needs = "bench report tables/fms.csv", ("tables",)
    printed = runner.run(Case("json", (("erg", *command.split(), "--json"),), needs))
    rows = json.loads(printed.partition("--- stdout\n")[2])
    document = document_of(runner, f"{command}{option} --html p.html", needs)
    assert not document.data  # a list of thousands of cells is printed as it is read
    check(replace(document, data=rows))
    if not option:
        # The heat maps of the page have the numbers of the table, and more.
        page = html(document)
        table = numbers(html_text(page[page.index('id="rows"') :]))
        maps = numbers(html_text(page[page.index('id="matrices"') : page.index('id="rows"')]))
        assert {4100.0, 37.75, 400.0} <= table & maps


def test_the_forms_of_a_calibration_have_the_same_numbers() -> None:
    steady = calibration()
    drifting = replace(steady, matmul={"fp8": replace(steady.matmul["bf16"], drift_frac=-0.07)})
    check(calibration_document([steady, drifting], ["measured in 40 s", "interrupted after 7 s"]))


def test_the_forms_of_a_load_have_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[Document] = []
    monkeypatch.setattr(Forms, "show", lambda _, document: shown.append(document))
    with serving(Script(tokens=6)) as server, pytest.raises(SystemExit):
        main(["load", server.url, "--model", "m", "--concurrency", "1,2", "--requests", "4"])
    (document,) = shown
    assert len(next(tables(document.parts, "terminal")).rows) == 2
    check(document)


def test_the_forms_of_the_doctor_have_the_same_devices() -> None:
    gpu = Device("GPU-0", "gpu", "NVIDIA H200", "nvml")
    findings = [
        ProbeFinding("nvml", True, devices=[gpu], reads={"GPU-0": ["power", "energy"]}),
        ProbeFinding("rapl", False, "no counter in 2 of 3 packages"),
    ]
    document = doctor_document(findings)
    for text in forms_of(document).values():
        for said in ("NVIDIA H200", "GPU-0", "reads power, energy", "in 2 of 3 packages"):
            assert said in " ".join(text.split())
        assert "energy can be measured: NVIDIA H200 (nvml)" in text
    assert document.data == doctor.document(findings)

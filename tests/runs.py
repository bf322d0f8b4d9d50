"""Makes run directories with known contents, through the real writer; and shows them."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ergmeter.metrics.summarize import evidence_of, summarize, summary_of
from ergmeter.records import Device, Mark, Missing, Reading, Reported, Sample, Step, Summary
from ergmeter.runlog.identity import run_header, writer_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.runlog.writer import Writer, create_run
from ergmeter.views.document import Document, Part
from ergmeter.views.render.html import html
from ergmeter.views.render.terminal import show
from ergmeter.views.run import card, long_card, report

GPU = Device("GPU-0", "gpu", "Test GPU", "nvml", {"power_field": "instant"})


def make_run(path: Path, name: str = "test") -> Path:
    return create_run(path, run_header(name, ["train.py"]))


def add_writer(
    run: Path,
    *,
    steps: Iterable[Step] = (),
    samples: Iterable[Sample] = (),
    devices: Sequence[Device] = (),
    marks: Iterable[Mark] = (),
    reported: Sequence[Reported] = (),
    settings: dict[str, Any] | None = None,
    unavailable: dict[str, str] | None = None,
    stream: str = "",
    header: dict[str, Any] | None = None,
    closed: bool = True,
) -> Path:
    """One writer's share of a run. Its clock starts at 0 unless the header says otherwise."""
    source = "recorder" if stream else "meter"
    whole = {
        **writer_header(source),
        "clock": {"monotonic_ns": 0, "wall_ns": 1_800_000_000 * 10**9},
        "settings": settings or {},
        "unavailable": unavailable or {},
        **(header or {}),
    }
    writer = Writer(run, header=whole, devices=devices)
    writer.write("steps", list(steps), stream=stream)
    by_probe: dict[str, list[Sample]] = {}
    probes = {device.id: device.probe for device in devices}
    for sample in samples:
        by_probe.setdefault(probes.get(sample.device, "other"), []).append(sample)
    for probe, rows in by_probe.items():
        writer.write("samples", rows, stream=probe)
    writer.write("reported", reported)
    for mark in marks:
        writer.mark(mark)
    if closed:
        writer.mark(Mark(time.monotonic_ns(), "closed"))
        writer.close()
    return writer.directory


def run_of(path: Path, **contents: Any) -> Run:
    """A run with one writer, opened."""
    run = make_run(path)
    add_writer(run, **contents)
    return Run.open(run)


def even_steps(
    count: int, *, seconds: float = 1.0, gap_s: float = 0.0, **fields: Any
) -> list[Step]:
    """Steps of one length one after the other, from time 0 on the writer's clock."""
    period_ns, length_ns = round((seconds + gap_s) * 1e9), round(seconds * 1e9)
    return [Step(i * period_ns, i * period_ns + length_ns, index=i, **fields) for i in range(count)]


def reading(run: Run, key: str, **settings: Any) -> Reading:
    found = summarize(run, Settings(**settings)).readings[key]
    assert isinstance(found, Reading), found
    return found


def reason(run: Run, key: str, **settings: Any) -> str:
    found = summarize(run, Settings(**settings)).readings[key]
    assert isinstance(found, Missing), found
    return found.reason


# Every step that was recorded: which are warm-up depends on how busy a machine is.
ALL_STEPS = Settings(window="unbroken")


def report_page(run: Run) -> str:
    """The HTML report."""
    evidence = evidence_of(run)
    summary = summary_of(evidence)
    sections = report.page_sections(evidence, summary)
    return html(card.document([(evidence, summary)], sections=sections))


def printed(*parts: Part, width: int = 80) -> str:
    """Parts of a document on a terminal of so many columns."""
    out = io.StringIO()
    show(Document("", parts), Console(file=out, width=width))
    return out.getvalue()


def printed_card(run: Run, summary: Summary | None = None, *, width: int = 80) -> str:
    return printed(long_card.long_card(evidence_of(run), summary or summarize(run)), width=width)

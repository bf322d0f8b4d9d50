"""Whatever a run, a device or an alert is called: nothing of it steers the terminal."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ergmeter.metrics.live.frame import RunWatcher
from ergmeter.records import Device, Mark, Sample
from ergmeter.views.run import watch
from tests.runs import add_writer, even_steps, make_run

S = 10**9
EVIL = "x\x1b]0;y\x07\x1b[2J\nz"


def test_no_text_of_a_run_steers_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", EVIL)
    gpu = Device("GPU-0", "gpu", EVIL, "nvml")
    add_writer(
        run,
        steps=even_steps(20, tokens_computed=10),
        samples=[Sample(k * S, gpu.id, power_w=1.0) for k in range(20)],
        devices=[gpu],
        marks=[Mark(5 * S, "alert", f"loss: {EVIL}"), Mark(20 * S, "ended", EVIL)],
    )
    with closing(RunWatcher(run)) as watching:
        frame = watching.look(totals=True)
    frame = replace(frame, unjudged={"memory": EVIL})
    assert frame.alerts
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(watch.page(frame, columns=120))
    said = [out.getvalue(), watch.line(frame), watch.alert_line(frame, 0)]
    assert not [one for one in said if "\x1b" in one or "\x07" in one]
    assert "x ]0;y [2J z" in said[0]
    assert "x ]0;y [2J z" in said[2]


def test_a_reason_is_cut_between_its_clauses_and_in_no_parenthesis() -> None:
    said = "no power: no sensor (nvml: no driver (x); amd: none); a GPU would provide it"
    assert watch._clauses(said, 30) == "no power: no sensor"
    assert watch._clauses(said, 60) == "no power: no sensor (nvml: no driver (x); amd: none)"
    assert watch._clauses(said, 90) == said

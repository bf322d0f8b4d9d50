"""The page of a live run: it fits every width, says what is missing, and shows no half number."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from ergmeter.cli.look.watch import _as_lines, _Looks, new_alerts
from ergmeter.metrics.live.alert_rules import NotedAlert
from ergmeter.metrics.live.frame import LiveFrame, RunWatcher
from ergmeter.records import Device, Sample, Step
from ergmeter.units import sparkline
from ergmeter.views.run import watch
from tests.runs import add_writer, even_steps, make_run

S = 10**9
Erg = Callable[..., tuple[int, str, str]]
GPUS = [
    Device(f"GPU-{i}", "gpu", "NVIDIA H200", "nvml", {"power_field": "instant"}) for i in range(8)
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "runs" / "one", "a-training-with-a-rather-long-name-of-its-own")
    steps = [
        Step(
            i * S, (i + 1) * S, index=i, tokens_computed=123_456, loss=math.nan if i == 90 else 2.5
        )
        for i in range(100)
    ]
    samples = [
        Sample(k * S // 2, gpu.id, power_w=650.0, memory_bytes=70 * 10**9, temperature_c=61.0,
               throttled=0x20 if 40 <= k < 60 else 4)
        for k in range(204)
        for gpu in GPUS
    ]  # fmt: skip
    # Before the files of the test are written, as it is with a real run.
    clock = {"monotonic_ns": 0, "wall_ns": 1_700_000_000 * S}
    header = {"total_steps": 1000, "clock": clock}
    add_writer(path, steps=steps, samples=samples, devices=GPUS, header=header)
    return path


def frame_of(run: Path) -> LiveFrame:
    with closing(RunWatcher(run)) as watching:
        return watching.look(totals=True)


def printed(frame: LiveFrame, columns: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=columns, color_system=None)
    console.print(watch.page(frame, columns=columns))
    return out.getvalue()


@pytest.mark.parametrize("columns", [60, 72, 80, 84, 100, 132, 200])
def test_the_page_fits_and_its_figures_are_whole(run: Path, columns: int) -> None:
    text = printed(frame_of(run), columns)
    assert max(cell_len(line) for line in text.splitlines()) <= columns
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows["tokens/s"].count("123,456 tokens/s") == 2
    assert "5,200 W" in text or "5200 W" in text  # 8 x 650 W, all boards
    assert len(re.findall(r"\d NVIDIA H200 +650 W +70 GB +61 °C", text)) == 8
    assert ("measured" in rows["tokens/s"]) is (columns >= 72)
    assert "…" not in text
    assert "a-training-with-a-rather-long-name-of-its-own" in text
    curve = re.search("[▁▂▃▄▅▆▇█]+", rows["power"])
    assert curve is not None
    assert len(curve[0]) >= 10


def test_it_says_how_far_it_is_and_what_happened(run: Path) -> None:
    text = printed(frame_of(run), 100)
    assert "step 100 of 1,000" in text
    assert "! loss nan: loss nan at step 90" in text
    assert "3 earlier alerts" in text  # of 8 boards that are held down and one loss, 6 are shown
    assert "no MFU: the FLOPs of a step are unknown" in text


def test_what_is_not_judged_says_why(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(5, tokens_computed=1))
    text = " ".join(printed(frame_of(path), 80).split())
    assert "no alert (loss nan, grad_norm nan, throttled, tokens_per_s < -20%, memory +10%," in text
    assert "throttled (no device reports why it is throttled)" in text


def test_a_line_for_a_file_has_the_same_figures(run: Path) -> None:
    line = watch.line(frame_of(run))
    assert re.match(r"\d\d:\d\d:\d\d step 100 of 1,000 \| 123,456 tokens/s \| step time 1 s", line)
    assert "memory 70 GB" in line
    assert "heat 61 °C" in line
    assert "\n" not in line


def test_a_sparkline_goes_from_its_least_to_its_most() -> None:
    assert sparkline((0.0, 1.0, 2.0, 7.0), 10) == "▁▂▃█"
    assert sparkline((3.0, 3.0), 10) == "▁▁"
    assert sparkline((1.0,), 10) == ""
    assert len(sparkline(tuple(map(float, range(1000))), 40)) == 40
    assert sparkline((0.0, math.nan, 1.0), 10) == "▁█"


def test_watch_once_shows_an_old_run_by_its_path_or_the_directory(erg: Erg, run: Path) -> None:
    code, by_path, _ = erg("watch", "--once", run)
    assert code == 0
    code, by_directory, _ = erg("watch", "--once", run.parent)
    assert (code, by_directory) == (0, by_path)
    assert "finished" in by_path


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--alert", "los nan"), 2, "did you mean 'loss nan'"),
        (("--budget", "2 kwh"), 2, "did you mean kWh?"),
        (("--budget", "much"), 2, "give an amount as '2 kWh'"),
    ],
)
def test_a_rule_that_is_none_is_one_line(
    erg: Erg, run: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, _, err = erg("watch", "--once", run, *arguments)
    assert found == code
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_budget_is_judged_of_an_old_run(erg: Erg, run: Path) -> None:
    # 8 boards of 650 W: 1.444 Wh a second.
    _, out, _ = erg("watch", "--once", run, "--budget", "100 Wh", "--budget", "30 s")
    assert "energy > 100 Wh: 100 Wh used" in out
    assert "time > 30 s: 30 s used" in out


def test_a_run_that_is_not_there_is_one_line(erg: Erg, tmp_path: Path) -> None:
    code, _, err = erg("watch", tmp_path / "nowhere")
    assert code == 1
    assert "does not exist" in err or "is gone" in err


def test_where_the_output_is_no_terminal_there_are_lines_and_then_the_card(
    erg: Erg, run: Path
) -> None:
    code, out, _ = erg("watch", run)
    assert code == 0
    lines = out.splitlines()
    assert "alert: throttled: GPU-0 is throttled by heat" in lines[0]
    assert any(" step 100 of 1,000 | 123,456 tokens/s | " in line for line in lines)
    assert f"erg explain {run}" in out


def test_each_alert_is_one_line_also_one_that_comes_late(run: Path) -> None:
    frame = frame_of(run)
    early, late = (
        NotedAlert(5 * S, "loss nan: early", True),
        NotedAlert(9 * S, "throttled: late", False),
    )
    assert new_alerts(replace(frame, alerts=(late,)), []) == [0]
    # One from before comes in between, and the run itself tells of what was seen here.
    told = replace(late, was_told=True)
    assert new_alerts(replace(frame, alerts=(early, told)), [late]) == [0]
    assert new_alerts(replace(frame, alerts=(early, told)), [late, early]) == []


def test_a_page_of_a_run_that_hangs_says_since_when(run: Path) -> None:
    frame = replace(frame_of(run), status="running", quiet_s=725.0, eta_s=30.0)
    assert "no ETA: last step 12 min 05 s ago" in printed(frame, 120)
    assert "no ETA: last step 12 min 05 s ago" in watch.line(frame)
    assert "so far: as of" not in printed(frame, 120)
    old = replace(frame, so_far_ns=frame.newest_ns - 90 * S)
    assert "so far: as of 90 s ago" in printed(old, 80)


def test_a_reason_ends_where_a_clause_does(run: Path) -> None:
    why = "no MFU: the FLOPs of a step are unknown"
    narrow, wide = (printed(frame_of(run), columns).splitlines() for columns in (60, 200))
    assert why in narrow
    assert any(line.startswith(f"{why}: erg record") for line in wide)


def test_a_long_device_name_goes_on_in_the_next_line(tmp_path: Path) -> None:
    name = "A rather long name of an accelerator with 141 GB of memory, which tells what it does"
    gpu = Device("GPU-0", "gpu", name, "nvml")
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(5), samples=[Sample(S, gpu.id, power_w=1.0)], devices=[gpu])
    text = printed(frame_of(path), 60)
    assert f"0 {name}" in " ".join(text.replace("1 W", "").split())
    assert "1 W" in text


def test_of_several_trainings_the_page_says_which_it_shows(erg: Erg, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for one in ("A", "B"):
        training = {"id": one, "world": 1, "model": f"Model{one}"}
        add_writer(path, steps=even_steps(5), header={"training": training})
    for number in (1, 2):
        code, out, _ = erg("watch", "--once", "--training", number, path)
        assert code == 0
        assert f"training {number} of 2 (--training)" in out
    code, _, err = erg("watch", "--once", "--training", 3, path)
    assert code == 2
    assert "no training 3" in err


def test_a_run_that_took_the_place_of_another_is_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = frame_of(run)
    assert "replaced" not in printed(frame, 60)
    another = replace(frame, replaced=1)
    told = "replaced: another run was recorded here, and is shown"
    assert printed(another, 60).splitlines()[1:3].count(told) == 1
    looks = iter([replace(frame, status="running"), another])

    class Looks(_Looks):
        def frame(self) -> LiveFrame:
            return next(looks)

    with closing(RunWatcher(run)) as watching:
        _as_lines(Console(), Looks(watching), 0.0)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(told)
    # The alerts of the one before have their lines, and those of the other its own.
    assert [line for line in lines[:at] if "alert: " in line] == [
        line for line in lines[at:] if "alert: " in line
    ]
    assert lines[:at].count(watch.line(another)) == 0
    assert lines[-1] == watch.line(another)

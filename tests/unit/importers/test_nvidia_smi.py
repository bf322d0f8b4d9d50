"""Logs of nvidia-smi, in the form that it writes them: what the run then says of the devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.errors import FormatError
from ergmeter.importers.importing import ImportedRun, ImportRequest, import_log
from ergmeter.importers.nvidia_smi import NvidiaSmiImporter, Row
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading, Result, Sample
from ergmeter.runlog.reader import Run

Erg = Callable[..., tuple[int, str, str]]
MIB = 2**20
HEADER = (
    "timestamp, name, index, uuid, power.draw [W], memory.used [MiB], memory.total [MiB],"
    " utilization.gpu [%], temperature.gpu, clocks.current.sm [MHz],"
    " clocks_throttle_reasons.active, fan.speed [%]"
)
A, B = "GPU-0a1b2c3d-aaaa-bbbb-cccc-000000000001", "GPU-0a1b2c3d-aaaa-bbbb-cccc-000000000002"


def stamp(second: float) -> str:
    minute, rest = divmod(second, 60)
    return f"2026/11/15 10:{int(minute):02d}:{rest:06.3f}"


def row(second: float, index: int, watts: str, *, used: int = 1000, busy: int = 50) -> str:
    return (
        f"{stamp(second)}, NVIDIA H100 80GB HBM3, {index}, {(A, B)[index]}, {watts}, {used} MiB,"
        f" 81559 MiB, {busy} %, 41, 1980 MHz, 0x0000000000000004, 12 %"
    )


def log_of(tmp_path: Path, *lines: str, ending: str = "\n") -> Path:
    path = tmp_path / "gpus.csv"
    path.write_text("\n".join(lines) + ending)
    return path


def imported(tmp_path: Path, *lines: str, ending: str = "\n") -> tuple[ImportedRun, ...]:
    log = log_of(tmp_path, *lines, ending=ending)
    found = import_log(ImportRequest(log, tmp_path / "run"))
    assert found.choice.importer.name == "nvidia_smi"
    return found.runs


def readings(run: ImportedRun) -> dict[str, Result]:
    opened = Run.open(run.path)
    assert opened.damage == []
    return dict(summarize(opened).readings)


def reading(run: ImportedRun, key: str) -> Reading:
    found = readings(run)[key]
    assert isinstance(found, Reading), found
    return found


def test_two_devices_drew_what_their_power_comes_to_over_time(tmp_path: Path) -> None:
    lines = [HEADER]
    for second in range(11):
        lines += [row(second, 0, f"{100 + 20 * second}.00 W", used=1000 + second, busy=20)]
        lines += [row(second + 0.002, 1, "300.00 W", used=500, busy=80)]
    (run,) = imported(tmp_path, *lines)
    assert (run.readings, run.steps) == (22, 0)
    energy = reading(run, "energy.run_j")
    # A ramp from 100 W to 300 W over 10 s, and 300 W beside it from 2 ms later on to 2 ms more.
    assert energy.value == pytest.approx(2000 + 0.002 * 300 + 3000 + 0.002 * 300, abs=0.01)
    assert (energy.basis, energy.unit) == ("derived", "J")
    assert "power draw (on recent chips an average of about a second), integrated" in energy.note
    assert "2 x NVIDIA H100 80GB HBM3" in energy.note
    # A draw that is an average of a second may be as much too early or too late at both ends.
    assert energy.low is not None
    assert energy.high is not None
    assert energy.low < energy.value - 400 < energy.value + 400 < energy.high
    assert reading(run, "time.run_s").value == pytest.approx(10.002)
    assert reading(run, "memory.device_peak_bytes").value == 1010 * MIB
    opened = Run.open(run.path)
    assert set(opened.devices) == {A, B}
    assert opened.devices[A].facts["memory_total_bytes"] == 81559 * MIB
    columns = ("busy_frac", "clock_hz", "temperature_c", "throttled")
    samples = {column: opened.series(column) for column in columns}
    assert set(samples["busy_frac"][A].values) == {0.2}
    assert set(samples["busy_frac"][B].values) == {0.8}
    assert set(samples["clock_hz"][A].values) == {1.98e9}
    assert set(samples["temperature_c"][A].values) == {41}
    assert set(samples["throttled"][A].values) == {4}


def test_instant_power_goes_before_an_average_and_is_surer_at_the_ends(tmp_path: Path) -> None:
    header = "timestamp, uuid, power.draw [W], power.draw.instant [W]"
    lines = [f"{stamp(n / 5)}, {A}, 90.00 W, 100.00 W" for n in range(51)]
    (run,) = imported(tmp_path, header, *lines)
    energy = reading(run, "energy.run_j")
    assert energy.value == pytest.approx(1000)
    assert [energy.low, energy.high] == pytest.approx([980, 1020])
    assert "instant power, integrated" in energy.note


def test_units_may_be_left_out(tmp_path: Path) -> None:
    header = "timestamp, index, power.draw [W], memory.used [MiB], utilization.gpu [%]"
    lines = [f"{stamp(n)}, 0, 200.50, 1234, 75" for n in range(6)]
    (run,) = imported(tmp_path, header, *lines)
    # The last reading may be cut within its number, so it is left out.
    assert run.readings == 5
    assert reading(run, "energy.run_j").value == pytest.approx(4 * 200.5)
    assert reading(run, "memory.device_peak_bytes").value == 1234 * MIB
    assert set(Run.open(run.path).devices) == {"GPU 0"}


@pytest.mark.parametrize(
    "cut",
    [
        "",
        "2026/11/15 10:0",
        row(5.002, 1, "300.00 W")[:-6],
        row(5.002, 1, "300.00 W")[:-1],
    ],
)
def test_a_last_reading_that_was_cut_counts_for_no_device(tmp_path: Path, cut: str) -> None:
    """Otherwise the energy of one ends before the run does, and is absent."""
    lines = [HEADER]
    for second in range(5):
        lines += [row(second, 0, "100.00 W"), row(second + 0.002, 1, "300.00 W")]
    lines.append(row(5, 0, "100.00 W"))
    (run,) = imported(tmp_path, *lines, *([cut] if cut else []), ending="")
    assert run.readings == 10
    assert reading(run, "energy.run_j").value == pytest.approx(4 * 400, abs=1)


def test_a_header_that_comes_again_and_messages_between_are_no_readings(tmp_path: Path) -> None:
    lines = [
        "Warning: persistence mode is disabled on device 0.",
        *(line for n in range(4) for line in (HEADER, row(n, 0, "100.00 W"), "")),
    ]
    (run,) = imported(tmp_path, *lines)
    assert run.readings == 4
    assert reading(run, "energy.run_j").value == pytest.approx(300)


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A"])
def test_what_a_device_does_not_say_is_absent_and_not_0(tmp_path: Path, word: str) -> None:
    (run,) = imported(tmp_path, HEADER, *(row(n, 0, word, busy=90) for n in range(4)))
    found = readings(run)
    energy = found["energy.run_j"]
    assert isinstance(energy, Missing)
    assert "no power reading" in energy.reason
    assert reading(run, "memory.device_peak_bytes").value == 1000 * MIB


def test_without_a_column_of_power_the_reason_says_what_to_log(tmp_path: Path) -> None:
    lines = [f"{stamp(n)}, NVIDIA A100-SXM4-80GB, 0, {n} MiB" for n in range(4)]
    (run,) = imported(tmp_path, "timestamp, name, index, memory.used [MiB]", *lines)
    energy = readings(run)["energy.run_j"]
    assert isinstance(energy, Missing)
    assert "--query-gpu=timestamp,index,power.draw" in energy.reason


def test_readings_that_are_too_far_apart_are_not_joined(tmp_path: Path) -> None:
    (run,) = imported(tmp_path, HEADER, *(row(5 * n, 0, "100.00 W") for n in range(4)))
    energy = readings(run)["energy.run_j"]
    assert isinstance(energy, Missing)
    assert "no power reading for 5.0 s (limit 2 s)" in energy.reason


def test_a_clock_that_falls_back_begins_another_run(tmp_path: Path) -> None:
    """As local time does in autumn."""
    lines = [row(n, 0, "100.00 W") for n in range(1800, 1805)]
    lines += [row(n, 0, "200.00 W") for n in range(3)]
    first, second = imported(tmp_path, HEADER, *lines)
    assert second.began == "timestamps fall back"
    assert reading(first, "energy.run_j").value == pytest.approx(400)
    assert reading(second, "energy.run_j").value == pytest.approx(400)


@pytest.mark.parametrize("columns", ["timestamp, ", "timestamp, name, "])
def test_a_log_that_names_no_device_is_refused_unless_it_is_said_to_be_of_one(
    erg: Erg, tmp_path: Path, columns: str
) -> None:
    """However its times lie: two devices that are read by turns lie as evenly as one."""
    name = "NVIDIA A100-SXM4-80GB, " if "name" in columns else ""
    lines = [f"{stamp(n / 2)}, {name}{(100, 300)[n % 2]}.00 W" for n in range(41)]
    log = log_of(tmp_path, f"{columns}power.draw [W]", *lines)
    code, _, said = erg("import", str(log), "--out", str(tmp_path / "run"))
    assert code == 1
    assert said.count("\n") == 1
    assert "(uuid, index, pci.bus_id, serial)" in said
    assert "--one-device" in said
    assert not (tmp_path / "run").exists()
    code, _, said = erg("import", str(log), "--one-device", "--out", str(tmp_path / "run"))
    assert (code, said) == (0, "")
    run = Run.open(tmp_path / "run")
    energy = summarize(run).readings["energy.run_j"]
    assert isinstance(energy, Reading)
    assert energy.value == pytest.approx(20 * 200)
    assert any(m.detail.endswith("of one device (--one-device)") for m in run.marks)


def test_a_serial_number_tells_devices_apart(tmp_path: Path) -> None:
    lines = [f"{stamp(n)}, {s}, {w} W" for n in range(5) for s, w in ((165, 100), (166, 300))]
    (run,) = imported(tmp_path, "timestamp, serial, power.draw [W]", *lines)
    assert reading(run, "energy.run_j").value == pytest.approx(4 * 400)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("0x8000000000000000", None),
        ("0xffffffffffffffffff", None),
        ("0x0020000000000001", None),
        ("0x001fffffffffffff", 2**53 - 1),
    ],
)
def test_a_mask_of_more_bits_than_a_column_has_is_no_reading(
    tmp_path: Path, mask: str, seen: int | None
) -> None:
    lines = [row(n, 0, "100.00 W").replace("0x0000000000000004", mask) for n in range(4)]
    (run,) = imported(tmp_path, HEADER, *lines)
    found = Run.open(run.path).series("throttled")
    assert [set(one.values) for one in found.values()] == ([] if seen is None else [{seen}])
    assert reading(run, "energy.run_j").value == pytest.approx(300)


@pytest.mark.parametrize("digits", [20, 400])
def test_a_number_past_all_bounds_is_no_reading(tmp_path: Path, digits: int) -> None:
    damaged = row(2, 0, f"{'9' * digits} W").replace(" 1000 MiB", f" {'9' * digits} MiB")
    lines = [row(n, 0, "100.00 W") for n in (0, 1, 3, 4)]
    (run,) = imported(tmp_path, HEADER, *lines[:2], damaged, *lines[2:])
    assert reading(run, "memory.device_peak_bytes").value == 1000 * MIB
    assert reading(run, "energy.run_j").value == pytest.approx(400)


def test_an_import_that_fails_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the whole ones before the one that it failed in."""
    read = NvidiaSmiImporter._sample

    def failing(self: NvidiaSmiImporter, device: str, of: Row) -> Sample | None:
        if of.cells["timestamp"] == stamp(2):
            raise OSError("no more")
        return read(self, device, of)

    monkeypatch.setattr(NvidiaSmiImporter, "_sample", failing)
    lines = [row(n, 0, "100.00 W") for n in (30, 31, 0, 1, 2)]
    with pytest.raises(OSError, match="no more"):
        imported(tmp_path, HEADER, *lines)
    assert [path.name for path in tmp_path.iterdir()] == ["gpus.csv"]


@pytest.mark.parametrize(
    "header",
    [
        "timestamp, index, power.draw [W], encoder.stats.sessionCount",
        "timestamp, index, power.draw [W], encoder.stats.sessionCount,",
        '"timestamp","index","power.draw [W]","encoder.stats.sessionCount"',
        "timestamp, index, power.draw [W], My Column",
    ],
)
@pytest.mark.parametrize(
    "form", ["{}, 0, 100.00 W, 3", "{}, 0, 100.00 W, 3,", '"{}","0","100.00 W","3"']
)
def test_titles_of_any_kind_commas_at_the_end_and_quotation_marks(
    tmp_path: Path, header: str, form: str
) -> None:
    (run,) = imported(tmp_path, header, *(form.format(stamp(n)) for n in range(6)))
    assert reading(run, "energy.run_j").value == pytest.approx(400)
    assert set(Run.open(run.path).devices) == {"GPU 0"}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "of 1 line, none a reading"),
        ([f"{stamp(n)}, 0, 100,50 W" for n in range(3)], "line 2 has 4 cells, its header 3"),
        (["15 Nov, 0, 100 W"] * 3, "the time '15 Nov' can't be read"),
        ([f"{stamp(0)}, 0, 100"], "the last may be cut"),
        ([f"{stamp(0)}, [N/A], 1 W", f"{stamp(1)}, [N/A], 1 W"], "line 2 has index '[N/A]'"),
    ],
)
def test_of_a_log_without_a_reading_it_is_said_why(
    tmp_path: Path, lines: list[str], why: str
) -> None:
    with pytest.raises(FormatError) as caught:
        imported(tmp_path, "timestamp, index, power.draw [W]", *lines)
    assert why in str(caught.value)
    assert "no step" not in str(caught.value)


@pytest.mark.parametrize("form", ["{}, 0, 100.00 W", "{}, 0, 100.00", "{}, 0, 5 %, 3"])
def test_without_a_header_the_message_is_of_the_header(tmp_path: Path, form: str) -> None:
    with pytest.raises(FormatError, match="without their header: log with --format=csv"):
        imported(tmp_path, *(form.format(stamp(n)) for n in range(4)))


def test_a_gpu_that_is_lost_is_no_further_device(tmp_path: Path) -> None:
    header = "timestamp, index, uuid, power.draw [W]"
    lines = [f"{stamp(n)}, {i}, {(A, B)[i]}, 100.00 W" for n in range(3) for i in (0, 1)]
    for n in (3, 4, 5):
        lines += [f"{stamp(n)}, 0, {A}, 100.00 W"]
        lines += [f"{stamp(n)}, , [GPU is lost], [GPU is lost]"]
    (run,) = imported(tmp_path, header, *lines)
    opened = Run.open(run.path)
    assert set(opened.devices) == {A, B}
    said = [mark.detail for mark in opened.marks if mark.name == "rows_dropped"]
    assert said == ["3 of 13 lines are no readings: line 9 has uuid '[GPU is lost]'"]
    assert isinstance(readings(run)["energy.run_j"], Missing)


def test_a_table_without_times_between_the_readings_is_left_out(tmp_path: Path) -> None:
    asked = ["index, name", "0, NVIDIA H100 80GB HBM3"]
    lines = [row(n, 0, "100.00 W") for n in range(4)]
    (run,) = imported(tmp_path, HEADER, *lines[:2], *asked, HEADER, *lines[2:])
    assert reading(run, "energy.run_j").value == pytest.approx(300)


def test_a_log_without_times_is_refused(tmp_path: Path) -> None:
    log = log_of(tmp_path, "index, power.draw [W]", "0, 100.00 W", "0, 100.00 W")
    with pytest.raises(FormatError, match="--query-gpu=timestamp"):
        import_log(ImportRequest(log, tmp_path / "run"))


@pytest.mark.parametrize(
    "text",
    [
        "step=3 loss=2.1 memory.used=4",
        "timestamp, name",
        "power.draw",
        "gpu, memory.used [MiB], Step",
        "clocks.throttled is, well, high",
    ],
)
def test_other_lines_are_not_taken_for_a_header(text: str) -> None:
    assert NvidiaSmiImporter().recognises([text]) == (text == "power.draw")


def test_the_command_says_what_it_made_and_the_report_which_devices(
    erg: Erg, tmp_path: Path
) -> None:
    log = log_of(tmp_path, HEADER, *(row(n, 0, "100.00 W") for n in range(6)))
    code, said, _ = erg("import", str(log), "--out", str(tmp_path / "run"))
    assert code == 0
    assert f"{tmp_path / 'run'}: 6 readings of devices" in said
    code, said, _ = erg("report", str(tmp_path / "run"), "--long")
    assert code == 0
    assert "1 x NVIDIA H100 80GB HBM3 on an unknown host" in said
    assert "500 J" in said


def test_the_report_says_why_there_is_no_energy(erg: Erg, tmp_path: Path) -> None:
    imported(tmp_path, HEADER, *(row(5 * n, 0, "100.00 W") for n in range(4)))
    code, said, _ = erg("report", str(tmp_path / "run"), "--long")
    assert code == 0
    assert "no power reading for 5.0 s (limit 2 s)" in said

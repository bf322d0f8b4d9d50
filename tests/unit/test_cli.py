"""The commands that read: report, list, export, metrics; and how misuse is answered."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest

from ergmeter.cli.main import main
from ergmeter.records import Device, Mark, Reading, Reported, Sample
from ergmeter.runlog.settings import Settings
from ergmeter.views import documents
from tests.runs import GPU, add_writer, even_steps, make_run

S = 10**9
WITHOUT_PANDAS = """
import sys
class NoPandas:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoPandas())
from ergmeter.cli.main import main
main()
"""
Answer = tuple[int, str, str]
Erg = Callable[..., Answer]


@pytest.fixture
def erg(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Erg:
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twenty steps of a second with 100 tokens each, on a GPU that draws 250 W."""
    path = make_run(tmp_path / "runs" / "one", name="one")
    steps = even_steps(20, tokens_computed=100, samples=2, loss=1.5)
    samples = [
        Sample(t * S // 10, GPU.id, power_w=250.0, energy_j=25.0 * t + 900, memory_bytes=2 * 10**9)
        for t in range(-10, 211)
    ]
    add_writer(
        path,
        steps=steps,
        samples=samples,
        devices=[GPU],
        marks=[Mark(S, "hello", "there")],
        reported=[Reported(S, "mfu", 0.3, "frac")],
        unavailable={"rapl": "no powercap"},
    )
    return path


def test_report_json_has_the_documented_shape(erg: Erg, run: Path) -> None:
    code, out, _ = erg("report", run, "--json")
    assert code == 0
    whole = json.loads(out)
    rate = whole["readings"]["throughput.tokens_per_s"]
    assert set(rate) == {"value", "unit", "basis", "low", "high", "note", "impossible"}
    assert (rate["value"], rate["unit"], rate["basis"]) == (
        pytest.approx(100),
        "tokens/s",
        "measured",
    )
    assert set(whole["readings"]["energy.cpu_j"]) == {"missing"}
    assert "no powercap" in whole["readings"]["energy.cpu_j"]["missing"]
    assert whole["devices"]["GPU-0"]["readings"]["energy.mean_w"]["value"] == pytest.approx(250)
    assert whole["status"] == "finished"


def test_the_card_shows_the_figures_with_their_basis(erg: Erg, run: Path) -> None:
    code, out, _ = erg("report", run, "--long")
    assert code == 0
    for shown in ("100 tokens/s", "1 s", "2.5 J/token", "250 W", "2 GB", "measured", "finished"):
        assert shown in out


def test_the_card_says_why_something_is_not_there(erg: Erg, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(10, tokens_computed=1), unavailable={"nvml": "no driver"})
    _, out, _ = erg("report", path)
    card = " ".join(out.replace("│", " ").split())
    assert card.count("J/token, energy no energy sensor; a GPU with its driver") == 1
    assert "(see `erg doctor`)" in card
    assert "no driver" not in card
    _, out, _ = erg("report", path, "--metric", "J_per_token", "--metric", "energy.run_j")
    assert out.splitlines()[0].startswith("J_per_token - (no energy sensor (nvml: no driver); a ")
    assert out.splitlines()[1] == "energy.run_j - (as J_per_token)"


def test_report_all_lists_every_metric_of_the_catalogue(erg: Erg, run: Path) -> None:
    _, out, _ = erg("report", run, "--all")
    assert "carbon.co2e_g" in out
    assert "no grid intensity was given" in out


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("tok_per_s", "tok_per_s 100 tokens/s"),
        ("AEC", "AEC 250 W"),
        ("AMU", "AMU 2 GB"),
        ("vram_peak_MB", "vram_peak_MB 2000 MB"),
        ("E10k_J", "E10k_J 25000 J"),
        ("J_per_token", "J_per_token 2.5 J/token"),
        ("TT", "TT - (the number of parameters was not declared"),
    ],
)
def test_a_metric_by_its_old_name_in_its_old_unit(
    erg: Erg, run: Path, name: str, line: str
) -> None:
    code, out, _ = erg("report", run, "--metric", name)
    assert code == 0
    assert out.startswith(line)


def test_settings_given_to_report_take_the_place_of_the_runs(erg: Erg, run: Path) -> None:
    _, out, _ = erg("report", run, "--metric", "steps.count", "--warmup-steps", "5")
    assert out.startswith("steps.count 15 steps")
    _, out, _ = erg(
        "report", run, "--metric", "carbon.co2e_g", "--grid-g-per-kwh", "360",
        "--grid-source", "the grid's page", "--pue", "1.5",
    )  # fmt: skip
    assert out.startswith("carbon.co2e_g 0.75 g")  # 5000 J x 360 / 3.6e6 x 1.5
    assert "the grid's page" in out


def test_report_json_shows_the_settings_in_force(erg: Erg, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    steps = even_steps(10, tokens_computed=1)
    add_writer(path, steps=steps, settings={"warmup_steps": 2, "parameters": 7})
    _, out, _ = erg("report", path, "--json")
    assert json.loads(out)["settings"] == {"warmup_steps": 2, "parameters": 7}
    _, out, _ = erg("report", path, "--json", "--warmup-s", "3", "--pue", "1.5")
    assert json.loads(out)["settings"] == {"warmup_s": 3.0, "parameters": 7, "pue": 1.5}


def test_report_json_of_named_metrics_holds_just_those(erg: Erg, run: Path) -> None:
    code, out, _ = erg("report", run, "--json", "--metric", "AMU", "--metric", "energy.cpu_j")
    assert code == 0
    whole = json.loads(out)
    assert set(whole) == {"readings"}
    assert list(whole["readings"]) == ["memory.device_mean_bytes", "energy.cpu_j"]
    memory = whole["readings"]["memory.device_mean_bytes"]
    assert (memory["value"], memory["unit"]) == (pytest.approx(2e9), "B")
    assert "no powercap" in whole["readings"]["energy.cpu_j"]["missing"]


def test_report_markdown_of_named_metrics_holds_just_those(erg: Erg, run: Path) -> None:
    _, lines, _ = erg("report", run, "--metric", "AMU", "--metric", "energy.cpu_j")
    _, out, _ = erg("report", run, "--md", "--metric", "AMU", "--metric", "energy.cpu_j")
    title, _, body = out.partition("\n\n")
    assert title == f"## {run.name}: AMU, energy.cpu_j"
    assert body == f"```text\n{lines}```\n"


def test_a_value_that_is_not_finite_is_missing_with_that_reason() -> None:
    for value, word in ((math.nan, "nan"), (math.inf, "inf")):
        found = documents.result(Reading(value, "s", "measured"))
        assert found == {"missing": f"the value is not finite ({word})"}
    half = documents.result(Reading(1.0, "s", "measured", low=0.5, high=math.inf))
    assert (half["value"], half["low"], half["high"]) == (1.0, 0.5, None)


def test_report_without_a_run_takes_the_newest(
    erg: Erg, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    code, out, _ = erg("report")
    assert code == 0
    assert "one" in out


def test_a_damaged_file_is_one_line_and_exit_code_1_and_the_rest_is_shown(
    erg: Erg, run: Path
) -> None:
    (writer,) = (p for p in run.iterdir() if p.is_dir())
    (writer / "samples-nvml-00000.arrows").write_bytes(b"nonsense" * 100)
    code, out, err = erg("report", run)
    assert code == 1
    assert re.search(r"tokens/s +100 ", out)
    assert err.startswith("erg: damaged, left out: ")
    assert "samples-nvml-00000.arrows" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("report",),
        ("report", "--json"),
        ("report", "--memory"),
        ("explain",),
        ("explain", "--json"),
        ("plot", "--kind", "steps", "-o", "steps.svg"),
        ("card",),
    ],
)
def test_every_command_about_one_run_tells_of_damage_takes_the_newest_and_one_training(
    erg: Erg, run: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert erg(*arguments)[0] == 0
    code, _, err = erg(*arguments, "--training", 7)
    assert (code, "7" in err) == (2, True), err
    (file,) = run.rglob("samples-nvml-00000.arrows")
    file.write_bytes(b"nonsense" * 100)
    code, _, err = erg(*arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("erg: damaged, left out: ")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("recrod", "--", "true"), 2, "did you mean `erg record`"),
        (("compare-runs",), 2, "no command 'compare-runs'"),
        (("report", "/nowhere"), 1, "/nowhere does not exist"),
        (("report", "--metric"), 2, "--metric"),
        (("record",), 2, "COMMAND"),
        (("record", "--pue", "0.5", "--", "true"), 2, "0.5"),
        (("record", "--warmup-steps", "1", "--warmup-s", "2", "--", "true"), 2, "not several"),
        (("record", "--probe", "nvmll", "--", "true"), 2, "did you mean 'nvml'?"),
        (("record", "--probe", "zzz", "--", "true"), 2, "no probe 'zzz' (there are: allocator,"),
        (("record", "--", "no-such-program"), 2, "no such command"),
        (("metrics", "throughput.tokens_per_sec"), 2, "did you mean"),
        (("metrics", "nosuch"), 2, "`erg metrics` lists them all"),
        (("list", "/nowhere"), 1, "no directory /nowhere"),
    ],
)
def test_misuse_is_one_clear_line_and_no_traceback(
    erg: Erg,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = erg(*arguments)
    assert answer[0] == code
    assert said in answer[2]
    assert answer[2].startswith("erg: ")
    assert answer[2].count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_erg_alone_is_a_question_and_the_answer_is_the_help(erg: Erg) -> None:
    code, out, err = erg()
    assert (code, err) == (0, "")
    assert out == erg("--help")[1]
    assert out.startswith("Usage: erg ")


def test_every_setting_but_the_note_is_an_option(erg: Erg) -> None:
    shown = erg("report", "--help-all")[1]
    for field in dataclasses.fields(Settings):
        option = field.name.removesuffix("_flops_per_s").replace("_", "-")
        assert (f"--{option} " in shown) is (field.name != "note")


def test_a_directory_of_runs_is_not_a_run_and_says_what_it_holds(erg: Erg, run: Path) -> None:
    code, _, err = erg("report", run.parent)
    assert code == 1
    assert "holds 1 run" in err


def test_list_shows_the_runs_and_goes_on_after_a_broken_one(erg: Erg, run: Path) -> None:
    broken = run.parent / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    code, out, err = erg("list", run.parent)
    assert code == 1
    head, row = out.splitlines()
    assert head.split()[-5:] == ["tokens/s", "step", "MFU", "J/token", "lasted"]
    assert row.split()[3:9] == ["finished", "100", "1", "s", "-", "2.5"]
    assert "broken" in err
    _, out, _ = erg("list", run.parent, "--json")
    (listed,) = json.loads(out)
    assert listed["readings"]["energy.joules_per_token"]["value"] == pytest.approx(2.5)


def test_a_failed_run_takes_one_line_of_a_list_in_80_columns(
    erg: Erg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = datetime.now().astimezone().date().isoformat()
    path = make_run(tmp_path / "runs" / f"{today}-train-7f3a")
    ended = [Mark(S, "ended", "failed (exit code 2)")]
    add_writer(path, steps=even_steps(20, tokens_computed=12_345), marks=ended)
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = erg("list", path.parent)
    row = out.splitlines()[1]
    assert len(out.splitlines()) == 2
    assert "failed (2)" in row
    assert "12,345" in row
    _, out, _ = erg("list", path.parent, "--json")
    assert json.loads(out)[0]["status"] == "failed (exit code 2)"


def test_where_a_list_has_no_room_columns_go_on_below_and_no_figure_is_cut(
    erg: Erg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of 24 letters; how long it lasted takes 4 to 10."""
    path = make_run(tmp_path / "runs" / "2026-01-01-training-7f3a")
    add_writer(path, steps=even_steps(20, seconds=25.0, tokens_computed=12_345))
    shown = {}
    for columns in ("100", "80", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        _, shown[columns], _ = erg("list", path.parent)
    assert len(shown["100"].splitlines()) == 2
    first, _, second = shown["60"].partition("\n\n")
    assert "493.8" in first
    assert "lasted" in second
    assert "2026-01-01-training-7f3a" in second
    assert set(shown["60"].split()) == set(shown["100"].split())
    assert all(len(line.rstrip()) <= 60 for line in shown["60"].splitlines())


def test_list_goes_on_after_a_run_that_makes_no_sense(erg: Erg, run: Path) -> None:
    odd = make_run(run.parent / "odd")
    add_writer(odd, steps=even_steps(5, tokens_computed=1), settings={"pue": 0.5})
    code, out, err = erg("list", run.parent)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["one"]
    (said,) = err.splitlines()
    assert said.startswith(f"erg: {odd}: pue must be")


def test_export_as_csv_parquet_and_json_holds_what_was_written(
    erg: Erg, run: Path, tmp_path: Path
) -> None:
    for form in ("csv", "parquet", "json"):
        code, out, _ = erg("export", run, "--format", form, "--out", tmp_path / form)
        assert code == 0
        assert all(Path(line).exists() for line in out.split())
    with (tmp_path / "csv" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert rows[3]["tokens_computed"] == "100"
    assert rows[0]["time"].startswith("2027-01-15 08:00:00")  # the writer's clock pair
    samples = pd.read_parquet(tmp_path / "parquet" / "samples.parquet")
    assert len(samples) == 221
    assert samples["power_w"].tolist() == [250.0] * 221
    whole = json.loads((tmp_path / "json" / "export.json").read_text())
    assert whole["marks"][0]["name"] == "hello"
    assert whole["reported"][0]["value"] == 0.3
    assert whole["summary"]["readings"]["tokens.total"]["value"] == 2000


def test_json_is_exported_where_there_is_no_pandas(run: Path, tmp_path: Path) -> None:
    # pyarrow asks pandas for a time of nanoseconds; ergmeter alone does not bring it.
    program = tmp_path / "without_pandas.py"
    program.write_text(WITHOUT_PANDAS)
    arguments = ["export", str(run), "--format", "json", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = json.loads((tmp_path / "out" / "export.json").read_text())
    assert whole["steps"][0]["time"].startswith("2027-01-15 08:00:00")


def test_exported_json_is_json_whatever_was_recorded(erg: Erg, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gpu = Device("GPU-0", "gpu", "Test GPU", "nvml", {"power_limit_w": math.inf, "of": [math.nan]})
    add_writer(
        path,
        steps=even_steps(5, tokens_computed=1, loss=math.nan),
        samples=[Sample(t * S, gpu.id, power_w=-math.inf, busy_frac=0.5) for t in range(6)],
        devices=[gpu],
        reported=[Reported(S, "mfu", math.nan, "frac")],
    )

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    erg("export", path, "--format", "json", "--out", tmp_path / "out")
    text = (tmp_path / "out" / "export.json").read_text()
    whole = json.loads(text, parse_constant=refuse)
    assert [step["loss"] for step in whole["steps"]] == [None] * 5
    samples = [sample for sample in whole["samples"] if sample["device"] == gpu.id]
    assert {(sample["power_w"], sample["busy_frac"]) for sample in samples} == {(None, 0.5)}
    assert whole["reported"][0]["value"] is None
    _, out, _ = erg("report", path, "--json")
    facts = json.loads(out, parse_constant=refuse)["devices"]["GPU-0"]["facts"]
    assert facts == {"power_limit_w": None, "of": [None]}


def test_export_does_not_overwrite_unless_told_to(erg: Erg, run: Path, tmp_path: Path) -> None:
    erg("export", run, "--format", "csv", "--out", tmp_path / "out")
    code, _, err = erg("export", run, "--format", "csv", "--out", tmp_path / "out")
    assert code == 2
    assert "--force" in err
    assert erg("export", run, "--format", "csv", "--out", tmp_path / "out", "--force")[0] == 0


def test_metrics_explains_by_key_and_by_old_name(erg: Erg) -> None:
    _, out, _ = erg("metrics", "AEC")
    assert out.startswith("energy.mean_w")
    assert "EfficientLLM calls it AEC" in out
    _, out, _ = erg("metrics")
    assert "throughput.tokens_per_s" in out


def test_devices_of_other_kinds_are_no_accelerators(erg: Erg, tmp_path: Path) -> None:
    node = Device("node:h", "node", "h", "node", {"disk_total_bytes": 10**12})
    samples = [
        Sample(t * S, node.id, disk_free_bytes=10**9, disk_read_bytes=t * 10**6, busy_frac=0.25)
        for t in range(-1, 12)
    ]
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(10, tokens_computed=1), samples=samples, devices=[node])
    _, out, _ = erg("report", path, "--json")
    whole = json.loads(out)
    assert whole["readings"]["utilization.node_cpu_frac"]["value"] == pytest.approx(0.25)
    assert whole["readings"]["traffic.disk_read_bytes_per_s"]["value"] == pytest.approx(1e6)
    assert any("nearly full: 1.00 GB of 1000 GB" in note for note in whole["notes"])


@pytest.mark.parametrize(
    "command",
    [
        *(f"{name} none" for name in ("report", "card", "compare", "list", "serve", "hlo")),
        *(
            "bench report none",
            "bench compare none none2",
            "bench plan none.yaml",
            "import none.log",
        ),
        *("mfu none.json", "train --config none.yaml", "prepare --config none.yaml"),
        "analyze --config none.yaml --model-config none.json",
        "analyze --compare none.json none2.json",
    ],
)
def test_an_absent_file_is_a_failure_in_every_command(
    erg: Erg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = erg(*command.split())
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "none" in err

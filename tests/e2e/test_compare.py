"""`erg compare` as it is typed: ledgers and runs in; a table, JSON, CSV and Markdown out."""

from __future__ import annotations

import csv
import io
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from ergmeter.cli.main import main
from ergmeter.records import Flops, Mark, Sample, Step
from tests.runs import GPU, add_writer, even_steps, make_run

ROOT = Path(__file__).parents[2]
S = 10**9
COLUMNS = (
    "model,dataset,backend,optimizer,batch_size,grad_accum,seq_len,steps,precision,seed,notes,"
    "wall_s,warmup_s,tokens_processed,tok_per_s,energy_J,avg_power_W,peak_power_W,J_per_token,"
    "E10k_J,vram_peak_MB,vram_avg_MB,window_s,train_loss,eval_loss,status"
)
# Rates of three seeds; the ratios are 1.30, 1.31 and 1.32.
RATES = {"bnb": (1000.0, 1010.0, 990.0), "unsloth": (1300.0, 1323.1, 1306.8)}
Answer = tuple[int, str, str]
Erg = Callable[..., Answer]


@pytest.fixture
def erg(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Erg:
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def row(backend: str, seed: int, rate: float, *, seq_len: int = 1024) -> str:
    optimizer = "PagedAdamW8bit" if backend == "bnb" else "AdamW"
    tokens, joules = rate * 40, 40 * 300.0
    return (
        f"m,sft,{backend},{optimizer},4,2,{seq_len},200,bf16,{seed},lora_r=32_alpha=32,60,15,"
        f"{tokens},{rate},{joules},300,320,{joules / tokens},{1e4 * joules / tokens},20000,19000,"
        f"40,2.1,2.2,finished"
    )


def written(path: Path, *, seq_len: int = 1024) -> Path:
    rows = [
        row(backend, seed, rates[seed], seq_len=seq_len if backend == "unsloth" else 1024)
        for seed in range(3)
        for backend, rates in RATES.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return written(tmp_path / "energy_results.csv")


def test_the_table_fits_80_columns_and_says_who_is_faster(erg: Erg, ledger: Path) -> None:
    code, out, _ = erg("compare", ledger, "--group-by", "backend")
    assert code == 0
    # Logs of the ratios: mean 0.27001, standard deviation 0.00763; 4.3027 x 0.00763 / sqrt(3) is
    # 0.01896, so exp(0.25104) = 1.285 to exp(0.28897) = 1.335.
    assert "unsloth 1.31x faster, 95 % interval 1.29 to 1.34" in out
    assert "could explain it: optimizer (PagedAdamW8bit / AdamW)" in out
    assert "the same peak memory in every run" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_json_has_every_repeat_and_how_it_was_done(erg: Erg, ledger: Path) -> None:
    code, out, _ = erg("compare", ledger, "--json")
    assert code == 0
    whole = json.loads(out)
    assert (whole["group_by"], whole["baseline"]) == (["backend"], "bnb")
    key = "throughput.tokens_per_s"
    rates = [one["readings"][key]["value"] for one in whole["groups"][1]["runs"]]
    assert rates == list(RATES["unsloth"])
    (verdict,) = [one for one in whole["pairs"][0]["verdicts"] if one["metric"] == key]
    contrast = verdict["contrast"]
    assert contrast["value"] == pytest.approx((1.30 * 1.31 * 1.32) ** (1 / 3))
    assert contrast["low"] < contrast["value"] < contrast["high"]
    assert (contrast["method"], contrast["confidence"]) == ("paired t-interval", 0.95)
    assert contrast["freedom"] == 2


def test_csv_and_markdown(erg: Erg, ledger: Path) -> None:
    _, out, _ = erg("compare", ledger, "--format", "csv")
    rows = {one["metric"]: one for one in csv.DictReader(io.StringIO(out))}
    assert rows["throughput.tokens_per_s"]["state"] == "better"
    assert float(rows["memory.device_peak_bytes"]["value"]) == 1.0
    _, out, _ = erg("compare", ledger, "--format", "md")
    assert out.startswith(
        "## Comparison: bnb, unsloth, 6 runs in 2 groups by backend, each compared with bnb;"
        " intervals of 95 %\n\n### Verdicts\n\n"
        "#### unsloth against bnb (3 and 3 runs, paired t-interval)\n\n"
    )
    assert "- **better**: unsloth 1.31x faster" in out
    assert "\n| backend | runs | tokens/s | J/token | memory | loss | eval loss |\n" in out
    assert "| unsloth | speed | 1.310 (1.285 to 1.335) | 3 and 3 | paired t-interval |" in out
    assert "| optimizer | PagedAdamW8bit | AdamW |" in out
    assert out.count("1,323 tokens/s") + out.count("1323 tokens/s") == 1  # each run has its row
    assert erg("compare", ledger, "--md") == (0, out, "")


def test_a_name_is_no_markup(erg: Erg, tmp_path: Path) -> None:
    name = "*a*|<b>_c_![d](https://e.f) @g"
    rows = [row("bnb", 0, 1000.0), row(name, 0, 900.0)]
    (tmp_path / "energy_results.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    code, out, _ = erg("compare", tmp_path / "energy_results.csv", "--format", "md")
    assert code == 0
    inert = r"\*a\*\|&lt;b&gt;\_c\_\!\[d\](https:<!-- -->//e.f) @<!-- -->g"
    assert f"\n#### {inert} against bnb (1 and 1 runs)\n" in out
    assert f"| {inert} | 1 | 900 |" in out
    for text in (name, "<b>", "https://", "@g"):
        assert text not in out


def test_a_page_is_not_written_over_what_is_read(erg: Erg, ledger: Path, tmp_path: Path) -> None:
    before = ledger.read_text()
    code, _, err = erg("compare", ledger, "--html", ledger)
    assert (code, ledger.read_text()) == (2, before)
    assert "not an HTML page, so it is not replaced; name another" in err
    code, _, err = erg("compare", ledger, "--html", tmp_path / "none" / "page.html")
    assert code == 2
    assert "none does not exist" in err


def test_what_is_not_comparable_exits_1_and_says_why(erg: Erg, tmp_path: Path) -> None:
    ledger = written(tmp_path / "energy_results.csv", seq_len=2048)
    code, out, _ = erg("compare", ledger)
    assert code == 1
    assert "not comparable: sequence length differs (1024 / 2048)" in out
    assert "faster" not in out
    code, out, _ = erg("compare", ledger, "--anyway")
    assert code == 0
    assert "unsloth 1.31x faster" in out
    assert "not comparable: sequence length differs" in out


def test_a_metric_and_a_confidence_of_ones_own(erg: Erg, ledger: Path) -> None:
    _, out, _ = erg("compare", ledger, "--metric", "tok_per_s", "--confidence", "0.99")
    assert "99 % interval" in out
    assert "energy" not in out
    code, _, err = erg("compare", ledger, "--metric", "tok_per_sec")
    assert code == 2
    assert "did you mean" in err


def test_broken_rows_are_told_and_do_not_end_it(erg: Erg, ledger: Path) -> None:
    with ledger.open("a") as file:
        file.write("half a row,sft\n")
    code, out, _ = erg("compare", ledger)
    assert code == 0
    assert "line 8: 2 cells" in " ".join(out.split())


def trained(path: Path, *, seconds: float) -> None:
    """Twenty steps on a GPU that draws 250 W; the loss falls from 3 by 0.1 a step."""
    steps = [
        Step(
            round(i * seconds * S),
            round((i + 1) * seconds * S),
            index=i,
            tokens_computed=100,
            loss=3.0 - 0.1 * i,
        )
        for i in range(20)
    ]
    samples = [Sample(t * S // 10, GPU.id, power_w=250.0) for t in range(-10, 410)]
    add_writer(make_run(path), steps=steps, samples=samples, devices=[GPU])


def test_folders_of_runs_and_the_way_to_a_target(erg: Erg, tmp_path: Path) -> None:
    """Steps of 1 s and of 2 s, a percent more or less: to a loss of 2 it takes 13 of them."""
    for number, more in enumerate((0.99, 1.0, 1.01)):
        trained(tmp_path / "quick" / str(number), seconds=1.0 * more)
        trained(tmp_path / "slow" / str(number), seconds=1.95 * more)
    code, out, _ = erg(
        "compare", tmp_path / "quick", tmp_path / "slow", "--target-loss", "2.001", "--json"
    )
    assert code == 0
    whole = json.loads(out)
    assert whole["group_by"] == ["source"]
    quick, slow = (one["means"]["target.time_s"]["value"] for one in whole["groups"])
    assert quick == pytest.approx(13, rel=1e-3)
    assert slow == pytest.approx(13 * 1.95, rel=1e-3)
    joules = whole["groups"][0]["means"]["target.energy_j"]["value"]
    assert joules == pytest.approx(13 * 250, rel=0.01)
    assert any("mean of the last 5 recorded losses" in note for note in whole["notes"])


def counted(path: Path, *, steps: int, flops: float, stalls_s: float = 0.0) -> Path:
    """A run that tells no workload: steps of 1 s, every fifth of them longer; its FLOPs."""
    each = [
        Step(
            i * S + round(i // 5 * stalls_s * S),
            (i + 1) * S + round((i + 1) // 5 * stalls_s * S),
            index=i,
            tokens_computed=100,
            loss=2.0,
        )
        for i in range(steps)
    ]
    work = Flops(flops * 100, "exact", "analytic", tokens_per_step=100)
    header = {"flops": [asdict(work)]}
    samples = [Sample(t * S // 10, GPU.id, power_w=250.0) for t in range(-10, 15 * steps)]
    add_writer(make_run(path), steps=each, samples=samples, devices=[GPU], header=header)
    return path


def test_runs_that_tell_no_workload_are_not_taken_to_do_the_same(erg: Erg, tmp_path: Path) -> None:
    """40 steps of 6 GFLOP a token against 37 of 4: nothing says that one of them is LoRA."""
    full = counted(tmp_path / "full", steps=40, flops=6e9)
    lora = counted(tmp_path / "lora", steps=37, flops=4e9)
    html = tmp_path / "page.html"
    code, out, _ = erg("compare", full, lora, "--json", "--html", html)
    (pair,) = json.loads(out)["pairs"]
    assert code == 0
    assert "what is tuned" in pair["unknown"]
    assert pair["explanations"] == ["FLOPs per token (6 GFLOP, exact / 4 GFLOP, exact)"]
    (loss,) = [one for one in pair["verdicts"] if one["metric"] == "training.loss"]
    assert loss["words"] == "training loss: not comparable: number of steps differs (40 / 37)"
    assert "not checked, since a side lacks it: model" in html.read_text()


def test_a_page_without_differences_says_what_it_could_not_see(erg: Erg, tmp_path: Path) -> None:
    runs = [counted(tmp_path / name, steps=40, flops=6e9) for name in ("a", "b")]
    html = tmp_path / "page.html"
    erg("compare", *runs, "--html", html)
    assert (
        "No recorded fact differs. Not checked, since a side lacks it: model, data set"
        in html.read_text()
    )


def unbroken(text: str) -> str:
    """Without blanks: a path that is longer than the line is broken anywhere."""
    return "".join(text.split())


def test_a_run_that_is_not_fit_is_compared_and_said_to_be(erg: Erg, tmp_path: Path) -> None:
    even = counted(tmp_path / "even", steps=40, flops=6e9)
    unfit = counted(tmp_path / "stalls", steps=40, flops=6e9, stalls_s=4.0)
    code, _, _ = erg("check", unfit)
    assert code == 1
    _, out, _ = erg("compare", even, unfit, "--json")
    (note,) = [one for one in json.loads(out)["notes"] if "not fit" in one]
    assert note.startswith(f"{unfit}: not fit to be compared: steps per second are known to ")
    assert note.endswith("(`erg check`)")
    html = tmp_path / "page.html"
    _, out, _ = erg("compare", even, unfit, "--html", html)
    said = unbroken(out)
    care = unbroken(f"compare with care: {unfit}: not fit")
    assert said.index(care) < said.index("stallsagainsteven")
    verdicts = html.read_text().partition('id="verdicts"')[2].partition("</section>")[0]
    assert f"<li>compare with care: {unfit}: not fit to be compared: steps" in verdicts


def test_what_was_left_out_stands_with_the_verdicts(erg: Erg, tmp_path: Path) -> None:
    whole = counted(tmp_path / "whole", steps=40, flops=6e9)
    cut = make_run(tmp_path / "cut", name="cut")
    add_writer(cut, steps=even_steps(40), marks=[Mark(40 * S, "ended", "killed by SIGTERM")])
    html = tmp_path / "page.html"
    _, out, _ = erg("compare", whole, cut, "--html", html)
    said, why = unbroken(out), f"left out: {cut}: it did not finish (killed by SIGTERM)"
    assert said.index(unbroken(why)) < said.index("notes-")
    verdicts = html.read_text().partition('id="verdicts"')[2].partition("</section>")[0]
    assert "One group: nothing to compare it with." in verdicts
    assert f"<li>{why}</li>" in verdicts


def test_one_run_compares_with_nothing(erg: Erg, tmp_path: Path) -> None:
    code, out, _ = erg("compare", counted(tmp_path / "run", steps=40, flops=6e9))
    assert code == 1
    assert "one group: nothing to compare it with" in out


def test_the_script_of_the_guide(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python scripts/analyze_energy.py outputs/energy_results.csv`, which never existed."""
    script = str(ROOT / "scripts" / "analyze_energy.py")
    monkeypatch.setattr(sys, "argv", [script, str(ledger)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert not ended.value.code
    assert "1.31x faster" in capsys.readouterr().out


@pytest.mark.parametrize(("backends", "code"), [({"bnb"}, 0), ({"bnb", "unsloth"}, 1)])
def test_the_script_of_the_guide_shows_a_single_backend(
    ledger: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    backends: set[str],
    code: int,
) -> None:
    """`make compare` after `make measure-bnb`; two that can't be compared stay an error."""
    with ledger.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["backend"] in backends]
    rows[0]["seq_len"] = "77"
    with ledger.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    script = str(ROOT / "scripts" / "analyze_energy.py")
    monkeypatch.setattr(sys, "argv", [script, str(ledger)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert (ended.value.code or 0) == code
    assert "bnb " in capsys.readouterr().out


def test_nothing_there(erg: Erg, tmp_path: Path) -> None:
    code, _, err = erg("compare", tmp_path / "absent.csv")
    assert code == 1
    assert "no run, folder or ledger at" in err


def test_the_axis_of_the_page_is_the_one_that_was_asked_for(erg: Erg, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    for name in ("a", "b"):
        trained(tmp_path / name, seconds=1.0)
    asked = ("compare", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "page.html")
    code, _, err = erg(*asked, "--x", "step")
    assert (code, "page.html" in err) == (0, True)
    page = (tmp_path / "page.html").read_text()
    assert '<input type="radio" name="x" value="step" autocomplete="off" checked>' in page
    assert page.count(" checked>") == 1
    code, _, err = erg("compare", tmp_path / "a", "--x", "step")
    assert (code, err) == (2, "erg: --x step is for the page: give --html FILE too\n")

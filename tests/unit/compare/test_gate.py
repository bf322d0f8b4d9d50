"""`erg gate` on runs, ledgers, bench cells and tables: verdicts, exit codes and error rates."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.tables import as_table
from ergmeter.compare.comparison import compare
from ergmeter.compare.entry import Entry, SourceEntries
from ergmeter.compare.gate import Gate, gate, parse_noise, parse_rule
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.sources import read_entries
from ergmeter.records import Mark, Reading, Step
from ergmeter.stats.intervals import quantile
from ergmeter.stats.ratio import benjamini_hochberg, holm
from tests.runs import add_writer, make_run
from tests.unit.bench.rows import repeats, row, write_table

Erg = Callable[..., tuple[int, str, str]]
SPEED = "tokens_per_s -3%"
RATE = "throughput.real_tokens_per_s"
S = 10**9
H200 = Path(__file__).parents[2] / "data" / "h200_backends"
H200_REPEATS = Path(__file__).parents[2] / "data" / "h200_repeats.csv"


def run(path: Path, *, step_s: float = 1.0, steps: int = 20, **workload: Any) -> Path:
    """A run of steps of 1,000 tokens, of this length."""
    made = make_run(path)
    length = round(step_s * S)
    add_writer(
        made,
        steps=[
            Step(i * length, (i + 1) * length, index=i, tokens_computed=1000, tokens_real=1000)
            for i in range(steps)
        ],
        header={"workload": workload},
    )
    return path


def folder(path: Path, *step_s: float, **workload: Any) -> Path:
    """A folder of runs, one for each length of a step."""
    for number, length in enumerate(step_s):
        run(path / f"run-{number}", step_s=length, **workload)
    return path


def entries(values: Any, **fields: Any) -> list[Entry]:
    return [
        Entry("x", "x", {}, {RATE: Reading(float(v), "tokens/s", "measured")}, **fields)
        for v in values
    ]


def judged(new: Any, ref: Any, rules: Any = (SPEED,), **asked: Any) -> Gate:
    return gate(entries(new), entries(ref), rules, **asked)


# -- the command -----------------------------------------------------------------------------------


def test_two_folders_of_runs_are_judged_by_their_scatter(tmp_path: Path, erg: Erg) -> None:
    ref = folder(tmp_path / "ref", 1.0, 1.004, 0.996)
    slow = folder(tmp_path / "slow", 1.06, 1.064, 1.056)
    same = folder(tmp_path / "same", 1.001, 1.003, 0.997)
    code, out, _ = erg("gate", slow, ref, "--rule", SPEED)
    assert code == 1
    assert out.startswith("worse than is allowed (1 worse)\n")
    assert "-5.7 % (1000 to 943.4)" in out
    assert "Benjamini-Hochberg, 1 test)" in " ".join(out.split())
    assert erg("gate", same, ref, "--rule", SPEED)[0] == 0


def test_one_run_against_one_run_is_inconclusive_unless_a_noise_is_stated(
    tmp_path: Path, erg: Erg
) -> None:
    new, ref = run(tmp_path / "new", step_s=1.06), run(tmp_path / "ref")
    code, out, _ = erg("gate", new, ref, "--rule", SPEED)
    assert code == 0
    assert "of single runs, whose noise is not known" in out
    assert erg("gate", new, ref, "--rule", SPEED, "--strict")[0] == 1
    assert erg("gate", new, ref, "--rule", SPEED, "--noise", "1%")[0] == 1
    assert erg("gate", new, ref, "--rule", SPEED, "--noise", "8%")[0] == 0


def test_other_work_is_not_comparable(tmp_path: Path, erg: Erg) -> None:
    new = folder(tmp_path / "new", 1.0, 1.1, seq_len=2048)
    ref = folder(tmp_path / "ref", 1.0, 1.1, seq_len=1024)
    code, out, _ = erg("gate", new, ref, "--rule", SPEED)
    assert code == 3
    assert "not comparable: sequence length differs (1024 / 2048)" in out


def test_what_can_not_be_read_is_exit_code_4_and_misuse_is_2(tmp_path: Path, erg: Erg) -> None:
    ref = run(tmp_path / "ref")
    assert erg("gate", ref, tmp_path / "nowhere")[0] == 4
    damaged = tmp_path / "damaged.parquet"
    damaged.write_text("PAR1")
    code, _, said = erg("gate", damaged, ref)
    assert (code, said.count("\n")) == (4, 1)
    assert erg("gate", ref, ref, "--rule", "tokens_per_s by 3")[0] == 2
    assert erg("gate", ref, ref, "--rule", "token_per_s -3%")[0] == 2
    code, _, said = erg("gate", ref, ref, "--rule", "mfu -3%")
    assert code == 2
    assert said.startswith("erg gate: nothing to judge by mfu: ")


def test_a_run_that_failed_is_worse(tmp_path: Path, erg: Erg) -> None:
    ref = run(tmp_path / "ref")
    lost = make_run(tmp_path / "lost")
    marks = [Mark(2 * S, "ended", "exit code 1")]
    add_writer(lost, steps=[Step(0, S, index=0, tokens_computed=1)], marks=marks)
    code, out, _ = erg("gate", lost, ref)
    assert code == 1
    assert "failed in NEW, worked in REF; error: it did not finish (exit code 1)" in out


def test_two_ledgers_are_judged_backend_by_backend(tmp_path: Path, erg: Erg) -> None:
    def ledger(name: str, **rates: list[float]) -> Path:
        lines = ["backend,tok_per_s,tokens_processed,wall_s,window_s"]
        lines += [f"{b},{r},{r * 100},100,100" for b, values in rates.items() for r in values]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    ref = ledger("ref.csv", a=[1000, 1004, 996], b=[500, 502, 498])
    new = ledger("new.csv", a=[1000, 1003, 997], b=[450, 452, 448])
    code, out, _ = erg("gate", new, ref, "--rule", "tok_per_s -3%", "--format", "json")
    assert code == 1
    states = {one["cell"]: one["state"] for one in json.loads(out)["judgements"]}
    assert states == {"backend a": "pass", "backend b": "red"}


def test_two_tables_and_a_run_against_a_cell(tmp_path: Path, erg: Erg) -> None:
    paths = [tmp_path / "new.parquet", tmp_path / "ref.csv"]
    for path, factor in zip(paths, (0.9, 1.0), strict=True):
        rows = repeats("g", "real_tokens_per_s", [factor * x for x in (1000.0, 1004.0, 996.0)])
        write_table(as_table(rows), path)
    assert erg("gate", *paths, "--rule", SPEED)[0] == 1
    cell = Cell(0, "abc", "s", {}, num_gpus=1, repeat=1, command=("x",))
    place = tmp_path / "results" / "exp_0"
    place.mkdir(parents=True)
    (place / "cell.json").write_text(json.dumps(cell.to_json()))
    (place / "status.json").write_text(json.dumps({"status": "ok"}))
    run(place / "run", step_s=1.0)
    new = run(tmp_path / "run", step_s=1.1)
    for ref in (place, place.parent):
        code, out, _ = erg("gate", new, ref, "--rule", SPEED, "--noise", "1%")
        assert code == 1, out
        assert "-9.1 % (1000 to 909.1)" in out
    assert erg("gate", place, new, "--rule", SPEED, "--noise", "1%")[0] == 0


def test_inconclusive_is_a_verdict_of_its_own_in_every_form(tmp_path: Path, erg: Erg) -> None:
    ref = folder(tmp_path / "ref", 1.0, 1.1, 0.9)
    new = folder(tmp_path / "new", 1.05, 1.15, 0.95)
    asked = ("gate", new, ref, "--rule", SPEED, "--format")
    assert json.loads(erg(*asked, "json")[1])["state"] == "inconclusive"
    assert "\n| inconclusive | new | tokens_per_s -3% | -4.8 % (" in erg(*asked, "md")[1]
    suite = ElementTree.fromstring(erg(*asked, "junit")[1])
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("1", "0", "1")
    (skipped,) = suite.iter("skipped")
    assert (skipped.get("message") or "").startswith("inconclusive: -4.8 %")
    (result,) = json.loads(erg(*asked, "sarif")[1])["runs"][0]["results"]
    assert (result["level"], result["ruleId"]) == ("note", SPEED)
    lines = erg(*asked, "github")[1].splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::warning", "::warning"]
    assert "tokens_per_s -3%25: -4.8 %25" in lines[1]


# -- statistics ------------------------------------------------------------------------------------


def rates(random: np.random.Generator, scatter: float, runs: int, slower: float = 1.0) -> Any:
    """Tokens/s of runs of 100 steps: noise between runs, and autocorrelated step times."""
    noise = random.normal(0.0, 0.05, (runs, 100))
    for step in range(1, 100):
        noise[:, step] += 0.8 * noise[:, step - 1]
    seconds = 0.1 * slower * (1.0 + random.normal(0.0, scatter, (runs, 1))) * np.exp(noise)
    return 100 * 1000 / seconds.sum(axis=1)


@pytest.mark.parametrize("scatter", [0.0, 0.01, 0.03])
def test_pairs_of_equal_runs_are_red_in_at_most_one_case_of_twenty(scatter: float) -> None:
    random = np.random.default_rng(22)
    pairs = 1000
    red = [
        judged(rates(random, scatter, 3), rates(random, scatter, 3)).state == "worse"
        for _ in range(pairs)
    ]
    assert sum(red) <= 0.05 * pairs
    # One run on each side never says how runs scatter, whatever the interval within it.
    single = [judged(rates(random, scatter, 1), rates(random, scatter, 1)) for _ in range(100)]
    assert {one.state for one in single} == {"inconclusive"}


def test_real_repeats_of_one_backend_are_red_in_one_case_of_twenty() -> None:
    """Seven runs of each of three backends on an H200: every split into three and four, both ways.

    Three runs of each were made two hours before the other four, and are slower by 7 to 9 %. So the
    splits by session are no A/A pairs; without them 6 of 204 are red.
    """
    by_backend: dict[str | None, list[Entry]] = {}
    for entry in read_entries([H200]).entries:
        by_backend.setdefault(entry.facts.get("backend"), []).append(entry)
    assert [len(several) for several in by_backend.values()] == [7, 7, 7]
    red = []
    for several in by_backend.values():
        for chosen in itertools.combinations(range(7), 3):
            three = [several[i] for i in chosen]
            four = [entry for i, entry in enumerate(several) if i not in chosen]
            for new, ref in ((three, four), (four, three)):
                found = gate(new, ref, [SPEED, "joules_per_token +3%"])
                assert found.verdicts[0].key == "throughput.tokens_per_s"
                red.append(found.state == "worse")
    assert len(red) == 210
    assert sum(red) <= 0.05 * len(red)


def test_repeats_of_one_hour_are_red_in_at_most_one_case_of_twenty() -> None:
    """Twenty trainings of nanoGPT (124M), one after another on one H200; three against three.

    They scatter by 0.4 %, so the rule is a tenth of a percent: under 3 % none would be red.
    """
    with H200_REPEATS.open(encoding="utf-8") as file:
        runs = [
            Entry(
                "nanoGPT",
                "nanoGPT",
                {},
                {
                    key: Reading(float(row[column]), unit, "measured")
                    for key, column, unit in (
                        ("throughput.tokens_per_s", "tokens_per_s", "tokens/s"),
                        ("energy.joules_per_token", "joules_per_token", "J/token"),
                    )
                },
            )
            for row in csv.DictReader(file)
        ]
    assert len(runs) == 20
    random = np.random.default_rng(22)
    pairs, red = 300, 0
    for _ in range(pairs):
        chosen = [runs[i] for i in random.permutation(20)[:6]]
        rules = ["tokens_per_s -0.1%", "joules_per_token +0.1%"]
        red += gate(chosen[:3], chosen[3:], rules).state == "worse"
    assert 0 < red <= 0.05 * pairs


def predicted_power(effect: float, limit: float, noise: float, repeats: int) -> float:
    """The chance that a change is beyond the limit and its one-sided t-test significant at 5 %.

    From draws of the means and variances of both sides, with Welch's degrees of freedom.
    """
    random, draws = np.random.default_rng(6), 200_000
    change = random.normal(math.log1p(-effect), noise * math.sqrt(2.0 / repeats), draws)
    new, ref = noise**2 * random.chisquare(repeats - 1, (2, draws)) / (repeats - 1)
    dof = (repeats - 1) * (new + ref) ** 2 / (new**2 + ref**2)
    table = np.linspace(repeats - 1, 2 * repeats - 2, 200)
    critical = np.interp(dof, table, [quantile(0.95, each) for each in table])
    significant = change < -critical * np.sqrt((new + ref) / repeats)
    return float(np.mean(significant & (change < math.log1p(-limit))))


@pytest.mark.parametrize(("noise", "repeated"), [(0.01, 3), (0.02, 3), (0.02, 5)])
def test_a_loss_of_five_percent_is_found_at_the_predicted_power(
    noise: float, repeated: int
) -> None:
    random = np.random.default_rng(5)
    pairs = 600
    found = 0
    for _ in range(pairs):
        new = 950.0 * np.exp(random.normal(0.0, noise, repeated))
        ref = 1000.0 * np.exp(random.normal(0.0, noise, repeated))
        found += judged(new, ref).state == "worse"
    power = predicted_power(0.05, 0.03, noise, repeated)
    error = math.sqrt(max(power * (1.0 - power), 0.25 / pairs) / pairs)
    assert abs(found / pairs - power) <= 3.0 * error


def test_metrics_that_are_transforms_of_one_another_count_once() -> None:
    def sides(factor: float) -> list[Entry]:
        values = [factor * x for x in (1000.0, 1004.0, 996.0)]
        return [
            Entry(
                "x",
                "x",
                {},
                {
                    RATE: Reading(v, "tokens/s", "measured"),
                    "throughput.samples_per_s": Reading(v / 10, "samples/s", "measured"),
                    "utilization.mfu_frac": Reading(v / 2500, "frac", "measured"),
                    "energy.joules_per_token": Reading(500 / v, "J/token", "measured"),
                },
            )
            for v in values
        ]

    rules = [SPEED, "samples_per_s -3%", "mfu -3%", "joules_per_token +3%"]
    found = gate(sides(0.9), sides(1.0), rules)
    assert found.count("worse") == 4
    assert found.family == 2


def test_a_stated_noise_is_of_its_metric() -> None:
    options = CompareOptions(noise=parse_noise(["tokens_per_s=1%"]))
    assert judged([900.0], [1000.0], options=options).state == "worse"
    options = CompareOptions(noise=parse_noise(["loss=1%"]))
    assert judged([900.0], [1000.0], options=options).state == "inconclusive"


def test_holm_and_benjamini_hochberg_by_hand() -> None:
    # Holm (1979): 0.01 <= 0.05/4, 0.013 <= 0.05/3, 0.03 > 0.05/2: the rest is not rejected.
    assert holm([0.03, 0.01, 0.04, 0.013], 0.05) == [False, True, False, True]
    # Benjamini and Hochberg (1995), their example of 15 p-values: the first four are rejected.
    example = (
        *(0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240),
        *(0.4262, 0.5719, 0.6528, 0.7590, 1.0),
    )
    assert benjamini_hochberg(example, 0.05) == 0.0095
    assert benjamini_hochberg([0.5], 0.05) == -1.0


def test_two_analyses_are_judged_under_one_convention(tmp_path: Path, erg: Erg) -> None:
    def output(name: str, mfu: float, **more: Any) -> Path:
        path = tmp_path / name
        body = {
            "format": 1,
            "convention": "exact",
            "mfu_percent": mfu,
            "batch_size": 8,
            "sequence_length": 2048,
            "num_nodes": 1,
            "hardware_backend": "trn1",
            "throughput_seq_per_sec": mfu / 4,
            "training_score": mfu / 10,
        }
        path.write_text(json.dumps({**body, **more}))
        return path

    ref, new = output("ref.json", 40.0), output("new.json", 36.0)
    code, out, _ = erg("gate", new, ref, "--rule", "mfu -3%", "--noise", "1%", "--json")
    assert code == 1
    (one,) = json.loads(out)["judgements"]
    assert (one["state"], one["figure"]["new"]) == ("red", pytest.approx(0.36))
    assert erg("gate", ref, new, "--rule", "mfu -3%", "--noise", "1%")[0] == 0
    assert erg("gate", new, ref, "--rule", "analysis.score -3%", "--noise", "1%")[0] == 1
    other = output("other.json", 40.0, convention="palm")
    code, out, _ = erg("gate", other, ref, "--rule", "mfu -3%", "--noise", "1%")
    assert code == 3
    assert "not comparable: convention of FLOPs differs (exact / palm)" in out


# -- what must not be judged, or not so ------------------------------------------------------------


def two_metrics(rate: list[float], mfu: list[float]) -> list[Entry]:
    return [
        replace(
            entry, figures={**entry.figures, "utilization.mfu_frac": Reading(m, "frac", "derived")}
        )
        for entry, m in zip(entries(rate), mfu, strict=True)
    ]


def test_a_noisy_metric_does_not_borrow_the_p_value_of_its_transform() -> None:
    new = two_metrics([96.0, 105.0, 87.0], [0.396, 0.3961, 0.3959])
    ref = two_metrics([100.0, 110.0, 90.0], [0.4, 0.4001, 0.3999])
    found = gate(new, ref, [SPEED, "mfu -3%"])
    assert [one.state for one in found.verdicts] == ["inconclusive", "pass"]


def test_configurations_of_one_name_are_judged_apart(tmp_path: Path, erg: Erg) -> None:
    def table(path: Path, steady: float, noisy: list[float]) -> Path:
        rows = []
        for group, values in (("a", [steady, steady + 1, steady - 1]), ("b", noisy)):
            rows += [
                row(group=group, repeat=i, settings={"training_data_path": group}, scenario="s",
                    real_tokens_per_s=value)
                for i, value in enumerate(values)
            ]  # fmt: skip
        write_table(as_table(rows), path)
        return path

    new = table(tmp_path / "new.csv", 990.0, [96.0, 105.0, 87.0])
    ref = table(tmp_path / "ref.csv", 1000.0, [100.0, 110.0, 90.0])
    code, out, _ = erg("gate", new, ref, "--rule", SPEED, "--json")
    states = {one["cell"]: one["state"] for one in json.loads(out)["judgements"]}
    assert (code, states) == (0, {"s": "pass", "s (2)": "inconclusive"})


def test_failed_rows_of_a_ledger_and_damaged_runs_are_not_passed_over(
    tmp_path: Path, erg: Erg
) -> None:
    head = "tok_per_s,tokens_processed,wall_s,window_s,status"
    good, bad = "1000,100000,100,100,finished", ",,100,,exit code 1"
    paths = {}
    for name, lines in {"ref": [good, "1001,1,100,100,finished"], "new": [good, bad]}.items():
        paths[name] = tmp_path / f"{name}.csv"
        paths[name].write_text("\n".join([head, *lines]) + "\n")
    code, out, _ = erg("gate", paths["new"], paths["ref"], "--rule", "tok_per_s -3%")
    assert "1 of 2 runs failed; error: it did not finish (exit code 1)" in " ".join(out.split())
    paths["new"].write_text(f"{head}\n{bad}\n")
    assert erg("gate", paths["new"], paths["ref"], "--rule", "tok_per_s -3%")[0] == 1
    new = folder(tmp_path / "new", 1.0, 1.001)
    (new / "torn").mkdir()
    (new / "torn" / "run.json").write_text("{")
    code, out, _ = erg("gate", new, folder(tmp_path / "ref", 1.0, 1.001), "--rule", SPEED)
    assert code == 0
    assert "left out: " in out


def test_a_column_to_match_by_exempts_nothing(tmp_path: Path, erg: Erg) -> None:
    new = folder(tmp_path / "new", 1.0, 1.001, batch_size=4, grad_accum=4)
    ref = folder(tmp_path / "ref", 1.0, 1.001, batch_size=4, grad_accum=1)
    assert erg("gate", new, ref, "--rule", SPEED)[0] == 3
    assert erg("gate", new, ref, "--rule", SPEED, "--by", "batch_size")[0] == 3


def test_runs_in_folders_named_like_cells_are_runs(tmp_path: Path, erg: Erg) -> None:
    for side, lengths in (("new", (2.0, 2.001)), ("ref", (1.0, 1.001))):
        for number, length in enumerate(lengths):
            run(tmp_path / side / f"exp_{number}", step_s=length)
    assert erg("gate", tmp_path / "new", tmp_path / "ref", "--rule", SPEED)[0] == 1


def test_a_reference_that_has_not_run_is_no_pass() -> None:
    pending = entries([1.0], status="pending")
    found = gate(entries([1.0]), pending, [SPEED])
    assert [(one.state, one.words) for one in found.remarks] == [
        ("inconclusive", "not done in REF (pending)")
    ]


@pytest.mark.parametrize(
    "damage", [{"settings": "not json"}, {"settings": "[1]"}, {"missing": "{"}, {"status": None}]
)
def test_a_damaged_row_is_exit_code_4(damage: dict[str, Any], tmp_path: Path, erg: Erg) -> None:
    good = repeats("g", "real_tokens_per_s", [1.0])
    write_table(as_table(good), tmp_path / "good.csv")
    write_table(as_table([{**good[0], **damage}]), tmp_path / "bad.csv")
    code, _, said = erg("gate", tmp_path / "bad.csv", tmp_path / "good.csv")
    assert (code, said.count("\n")) == (4, 1), said


def test_several_trainings_of_one_run_are_to_be_named(tmp_path: Path, erg: Erg) -> None:
    with_two = make_run(tmp_path / "two")
    for number in (1, 2):
        add_writer(
            with_two,
            steps=[
                Step(i * S, (i + 1) * S, index=i, tokens_computed=1000)
                for i in range(20 * (number - 1), 20 * number)
            ],
            header={"training": {"id": str(number), "model": f"m{number}"}},
        )
    code, _, said = erg("gate", with_two, with_two, "--rule", SPEED)
    assert code == 2
    assert "has 2 trainings: name one of them" in said
    new, ref = run(tmp_path / "new"), run(tmp_path / "ref")
    code, _, said = erg("gate", new, ref, "--rule", SPEED, "--noise", with_two)
    assert code == 2
    assert "has 2 trainings: name one of them" in said


def test_sarif_has_a_location_and_each_rule_once(tmp_path: Path, erg: Erg) -> None:
    ref = folder(tmp_path / "ref", 1.0, 1.001, seq_len=1)
    new = folder(tmp_path / "new", 1.2, 1.201, seq_len=2)
    asked = ("gate", new, ref, "--rule", SPEED, "--rule", SPEED, "--format")
    code, out, _ = erg(*asked, "sarif")
    (made,) = json.loads(out)["runs"]
    assert code == 3
    assert [rule["id"] for rule in made["tool"]["driver"]["rules"]] == [SPEED, "remark"]
    assert made["results"][0]["level"] == "error"
    assert all(one["locations"][0]["physicalLocation"] for one in made["results"])
    suite = ElementTree.fromstring(erg(*asked, "junit")[1])
    assert suite.get("errors") == "1"
    assert erg(*asked, "github")[1].startswith("::error")


def test_a_size_is_in_the_unit_of_the_name() -> None:
    assert parse_rule("vram_peak_MB +100").high == pytest.approx(100e6)
    assert parse_rule("memory.device_peak_bytes +100").high == 100.0


# -- noise that was measured on other repeats -----------------------------------------------------


def test_noise_is_measured_on_repeats_under_a_path(tmp_path: Path, erg: Erg) -> None:
    new, ref = run(tmp_path / "new", step_s=1.06), run(tmp_path / "ref")
    quiet = folder(tmp_path / "quiet", 1.0, 1.004, 0.996, 1.002, 0.998)
    asked = ("gate", new, ref, "--rule", SPEED, "--json")
    code, out, _ = erg(*asked, "--noise", quiet)
    found = json.loads(out)
    figure = found["judgements"][0]["figure"]
    logs = np.log([1.0, 1.004, 0.996, 1.002, 0.998])
    assert (code, found["state"]) == (1, "red")
    assert figure["noise"] == pytest.approx(np.std(logs, ddof=1))
    assert figure["freedom"] == 4
    assert figure["error"] == pytest.approx(np.std(logs, ddof=1) * math.sqrt(2))
    named = f"noise of 5 repeats in {quiet} (4 degrees of freedom), 0.32 % a run"
    assert figure["basis"] == named
    assert f"tokens_per_s: {named}" in found["notes"]
    # Two repeats say little: Student's t with one degree of freedom, not a normal quantile.
    two = folder(tmp_path / "two", 1.0, 1.01)
    assert erg(*asked, "--noise", f"tokens_per_s={two}")[0] == 0
    assert erg("gate", new, ref, "--rule", SPEED, "--noise", "0.7%")[0] == 1
    # A noise that names its metric comes before one for all metrics, in any order.
    for noises in (("tokens_per_s=5%", quiet), (quiet, "tokens_per_s=5%")):
        given = [word for noise in noises for word in ("--noise", noise)]
        assert erg("gate", new, ref, "--rule", SPEED, *given)[0] == 0


def test_noise_is_pooled_within_the_configurations_of_a_bench(tmp_path: Path, erg: Erg) -> None:
    rows = repeats("a", "real_tokens_per_s", [100.0, 102.0])
    rows += repeats("b", "real_tokens_per_s", [1000.0, 1010.0, 990.0])
    write_table(as_table(rows), tmp_path / "bench.parquet")
    new, ref = run(tmp_path / "new", step_s=1.1), run(tmp_path / "ref")
    asked = ("gate", new, ref, "--rule", SPEED, "--json", "--noise")
    figure = json.loads(erg(*asked, tmp_path / "bench.parquet")[1])["judgements"][0]["figure"]
    squares = sum(np.var(np.log(v), ddof=1) * (len(v) - 1) for v in ([100, 102], [1000, 1010, 990]))
    assert figure["noise"] == pytest.approx(math.sqrt(squares / 3))
    assert figure["freedom"] == 3


def test_a_path_without_repeats_is_no_noise(tmp_path: Path, erg: Erg) -> None:
    new, ref = run(tmp_path / "new", step_s=1.06), run(tmp_path / "ref")
    asked = ("gate", new, ref, "--rule", SPEED, "--noise")
    code, _, said = erg(*asked, ref)
    assert code == 2
    assert "no configuration there has two runs with different tokens_per_s" in said
    same = folder(tmp_path / "same", 1.0, 1.0)  # equal to the last digit: no scatter is measured
    assert erg(*asked, same)[0] == 2
    assert erg(*asked, tmp_path / "no" / "such")[0] == 4
    for length in (1024, 2048):
        run(tmp_path / "mixed" / str(length), seq_len=length)
    code, _, said = erg(*asked, tmp_path / "mixed")
    assert code == 2
    assert "these runs are not repeats" in said


def test_json_has_the_reason_where_nothing_was_judged(tmp_path: Path, erg: Erg) -> None:
    ref = run(tmp_path / "ref")
    code, out, said = erg("gate", tmp_path / "nowhere", ref, "--format", "json")
    found = json.loads(out)
    assert (code, found["state"], found["exit_code"]) == (4, "unreadable", 4)
    assert said == f"erg gate: {found['problem']}\n"
    for name, window in (("new", "training"), ("ref", "unbroken")):
        row_of = repeats("g", "real_tokens_per_s", [1.0], rates_from="run", window=window)
        write_table(as_table(row_of), tmp_path / f"{name}.csv")
    code, out, said = erg("gate", tmp_path / "new.csv", tmp_path / "ref.csv", "--json")
    found = json.loads(out)
    assert (code, found["state"], found["exit_code"]) == (3, "not comparable", 3)
    assert said == f"erg gate: not comparable: {found['not_comparable'][0]}\n"


def test_an_unknown_column_of_runs_is_refused_with_those_there_are(
    tmp_path: Path, erg: Erg
) -> None:
    ref = folder(tmp_path / "ref", 1.0, 1.001, backend="torch", seq_len=8)
    code, _, said = erg("gate", ref, ref, "--by", "backnd")
    assert code == 2
    assert "did you mean backend? there are backend, " in said
    assert "seq_len" in said


def test_models_without_a_name_are_told_apart_by_their_flops() -> None:
    def side(flops: float, **facts: str) -> list[Entry]:
        facts = {"flops_per_token": f"{flops:g} FLOP, exact", **facts}
        return [replace(entry, facts=facts, flops_per_token=flops) for entry in entries([1.0] * 3)]

    found = gate(side(7e9), side(48e9), [SPEED])
    assert found.exit_code == 3
    assert "FLOPs per token differ more than 2 times" in found.not_comparable[0]
    assert gate(side(7e9), side(8e9), [SPEED]).exit_code == 0
    assert gate(side(7e9, model="m"), side(48e9, model="m"), [SPEED]).exit_code == 0


def test_the_pareto_front_is_corrected_over_all_pairs_of_groups() -> None:
    def group(name: str, rates: list[float]) -> list[Entry]:
        figures = [
            {
                "throughput.tokens_per_s": Reading(rate, "tokens/s", "measured"),
                "memory.device_peak_bytes": Reading(1e9, "B", "measured"),
            }
            for rate in rates
        ]
        return [Entry(f"{name}{i}", name, {"backend": name}, own) for i, own in enumerate(figures)]

    # By itself a pair with p = 0.03; among six pairs it is not shown.
    near = group("a", [100.0, 101.0, 102.0]) + group("b", [103.5, 104.5, 106.5])
    alone = compare(SourceEntries(tuple(near)), CompareOptions())
    assert alone.front is not None
    assert alone.front.beaten == {"a": ("b",)}
    others = group("c", [100.5, 101.5, 104.0]) + group("d", [100.2, 101.2, 103.9])
    several = compare(SourceEntries(tuple(near + others)), CompareOptions())
    assert several.front is not None
    assert several.front.beaten == {}
    assert several.front.remark == "Holm's method over 6 tests"


# -- nothing could be judged ----------------------------------------------------------------------


def test_ci_forms_name_an_input_that_can_not_be_read(tmp_path: Path, erg: Erg) -> None:
    asked = ("gate", tmp_path / "nowhere", run(tmp_path / "ref"), "--format")
    code, out, said = erg(*asked, "junit")
    suite = ElementTree.fromstring(out)
    assert (code, suite.get("tests"), suite.get("errors")) == (4, "1", "1")
    (error,) = suite.iter("error")
    assert said == f"erg gate: {error.get('message')}\n"
    assert "nowhere is not there" in said
    code, out, _ = erg(*asked, "sarif")
    (result,) = json.loads(out)["runs"][0]["results"]
    assert (code, result["level"], result["ruleId"]) == (4, "error", "remark")
    assert "nowhere is not there" in result["message"]["text"]
    code, out, _ = erg(*asked, "github")
    assert code == 4
    assert [line.partition("::")[2].partition(" ")[0] for line in out.splitlines()] == ["error"] * 2
    assert "nowhere is not there" in out
    code, out, _ = erg(*asked, "md")
    assert code == 4
    assert "nowhere is not there" in out


def test_json_says_that_no_configuration_is_shared(tmp_path: Path, erg: Erg) -> None:
    new = folder(tmp_path / "new", 1.0, 1.001, backend="a")
    ref = folder(tmp_path / "ref", 1.0, 1.001, backend="b")
    code, out, said = erg("gate", new, ref, "--by", "backend", "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["state"]) == (2, 2, "not judged")
    assert said == f"erg gate: {found['problem']}\n"
    assert "backend is a in NEW and b in REF" in found["problem"]
    assert found["judgements"] == []
    code, out, said = erg("gate", new, ref, "--by", "backend")
    assert (code, out) == (2, "")
    assert said.startswith("erg: no cell of NEW")


def test_sides_that_are_not_comparable_have_one_text(tmp_path: Path, erg: Erg) -> None:
    for name, window in (("new", "training"), ("ref", "unbroken")):
        row_of = repeats("g", "real_tokens_per_s", [1.0], rates_from="run", window=window)
        write_table(as_table(row_of), tmp_path / f"{name}.csv")
    code, out, said = erg("gate", tmp_path / "new.csv", tmp_path / "ref.csv")
    assert code == 3
    assert out.startswith("not comparable (nothing to judge)\n")
    assert said.startswith("erg gate: not comparable: kind of window differs (unbroken / training)")
    new = run(tmp_path / "new", seq_len=2048)
    code, out, said = erg("gate", new, run(tmp_path / "ref", seq_len=1024))
    assert code == 3
    assert out.startswith("not comparable (nothing to judge)\n")
    assert said == "erg gate: not comparable: new: sequence length differs (1024 / 2048)\n"


def test_noise_is_of_the_configuration_that_is_judged(tmp_path: Path, erg: Erg) -> None:
    new = run(tmp_path / "new", step_s=1.06, seq_len=8)
    ref = run(tmp_path / "ref", seq_len=8)
    both = tmp_path / "both"
    folder(both / "short", 1.0, 1.004, 0.996, seq_len=8)
    folder(both / "long", 1.0, 1.5, 0.6, seq_len=16)
    asked = ("gate", new, ref, "--rule", SPEED, "--json", "--noise")
    code, out, said = erg(*asked, both)
    assert code == 2
    assert "these runs are not repeats" in said
    code, out, _ = erg(*asked, both, "--by", "seq_len")
    figure = json.loads(out)["judgements"][0]["figure"]
    assert (code, figure["freedom"]) == (1, 2)
    assert figure["noise"] == pytest.approx(np.std(np.log([1.0, 1.004, 0.996]), ddof=1))
    code, out, said = erg(*asked, both / "long", "--by", "seq_len")
    assert code == 2
    assert said.startswith(f"erg gate: --noise {both / 'long'}: no run there has the")


def test_noise_of_other_work_is_not_comparable(tmp_path: Path, erg: Erg) -> None:
    new = run(tmp_path / "new", step_s=1.06, seq_len=8)
    ref = run(tmp_path / "ref", seq_len=8)
    other = folder(tmp_path / "other", 1.0, 1.004, seq_len=16)
    code, out, _ = erg("gate", new, ref, "--rule", SPEED, "--noise", other, "--json")
    found = json.loads(out)
    assert (code, found["state"]) == (3, "not comparable")
    assert found["problem"] == f"--noise {other}: sequence length differs (8 / 16)"


def test_a_noise_that_was_not_used_is_not_listed(tmp_path: Path, erg: Erg) -> None:
    quiet = folder(tmp_path / "quiet", 1.0, 1.004, 0.996)
    new, ref = folder(tmp_path / "new", 1.0, 1.002), folder(tmp_path / "ref", 1.0, 1.001)
    _, out, _ = erg("gate", new, ref, "--rule", SPEED, "--noise", quiet)
    assert "noise of" not in out


@pytest.mark.parametrize("path", ["nowhere", "no/where", "a=b/nowhere", "tokens_per_s=nowhere"])
def test_a_noise_path_that_is_not_there_can_not_be_read(
    path: str, tmp_path: Path, erg: Erg
) -> None:
    ref = run(tmp_path / "ref")
    code, _, said = erg("gate", ref, ref, "--rule", SPEED, "--noise", path)
    assert code == 4
    assert "where" in said
    assert said.count("\n") == 1


def test_requests_against_training_steps_are_other_work(tmp_path: Path, erg: Erg) -> None:
    training = run(tmp_path / "training")
    served = make_run(tmp_path / "served")
    requests = [Step(i * S, (i + 1) * S, phase="decode", tokens_computed=500) for i in range(20)]
    add_writer(served, steps=requests)
    code, out, err = erg("gate", served, training, "--rule", SPEED, "--noise", "1%")
    assert code == 3
    why = "kind of window differs (training / requests)"
    assert f"not comparable: {why}" in out
    assert err == f"erg gate: not comparable: served: {why}\n"
    out = erg("compare", training, served)[1]
    assert "not comparable: kind of window differs (training / requests)" in out
    assert "faster" not in out
    code, out, _ = erg("gate", served, served, "--rule", SPEED, "--noise", "0.1%")
    assert code == 0
    assert "kind of window" not in out
    # A row of an unbroken window can't be computed over requests, wherever its run is.
    ledger = tmp_path / "energy_results.csv"
    ledger.write_text("tok_per_s,tokens_processed,wall_s,window_s,steps\n100,1000,10,10,20\n")
    code, _, err = erg("gate", served, ledger, "--rule", SPEED, "--noise", "1%")
    assert (code, err) == (
        3, "erg gate: not comparable: served: kind of window differs (unbroken / requests)\n"
    )  # fmt: skip


def test_a_run_without_numbered_trainings_is_named_as_it_is(tmp_path: Path, erg: Erg) -> None:
    whole = run(tmp_path / "run")
    code, _, err = erg("gate", f"{whole}:2", whole, "--noise", "1%")
    assert code == 2
    assert (
        err
        == f"erg: no training 2 in {whole}: it has no numbered trainings; leave the number out\n"
    )


def test_a_summary_that_can_not_be_written_is_misuse_and_not_worse(
    tmp_path: Path, erg: Erg
) -> None:
    new = run(tmp_path / "run")
    code, out, err = erg("gate", new, new, "--markdown", tmp_path / "none" / "summary.md")
    assert (code, out) == (2, "")
    assert f"summary.md: the directory {tmp_path / 'none'} does not exist" in err

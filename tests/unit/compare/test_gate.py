"""`erg gate` on runs, ledgers, bench cells and tables: verdicts, exit codes and error rates."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ergmeter.bench import results
from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.tables import as_table
from ergmeter.compare.entry import Entry
from ergmeter.compare.gate import Gate, gate, parse_noise
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.sources import read_entries
from ergmeter.records import Mark, Reading, Step
from ergmeter.stats.intervals import quantile
from ergmeter.stats.ratio import benjamini_hochberg, holm
from tests.runs import add_writer, make_run
from tests.unit.bench.rows import repeats

Erg = Callable[..., tuple[int, str, str]]
SPEED = "tokens_per_s -3%"
RATE = "throughput.real_tokens_per_s"
S = 10**9
H200 = Path(__file__).parents[2] / "data" / "h200_backends"


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
        results.write(as_table(rows), path)
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
    """Seven runs of each of three backends on an H200: every split into three and four."""
    by_backend: dict[str | None, list[Entry]] = {}
    for entry in read_entries([H200]).entries:
        by_backend.setdefault(entry.facts.get("backend"), []).append(entry)
    assert [len(several) for several in by_backend.values()] == [7, 7, 7]
    red = []
    for several in by_backend.values():
        for chosen in itertools.combinations(range(7), 3):
            new = [several[i] for i in chosen]
            ref = [one for i, one in enumerate(several) if i not in chosen]
            found = gate(new, ref, [SPEED, "joules_per_token +3%"])
            assert found.verdicts[0].key == "throughput.tokens_per_s"
            red.append(found.state == "worse")
    # Shares come in steps of one split in 35.
    assert sum(red) / len(red) <= 0.05 + 1 / 35


def predicted_power(effect: float, limit: float, noise: float, repeats: int) -> float:
    """The chance that a change is beyond the limit and its one-sided t-test significant at 5 %.

    By numerical integration over the estimated standard deviation, equal variances on both sides.
    """
    dof = 2 * repeats - 2
    error = noise * math.sqrt(2.0 / repeats)
    shift, critical = math.log1p(-effect), quantile(0.95, dof)
    ratios = np.linspace(1e-3, 4.0, 4000)  # of the estimated to the true standard deviation
    log_density = (dof - 1) * np.log(ratios) - dof * ratios**2 / 2.0
    weights = np.exp(log_density - log_density.max())
    bounds = np.minimum(math.log1p(-limit), -critical * error * ratios)
    below = np.array([0.5 * math.erfc(-(b - shift) / error / math.sqrt(2.0)) for b in bounds])
    return float((weights * below).sum() / weights.sum())


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
    # Welch's degrees of freedom are a little below those of equal variances.
    assert power - 3.0 * error - 0.03 <= found / pairs <= power + 3.0 * error


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
